"""The measure command from a config and from a run, and train with trainable=auto: files, numbers, resumption."""

import csv
import json

import numpy as np
import pytest

from vitplast_jax import command, models, trees
from vitplast_jax.models import ViTSpec
from vitplast_jax.plasticity import experiments
from vitplast_jax.plasticity.select import trainable_line

SPEC = ViTSpec(name="tiny", img_size=(8, 8), patch_size=(4, 4), width=12, depth=2, heads=3, hidden=30, num_classes=3)


@pytest.fixture
def config_file(tmp_path):
    """A config on the digits with a small random ViT stored as a file, and a sample of images beside it."""
    from vitplast_jax.weights.export import save_timm

    spec = models.specs.replace(SPEC, img_size=28, patch_size=(7, 7))
    rng = np.random.default_rng(0)
    shapes = models.abstract_parameters(spec)
    save_timm(
        trees.map_paths(lambda _, leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes),
        spec,
        tmp_path / "small.safetensors",
    )
    images = np.random.default_rng(0).integers(0, 256, (12, 28, 28, 1), dtype=np.uint8)
    np.savez(tmp_path / "small.sample.npz", images=images, labels=np.zeros(12, np.int32))
    path = tmp_path / "config.py"
    path.write_text(
        "from vitplast_jax.training.config import default_config\n"
        "def get_config():\n"
        "    config = default_config()\n"
        f"    config.weights = {str(tmp_path / 'small.safetensors')!r}\n"
        "    config.data.name = 'digits'\n"
        "    config.measure.batch_size = 8\n"
        "    config.measure.images = 40\n"
        "    config.mesh.data = 1\n"
        "    config.batch_size = 16\n"
        "    config.steps = config.eval_every = config.checkpoint_every = 3\n"
        "    config.warmup_steps = 1\n"
        "    return config\n"
    )
    return path


def run_command(*arguments, module="measure"):
    import importlib

    called = importlib.import_module(f"vitplast_jax.{module}")
    with pytest.raises(SystemExit) as ending:
        command.run(called.main, called.__doc__, called.FLAGS, arguments)
    return ending.value.code


def test_command_writes_files_that_agree(config_file, tmp_path, capsys):
    folder = tmp_path / "out"
    assert run_command(f"--config={config_file}", f"--workdir={folder}") == 0
    printed = capsys.readouterr().out
    result = json.loads((folder / "plasticity.json").read_text())
    assert (result["pairs"], result["images_x"], result["images_y"]) == (12, 12, 12)
    with open(folder / "plasticity.csv") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(result["rows"]) == 5 * SPEC.depth
    for line, row in zip(lines, result["rows"], strict=True):
        assert (int(line["block"]), line["component"]) == (row["block"], row["component"])
        assert float(line["mean"]) == row["mean"] and float(line["quantiles_0.5"]) == row["quantiles"]["0.5"]
        assert f"{row['mean']:.3f}" in printed
    assert (folder / "plasticity.png").read_bytes()[:4] == b"\x89PNG"
    assert "12 matched pairs" in printed and trainable_line(result["recommendation"]) in printed


def test_command_without_a_sample_says_what_to_do(config_file, tmp_path, capsys):
    (tmp_path / "small.sample.npz").unlink()
    assert run_command(f"--config={config_file}", f"--workdir={tmp_path / 'out'}") == 1
    error = capsys.readouterr().err
    assert "--config.measure.x_name" in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()
    for name, says in (("folder", "measure.x_name=folder needs measure.x_path: "), ("x", "measure.x_name is 'x', ")):
        flags = [f"--config={config_file}", f"--workdir={tmp_path / 'out'}", f"--config.measure.x_name={name}"]
        assert run_command(*flags) == 1
        assert capsys.readouterr().err.startswith(f"error: {says}")


def test_command_says_first_that_the_folder_cannot_be_written(config_file, tmp_path, capsys):
    (tmp_path / "taken").write_text("")
    assert run_command(f"--config={config_file}", f"--workdir={tmp_path / 'taken' / 'out'}") == 1
    assert "taken is a file" in capsys.readouterr().err


def test_command_needs_one_of_config_and_run(tmp_path, capsys):
    assert run_command(f"--workdir={tmp_path}") == 2
    assert "--config" in capsys.readouterr().err


def test_everything_on_request(config_file, tmp_path, capsys):
    folder = tmp_path / "out"
    options = (
        "measure.gradients=True",
        "measure.ratios=True",
        "budget.params=400",
        "mesh.data=8",
        "measure.pairing=all",
    )
    code = run_command(f"--config={config_file}", f"--workdir={folder}", *(f"--config.{option}" for option in options))
    printed = capsys.readouterr()
    assert code == 0, printed.err
    result = json.loads((folder / "plasticity.json").read_text())
    assert result["pairs"] == 12 * 40 and result["budget"] == {"params": 400, "flops": None}
    assert all(row["grad_norm"] > 0 for row in result["rows"])
    assert result["gradients"]["split"] == "train" and "rank correlation" in printed.out
    chosen = result["recommendation"]["trainable"]
    assert chosen and all("@" in selector for selector in chosen)
    assert trainable_line(result["recommendation"]) in printed.out
    sizes = {f"{row['component']}@{row['block']}": row["parameters"] for row in result["rows"]}
    assert {c["trainable"][0]: c["parameters"] for c in result["choices"]["rows"]} == sizes
    with np.load(folder / "ratios.npz") as ratios:
        assert ratios["ratios"].shape == (2, 5, 12, 40)
    names = ("plasticity.csv", "plasticity.json", "plasticity.png", "plasticity_gradients.png", "ratios.npz")
    assert sorted(f.name for f in folder.iterdir()) == sorted(names)


