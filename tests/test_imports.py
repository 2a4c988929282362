"""The rooms: who may import whom, what an import costs, and the other rules of the house that a reader relies on."""

import ast
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import vitplast_jax

PACKAGE = Path(vitplast_jax.__file__).parent
REPOSITORY = PACKAGE.parent
MODULES = sorted(PACKAGE.rglob("*.py"))

# In the order in which data flows: a module imports from its own room and from rooms above it.
ROOMS = (
    "errors",
    "files",
    "trees",
    "components",
    "sharding",
    "models",
    "weights",
    "peft",
    "data",
    "training",
    "plasticity",
)
ROOMS += ("reports", "command")
COMMANDS = ("train", "evaluate", "predict", "measure", "probe", "sweep", "report")
ONLY_IN = {"flax": ("models", "peft"), "matplotlib": ("reports/plots.py",), "tensorflow": ()}
ONLY_IN |= {peer: ("weights/verify.py",) for peer in ("torch", "timm", "transformers", "peft")}
HEAVY = ("jax", "flax", "optax", "orbax", "grain", "sklearn", "scipy", "matplotlib", "PIL", "tensorflow_datasets")


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def room_of(path: Path) -> str:
    return name_of(path).removesuffix(".py").split("/")[0]


def imported(path: Path) -> list[str]:
    """Dotted names of everything that a module imports anywhere, functions included."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def check_order(room: str, names: list[str]) -> list[str]:
    """The imports that a module of `room` must not have."""
    rank = {name: place for place, name in enumerate(ROOMS)} | {name: len(ROOMS) for name in COMMANDS}
    rooms = [name.split(".")[1] for name in names if name.startswith("vitplast_jax.")]
    return [other for other in rooms if other != room and rank.get(other, len(ROOMS)) >= rank[room]]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_rooms_import_upwards_only(path):
    if name_of(path) == "__init__.py":
        return  # lazy: names of rooms are strings there
    room = room_of(path)
    assert room in ROOMS + COMMANDS, f"no such room: {room}"
    assert not check_order(room, imported(path))


def test_the_order_check_finds_a_wrong_import():
    assert check_order("data", ["vitplast_jax.training.config", "vitplast_jax.models.vit"]) == ["training"]
    assert check_order("command", ["vitplast_jax.train.main"]) == ["train"]
    assert check_order("train", ["vitplast_jax.evaluate.main", "vitplast_jax.command"]) == ["evaluate"]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_packages_stay_in_their_rooms(path):
    for name in imported(path):
        package = name.split(".")[0]
        assert "_src" not in name.split(".") and not package.startswith("_private"), f"private: {name}"
        if name.startswith("jax.experimental"):
            assert name.startswith("jax.experimental.topologies"), name
        if package in ONLY_IN:
            assert any(name_of(path) == place or room_of(path) == place for place in ONLY_IN[package]), name


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_modules_are_short_and_say_what_they_answer(path):
    text = path.read_text()
    assert ast.get_docstring(ast.parse(text)), "no docstring"
    assert len(text.splitlines()) <= 500
    assert "util" not in path.stem


def test_configs_import_the_default_config_alone():
    for path in (REPOSITORY / "configs").glob("*.py"):
        assert imported(path) == ["vitplast_jax.training.config.default_config"], path.name
        tree = ast.parse(path.read_text())
        assert [node.name for node in tree.body if isinstance(node, ast.FunctionDef)] == ["get_config"], path.name


def loaded_by(statement: str) -> tuple[list[str], float]:
    """Which heavy packages `statement` loads in a fresh interpreter, and the seconds it takes there."""
    code = (
        f"import sys, time; t = time.perf_counter()\n{statement}\nt = time.perf_counter() - t\n"
        f"print(','.join(m for m in {HEAVY!r} if m in sys.modules), t)"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    names, _, seconds = output.stdout.strip().rpartition(" ")
    return [name for name in names.split(",") if name], float(seconds)


def test_import_takes_under_a_second_and_loads_nothing_heavy():
    runs = [loaded_by("import vitplast_jax") for _ in range(3)]
    assert runs[0][0] == []
    assert min(seconds for _, seconds in runs) < 1.0


@pytest.mark.parametrize("room", ["data", "training", "weights", "plasticity", "reports"])
def test_rooms_open_without_slow_packages(room):
    loaded, _ = loaded_by(f"import vitplast_jax.{room}")
    assert not {"grain", "sklearn", "matplotlib", "orbax", "tensorflow_datasets"} & set(loaded)


def test_config_imports_no_jax():
    assert loaded_by("import vitplast_jax.training.config, vitplast_jax.command")[0] == []


def test_public_names_resolve():
    loaded, _ = loaded_by(
        "import vitplast_jax as vp; vp.create_model, vp.load_model, vp.parameters, vp.components.mask, vp.plasticity"
    )
    assert "jax" in loaded
    with pytest.raises(AttributeError, match="no attribute 'creat_model'"):
        _ = vitplast_jax.creat_model


@pytest.mark.parametrize("command", [name for name in COMMANDS if (PACKAGE / f"{name}.py").exists()])
def test_help_answers_within_two_seconds(command):
    seconds = []
    for _ in range(3):  # the machine may be busy with other tests; the fastest counts
        start = time.perf_counter()
        run = subprocess.run(
            [sys.executable, "-X", "importtime", "-m", f"vitplast_jax.{command}", "--help"],
            capture_output=True,
            text=True,
            cwd=REPOSITORY,
            env={key: value for key, value in os.environ.items() if key != "VITPLAST_NO_REEXEC"},
        )
        seconds.append(time.perf_counter() - start)
        if seconds[-1] < 2:
            break
    assert run.returncode == 0 and min(seconds) < 2
    assert f"python -m vitplast_jax.{command}" in run.stdout and "--workdir" in run.stdout
    loaded = {line.rpartition("|")[2].strip() for line in run.stderr.splitlines()}
    assert not loaded & set(HEAVY)
