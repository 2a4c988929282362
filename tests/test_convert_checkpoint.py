"""tools/convert_checkpoint.py: import, export, inspect, and --verify against the live peers."""

import importlib.util
import json
import pathlib

import goldens
import jax
import numpy as np
import pytest

from vitplast_jax.weights import convert, export, readers

ROOT = pathlib.Path(__file__).parent.parent


def loaded(path, spec=None):
    return convert.load_tree(path, spec=spec)[1]


def same_tree(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def tool(*arguments):
    """The tool's exit status, called as a command calls it."""
    spec = importlib.util.spec_from_file_location("convert_checkpoint", ROOT / "tools" / "convert_checkpoint.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(SystemExit) as stop:
        module.main([str(argument) for argument in arguments])
    return stop.value.code


def test_tool_imports_and_exports(tmp_path, capsys):
    assert tool("import", "--source", goldens.FILES["hf"], "--output", tmp_path / "imported") == 0
    printed = capsys.readouterr().out
    assert "transformers" in printed and "6,727" in printed
    assert json.loads((tmp_path / "imported" / "model.json").read_text())["spec"]["eps"] == 1e-12
    for layout in ("hf", "timm"):
        assert (
            tool("export", "--checkpoint", tmp_path / "imported", "--output", tmp_path / layout, "--layout", layout)
            == 0
        )
    source, again = (readers.read_tensors(folder) for folder in (goldens.FILES["hf"], tmp_path / "hf"))
    assert source.keys() == again.keys()
    assert all(source[name].tobytes() == again[name].tobytes() for name in source)
    assert same_tree(loaded(tmp_path / "timm"), loaded(goldens.FILES["hf"]))
    assert tool("import", "--source", goldens.FILES["hf"], "--output", tmp_path / "imported") == 0  # again is no error
    (tmp_path / "imported" / "mine.txt").touch()
    assert tool("import", "--source", goldens.FILES["hf"], "--output", tmp_path / "imported") == 1
    assert (tmp_path / "imported" / "mine.txt").exists()


def test_tool_fails_in_one_line(tmp_path, capsys):
    for arguments, status in (
        (("inspect", "--source", tmp_path / "nothing"), 1),
        (("inspect", "--source", goldens.FILES["token"]), 1),
        (("export", "--checkpoint", tmp_path, "--output", tmp_path / "x", "--layout", "timm"), 1),
        (("export", "--checkpoint", tmp_path, "--output", tmp_path / "x", "--layout", "tim"), 2),
        (("import", "--source", tmp_path), 2),
        (("improt",), 2),
    ):
        assert tool(*arguments) == status
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------- the peers, alive


@pytest.mark.parity
@pytest.mark.parametrize("name", sorted(goldens.SPECS.keys() - {"jax"}))  # whose width has no name for --model
def test_verify_overrides_the_default_precision(name, tmp_path, capsys):
    """R22: passes, and prints its precision, whatever JAX's default is."""
    spec = goldens.SPECS[name]
    source = goldens.FILES[name]
    if name != "hf":
        source = tmp_path / "a.safetensors"
        export.save_timm(loaded(goldens.FILES[name], spec), spec, source)
    with jax.default_matmul_precision("bfloat16"):
        assert tool("import", "--source", source, "--output", tmp_path / "out", "--verify") == 0
    printed = capsys.readouterr().out
    assert "verification   equal" in printed and "matmul precision highest" in printed


@pytest.mark.parity
def test_verify_sees_a_difference(tmp_path):
    from vitplast_jax.weights import verify

    for name in ("token", "jax"):
        spec, tree, report = convert.load_tree(goldens.FILES[name], spec=goldens.SPECS[name])
        assert verify.verify(goldens.FILES[name], spec, tree, report).passed
        kernel = tree["blocks"][1]["attn"]["out"]["kernel"]
        tree["blocks"][1]["attn"]["out"]["kernel"] = kernel.T  # square: no shape can tell
        assert not verify.verify(goldens.FILES[name], spec, tree, report).passed