def test_rates_and_bounds_at_two_sizes(config_file, tmp_path, capsys):
    """The weights are the same and FC1's bound with them; that of attention grows as the square root of the tokens."""
    folder = tmp_path / "out"
    assert run_command(f"--config={config_file}", f"--workdir={folder}", "--config.measure.sizes=56,28,56") == 0
    assert "against the number of tokens" in capsys.readouterr().out
    result = json.loads((folder / "plasticity.json").read_text())
    rows = {(row["component"], row["tokens"]): row for row in result["sizes"]}
    assert len(rows) == len(result["sizes"])  # each size once, its own 28 too
    assert sorted(rows) == sorted((name, n) for name in ("ln1", "mha", "ln2", "fc1", "fc2") for n in (17, 65))
    for entry in result["components"]:
        assert rows[entry["component"], 17]["mean"] == entry["mean"]
    assert rows["fc1", 17]["bound"] == rows["fc1", 65]["bound"]
    radius = rows["mha", 65]["bound"] / rows["mha", 17]["bound"] / (65 / 17) ** 0.5
    assert 0.5 < radius < 2  # what is left: the largest token norm of each size, to the fourth under the root


def test_sizes_that_cannot_be_measured_are_said_first(config_file, tmp_path, capsys, monkeypatch):
    def too_late(*arguments, **options):
        raise AssertionError("measured before it was checked")

    monkeypatch.setattr(experiments, "measure", too_late)
    assert run_command(f"--config={config_file}", f"--workdir={tmp_path / 'out'}", "--config.measure.sizes=56,30") == 1
    assert "config.measure.sizes" in capsys.readouterr().err
    assert run_command(f"--run={tmp_path}", f"--workdir={tmp_path / 'out'}", "--config.measure.sizes=56") == 1
    assert "config.measure.sizes" in capsys.readouterr().err


def test_auto_chooses_once_and_a_run_is_compared_with_its_start(config_file, tmp_path, capsys):
    folder = tmp_path / "run"
    call = (f"--config={config_file}", f"--workdir={folder}", "--config.trainable=auto")
    assert run_command(*call, "--config.steps=6", module="train") == 0, capsys.readouterr().err
    described, result = (json.loads((folder / f"{name}.json").read_text()) for name in ("config", "plasticity"))
    chosen = result["recommendation"]["trainable"]
    assert described["trainable"] == chosen and described["chosen"]["trainable"] == chosen
    assert result["split"] == "train"  # the test images stay unseen
    assert json.loads((folder / "results.json").read_text())["trainable"][: len(chosen)] == chosen
    before = (folder / "plasticity.json").stat().st_mtime_ns
    (folder / "results.json").unlink()  # as if it had been stopped
    assert run_command(*call, "--config.steps=6", module="train") == 0, capsys.readouterr().err
    assert (folder / "plasticity.json").stat().st_mtime_ns == before
    assert json.loads((folder / "config.json").read_text())["chosen"] == described["chosen"]

    after = tmp_path / "after"
    code = run_command(f"--run={folder}", f"--workdir={after}", "--config.measure.split=train")
    printed = capsys.readouterr()
    assert code == 0, printed.err
    compared = json.loads((after / "plasticity.json").read_text())
    assert "before and after" in printed.out and compared["step"] in (3, 6)
    assert compared["before"]["rows"] == [row | {"grad_norm": None} for row in result["rows"]]
    for row in compared["difference"]["rows"]:
        assert row["difference"] == pytest.approx(row["after"] - row["before"], abs=1e-6)
        if row["component"] in chosen:
            assert row["difference"] != 0 and row["low"] <= row["difference"] <= row["high"]
        else:  # given the embedding output, a component that did not train does what it did
            assert row["difference"] == row["low"] == row["high"] == 0
    assert sorted(f.name for f in after.iterdir()) == ["plasticity.csv", "plasticity.json", "plasticity.png"]


def test_auto_does_not_take_over_another_run(config_file, tmp_path, capsys):
    call = (f"--config={config_file}", f"--workdir={tmp_path}")
    old = {"format": 1, "spec": {}, "class_names": [], "base_weights": {}, "data": {}, "trainable": ["ln1"]}
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert run_command(*call, "--config.trainable=auto", module="train") == 1
    assert "holds a run whose components were named (ln1)" in capsys.readouterr().err
    assert run_command(*call, "--config.trainable=auto,mha", module="train") == 1
    assert "auto stands alone" in capsys.readouterr().err


def test_other_overrides_of_a_run_are_refused(tmp_path, capsys):
    assert run_command("--run=x", f"--workdir={tmp_path / 'o'}", "--config.steps=3") == 2
    assert "only config.measure.* and budget.*" in capsys.readouterr().err
