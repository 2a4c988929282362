"""Runs that train an adapter, from the config to the exported file. PITFALLS R38, R46, R51."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import REPOSITORY
from test_training import same, state_of, tiny

from vitplast_jax import command, components, models, peft, trees
from vitplast_jax.errors import UserError
from vitplast_jax.training import config as settings
from vitplast_jax.training import evaluation, loop, run

D, DEPTH = 32, 2
CONFIG = {
    "steps": 4,
    "checkpoint_every": 2,
    "eval_every": 2,
    "trainable": ("all",),
    "also_trainable": ("head",),
    "weight_decay": 0.1,
    "frozen_dtype": "bfloat16",
    "peft__method": "lora",
    "peft__rank": 4,
    "peft__projection": "ao",
    "peft__dropout": 0.2,
    "learning_rate_factors": ("peft=0.5",),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of AOFT-LoRA beside the head."""
    workdir = tmp_path_factory.mktemp("aoft")
    return workdir, loop.train_and_evaluate(tiny(**CONFIG), workdir)


def test_a_run_trains_the_adapter_and_the_head_alone(trained):
    workdir, results = trained
    assert results["trainable"] == ["peft", "head"]
    head, vectors = D * 10 + 10, DEPTH * 4 * D
    base = trees.count(models.abstract_parameters(models.specs.spec("vit_nano_patch4_8", num_classes=10)))
    assert results["parameters"] == {
        "total": base + 2 * vectors,  # the frozen start vectors belong to the model
        "trainable": vectors + head,
        "method": vectors,
        "head": head,
    }
    assert json.loads((workdir / "config.json").read_text())["peft"]["projection"] == "ao"
    first = run.read_metrics(workdir / "metrics.jsonl")[0]
    assert first["grad_norm/peft"] > 0 and "grad_norm/mha" not in first
    held = state_of(workdir, 4)
    assert not any("kernel" in path and "head" not in path for path in held) and not any("start_" in p for p in held)

    before = trees.flatten(models.initial_parameters(models.specs.spec("vit_nano_patch4_8", num_classes=10), 0))
    after = trees.flatten(models.parameters(run.load_run(workdir).model))
    for path, leaf in after.items():
        if components.is_fixed(path):
            moving = after[path.replace("start_", "")]
            assert leaf.dtype == jnp.float32 and 0 < np.abs(leaf - moving).max() < 0.1, path
        elif path in before:
            frozen = not path.startswith("head")
            expected = before[path].astype(jnp.bfloat16) if frozen else before[path]
            assert np.array_equal(np.asarray(leaf, np.float32), expected.astype(np.float32)) == frozen, path


def test_a_run_that_was_stopped_continues_with_the_same_draws(trained, tmp_path, monkeypatch):
    class Stop(Exception):
        pass

    original = run.MetricsLog.write

    def stop_at_three(self, **entry):
        original(self, **entry)
        if entry["step"] == 3:
            raise Stop

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(run.MetricsLog, "write", stop_at_three)
        loop.train_and_evaluate(tiny(**CONFIG), tmp_path)
    loop.train_and_evaluate(tiny(**CONFIG), tmp_path)
    same(state_of(tmp_path, 4), state_of(trained[0], 4))


def test_a_run_is_evaluated_saved_merged_and_exported(trained, tmp_path):
    workdir, results = trained
    evaluated, _ = evaluation.evaluate_run(workdir)
    assert evaluated["accuracy"] == results["test"]["accuracy"] and evaluated["count"] == 359

    model, images = run.load_run(workdir).model, jnp.asarray(np.random.RandomState(0).randn(2, 8, 8, 3), jnp.float32)
    peft.save(model, tmp_path / "adapter")
    start = models.create_model("vit_nano_patch4_8", num_classes=10)
    again = peft.load(start, tmp_path / "adapter")  # the run kept its frozen weights in bfloat16, the file says so
    np.testing.assert_array_equal(again(images), model(images))
    np.testing.assert_allclose(peft.merge(model)(images), model(images), atol=1e-5)

    peft.save_hf_peft(model, tmp_path / "hf")
    described = json.loads((tmp_path / "hf" / "adapter_config.json").read_text())
    assert described["target_modules"] == ["blocks.0.attn.qkv", "blocks.1.attn.qkv"] and described["r"] == 16
    assert described["modules_to_save"] == ["head"]


def test_a_config_says_what_trains_beside_an_adapter():
    def trainable(**overrides):
        return settings.validate({key.replace("__", "."): value for key, value in overrides.items()}).trainable

    assert trainable(peft__method="lora") == ("peft",)
    assert trainable(peft__method="lora", trainable="ln1") == ("peft", "ln1")
    assert trainable(peft__method="lora", trainable="peft,all") == ("peft", "all")
    assert trainable(trainable="ln1") == ("ln1",)
    again = settings.validate(settings.validate({"peft": {"method": "lora"}, "trainable": ("ln1",)}))
    assert again.trainable == ("peft", "ln1")
    with pytest.raises(UserError, match="config.peft.rank changes nothing without config.peft.method"):
        settings.validate({"peft": {"rank": 4}})
    with pytest.raises(UserError, match="config.peft.method is 'lroa'; allowed"):
        settings.validate({"peft": {"method": "lroa"}})


def test_the_quickstart_with_an_adapter_trains_that_alone():
    path = f"{REPOSITORY}/configs/quickstart.py"
    assert command.load_config(path, [("peft.method", "lora"), ("peft.rank", "4")]).trainable == ("peft",)
    assert command.load_config(f"{path}:ln1", [("peft.method", "lora")]).trainable == ("peft", "ln1")
    assert command.load_config(path, [("peft.method", "lora"), ("trainable", "fc1")]).trainable == ("peft", "fc1")
    config = command.load_config(f"{path}:aoft-lora")
    assert config.peft.method == "lora" and config.peft.projection == "ao" and config.trainable == ("peft",)


@pytest.mark.parametrize("method", ["vpt-deep", "adapter"])
def test_measuring_a_run_whose_adapter_stands_beside_the_components_is_one_clear_line(method, tmp_path, monkeypatch):
    from types import SimpleNamespace

    from vitplast_jax.plasticity import experiments

    model = peft.attach(models.create_model("vit_nano_patch4_8", num_classes=10), method=method, rank=4)
    monkeypatch.setattr(experiments, "load_run", lambda folder: SimpleNamespace(model=model))
    with pytest.raises(UserError) as caught:
        experiments.measure_run(tmp_path / "run", folder=tmp_path / "out")
    line = str(caught.value)
    assert f"({method}) stands beside them" in line and "cannot be merged" in line and line.endswith("with --config")
    assert "\n" not in line and not (tmp_path / "out").exists()


def test_the_adapter_sweeps_are_grids_of_three_rates_and_seeds():
    from vitplast_jax.training import grid

    for forms, methods in (("", 6), (":star", 2), (":relatives", 5)):
        cells = grid.make_cells(command.load_config(f"{REPOSITORY}/configs/quickstart_peft.py{forms}"))
        assert len(cells) == 9 * methods
        # One compilation a form: nothing but learning rate and seed differs within its nine cells.
        assert {cell.config.trainable for cell in cells} == {("peft",)}
        for first in range(0, len(cells), 9):
            assert len({str(cell.config.peft) for cell in cells[first : first + 9]}) == 1


def test_wrong_settings_are_said_before_anything_is_written(tmp_path):
    with pytest.raises(UserError, match="has no block 9; the model has 0-1"):
        loop.train_and_evaluate(tiny(**{**CONFIG, "peft__targets": ("q@9",)}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
