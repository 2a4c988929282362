"""What pip may choose: ranges, pins and imports agree, and no range admits a broken pair (PITFALLS R66)."""

import ast
import re
import runpy
import sys
import types
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parent.parent
PYTHONS = ("3.11", "3.12", "3.13")
EXTRAS = {("tables.py", "pyarrow"): "parquet", ("text.py", "tokenizers"): "text"}  # (file, package) -> extra
IMPORT_NAMES = {"PIL": "pillow", "sklearn": "scikit-learn", "orbax": "orbax-checkpoint", "absl": "absl-py"}
PEERS = {"torch", "torchvision", "timm", "transformers", "peft"}  # the extra `parity`


@pytest.fixture(scope="module")
def package():
    """The arguments that setup.py gives to setup()."""
    given = {}
    with pytest.MonkeyPatch.context() as patch:
        fake = types.SimpleNamespace(setup=given.update, find_packages=lambda **_: [])
        patch.setitem(sys.modules, "setuptools", fake)
        runpy.run_path(str(REPOSITORY / "setup.py"))
    return given


def on_python(lines, python):
    """{canonical name: specifier} of the requirements that hold on a Python version."""
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    environment = {"python_version": python}
    return {
        canonicalize_name(r.name): r.specifier for r in requirements if not r.marker or r.marker.evaluate(environment)
    }


def pins(python):
    lines = (REPOSITORY / "requirements.txt").read_text().splitlines()
    return {name: str(specifier).removeprefix("==") for name, specifier in on_python(lines, python).items()}


@pytest.mark.parametrize("python", PYTHONS)
def test_every_pin_lies_in_its_range(package, python):
    pinned = pins(python)
    for extra in ("test", "install"):
        lines = package["install_requires"] if extra == "install" else package["extras_require"][extra]
        for name, allowed in on_python(lines, python).items():
            assert name in pinned, f"requirements.txt does not pin {name}"
            assert allowed.contains(pinned[name]), f"{name}: {pinned[name]} is not in {allowed}"
            assert any(s.operator == "<" for s in allowed) or extra == "test", f"{name} has no upper bound"


@pytest.mark.parametrize("python", PYTHONS)
def test_no_python_admits_a_broken_pair(package, python):
    # measured: flax 0.12.8 and 0.12.9 fail to import on jax 0.11, so only these two rectangles are allowed
    allowed = on_python(package["install_requires"], python)
    old = [allowed["jax"].contains(v) for v in ("0.10.2", "0.10.9")] + [allowed["flax"].contains("0.12.8")]
    new = [allowed["jax"].contains(v) for v in ("0.11.1", "0.12.0.1")] + [allowed["flax"].contains("0.12.12")]
    assert (old, new) == (([True] * 3, [False] * 3) if python == "3.11" else ([False] * 3, [True] * 3))


def test_pythons_without_a_pair_are_refused(package):
    assert package["python_requires"] == ">=3.11"


def test_whatever_is_imported_is_declared(package):
    declared = {canonicalize_name(Requirement(line).name) for line in package["install_requires"]}
    for path in (REPOSITORY / "vitplast_jax").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            for name in {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) - {"vitplast_jax"}:
                if name in PEERS and path.name == "verify.py":
                    continue  # compares with the peer where it is installed
                if (path.name, name) in EXTRAS:  # asked for in one line where it is missing
                    assert package["extras_require"][EXTRAS[path.name, name]][0].startswith(name)
                    continue
                assert canonicalize_name(IMPORT_NAMES.get(name, name)) in declared, f"{path.name} imports {name}"


def test_the_owners_packages_are_there(package):
    declared = {canonicalize_name(Requirement(line).name) for line in package["install_requires"]}
    owners = {"jax", "flax", "optax", "orbax-checkpoint", "tensorflow-datasets", "ml-collections", "einops", "chex"}
    assert owners <= declared


def test_parity_pins_lie_in_their_ranges(package):
    allowed = on_python(package["extras_require"]["parity"], "3.11")
    pinned = on_python((REPOSITORY / ".ci/parity.txt").read_text().splitlines(), "3.11")
    assert set(allowed) == set(pinned) == PEERS
    for name, specifier in pinned.items():
        assert allowed[name].contains(str(specifier).removeprefix("==")), name


def test_versions_agree(package):
    import vitplast_jax

    assert package["version"] == vitplast_jax.__version__
    changelog = (REPOSITORY / "vitplast_jax/CHANGELOG.md").read_text()
    assert re.search(r"^## (\S+)", changelog, re.MULTILINE)[1] == vitplast_jax.__version__


def test_installed_jax_and_flax_are_a_tested_pair(package):
    import importlib.metadata

    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    for name in ("jax", "flax"):
        assert on_python(package["install_requires"], python)[name].contains(importlib.metadata.version(name))
