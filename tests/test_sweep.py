"""A grid of small real runs: one program a component, cells that equal runs of their own, failures, repetition."""

import json

import numpy as np
import pytest

from vitplast_jax import command, models, sweep, trees
from vitplast_jax.errors import UserError
from vitplast_jax.training import checkpoint, cost, evaluation, grid, loop
from vitplast_jax.training import config as settings
from vitplast_jax.training.shared import Shared

models.specs.SIZES["nano"] = models.specs._Size(width=32, depth=2, heads=2)

AXES = "trainable=mha|ln1,ln2,learning_rate=0.01|0.03,seed=0|1"
TINY = {
    "model": "vit_nano_patch4_8",
    "data.name": "digits",
    "data.crop_scale": (),
    "data.flip": False,
    "batch_size": 16,
    "steps": 3,
    "warmup_steps": 1,
    "eval_every": 3,
    "checkpoint_every": 3,
    "log_every": 1,
    "mesh.data": 1,
}


def tiny(axes=AXES, **overrides):
    return settings.validate(TINY | {"sweep": axes} | {k.replace("__", "."): v for k, v in overrides.items()})


def parameters_of(workdir, step=3):
    with checkpoint.Checkpoints(workdir / "checkpoints") as checkpoints:
        return trees.flatten(checkpoints._latest.restore(step).state)


# --- the declaration --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "axes"),
    [
        (AXES, ("trainable=mha|ln1,ln2", "learning_rate=0.01|0.03", "seed=0|1")),
        (("trainable=mha | ln1,ln2", "seed=0|1"), ("trainable=mha|ln1,ln2", "seed=0|1")),
        (["seed=0|1"], ("seed=0|1",)),
        ("('trainable=mha|fc1', 'seed=0|1')", ("trainable=mha|fc1", "seed=0|1")),
        ("data.crop_scale=0.5,1|(),data.name=digits|idx", ("data.crop_scale=0.5,1|()", "data.name=digits|idx")),
        ("", ()),
        ((), ()),
    ],
)
def test_axes_are_read_from_text_and_from_python(given, axes):
    assert settings.read("sweep", given) == axes
    assert settings.read("sweep", list(axes)) == axes  # as config.json brings them back


@pytest.mark.parametrize("given", ["seed", "seed=0,seed=1", "=1|2", 3])
def test_what_is_no_axis_is_refused(given):
    with pytest.raises(UserError, match="config.sweep is .*; allowed: KEY=VALUE"):
        settings.read("sweep", given)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("seed=0|x", "config.sweep: config.seed is 'x'; allowed: a whole number"),
        ("seed=", "config.sweep: config.seed is ''"),
        ("sed=0|1", r"config.sweep: config.sed does not exist; did you mean config.seed\?"),
        ("sweep=a|b", "a grid cannot be an axis of itself"),
    ],
)
def test_a_wrong_value_on_an_axis_is_named(given, says):
    with pytest.raises(UserError, match=says):
        tiny(given)


def test_cells_share_from_neighbour_to_neighbour():
    cells = grid.make_cells(tiny("seed=0|1,trainable=mha|ln1,ln2,learning_rate=1e-2|0.03"))
    assert len(cells) == 8 and len({cell.name for cell in cells}) == 8
    assert [cell.config.trainable for cell in cells] == [("mha",)] * 4 + [("ln1", "ln2")] * 4
    assert cells[4].name == "trainable=ln1+ln2,seed=0,learning_rate=0.01"
    assert all(cell.config.sweep == () for cell in cells)
    assert (cells[-1].config.seed, cells[-1].config.learning_rate) == (1, 0.03)


def test_names_are_safe_short_and_distinct():
    long = "|".join(f"weights/{'x' * 130}{i}" for i in range(2))
    names = [cell.name for cell in grid.make_cells(tiny(f"weights={long}|a/b|a_b"))]
    assert len(set(names)) == 4 and all("/" not in name and len(name) < 160 for name in names)


def test_grids_that_cannot_be():
    with pytest.raises(UserError, match="config.sweep is empty"):
        grid.make_cells(tiny(()))
    with pytest.raises(UserError, match="learning_rate has the same value twice"):
        grid.make_cells(tiny("learning_rate=1e-2|0.01"))
    with pytest.raises(UserError, match="cell steps=2,warmup_steps=3: config.warmup_steps is 3, more than"):
        grid.make_cells(tiny("steps=2|4,warmup_steps=1|3"))
    with pytest.raises(UserError, match="names a grid of runs"):
        loop.train_and_evaluate(tiny(), "nowhere")
    with pytest.raises(UserError, match="cell trainable=ls1,.*: selector 'ls1' matches nothing"):
        grid.check_starts(grid.make_cells(tiny("trainable=ls1|mha,seed=0|1")), Shared())


# --- a sweep ----------------------------------------------------------------------------------------------------------


def call(capsys, *argv):
    with pytest.raises(SystemExit) as caught:
        command.run(sweep.main, sweep.__doc__, sweep.FLAGS, list(map(str, argv)))
    printed = capsys.readouterr()
    return caught.value.code, printed.out, printed.err


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("sweep")
    outcomes = list(grid.run_cells(grid.make_cells(tiny()), workdir, Shared()))
    return workdir, outcomes


def test_learning_rates_and_seeds_share_one_program(swept):
    workdir, outcomes = swept
    assert [outcome.error for outcome in outcomes] == [None] * 8
    for split in ("train", "evaluate"):
        assert [o.results["compilations"][split] for o in outcomes] == [1, 0, 0, 0] * 2
    state = json.loads((workdir / "sweep.json").read_text())
    assert state["axes"] == ["trainable", "learning_rate", "seed"]
    assert {cell["state"] for cell in state["cells"]} == {"finished"}


def test_a_cell_is_the_run_that_train_would_make(swept, tmp_path):
    workdir, outcomes = swept
    cell = outcomes[3].cell
    assert (cell.values["learning_rate"], cell.values["seed"]) == (0.03, 1)
    results = loop.train_and_evaluate(cell.config, tmp_path)
    expected, got = parameters_of(tmp_path), parameters_of(workdir / "cells" / cell.name)
    assert expected.keys() == got.keys()
    for path, leaf in expected.items():
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(got[path]), err_msg=path)
    assert results["test"] == outcomes[3].results["test"]
    others = [parameters_of(workdir / "cells" / outcomes[i].cell.name) for i in (1, 2)]  # another rate, another seed
    kernel = "trainable/blocks/0/attn/out/kernel"
    assert all(not np.array_equal(np.asarray(other[kernel]), np.asarray(got[kernel])) for other in others)


def test_a_cell_can_be_evaluated(swept):
    workdir, outcomes = swept
    summary, _ = evaluation.evaluate_run(workdir / "cells" / outcomes[0].cell.name)
    assert summary["accuracy"] == outcomes[0].results["test"]["accuracy"]


def test_only_what_is_missing_runs_again(swept, monkeypatch):
    workdir, outcomes = swept
    (workdir / "cells" / outcomes[5].cell.name / "results.json").unlink()
    trained = []

    def train(config, folder, **options):
        trained.append(folder.name)
        return loop.train_and_evaluate(config, folder, **options)

    monkeypatch.setattr(grid, "train_and_evaluate", train)
    again = list(grid.run_cells(grid.make_cells(tiny()), workdir, Shared()))
    assert trained == [outcomes[5].cell.name]
    assert [outcome.before for outcome in again] == [number != 5 for number in range(8)]
    assert [o.results["test"] for o in again] == [o.results["test"] for o in outcomes]


def test_the_command_reports_a_failed_cell_in_a_line_and_keeps_the_others(tmp_path, capsys, monkeypatch):
    compiled = []
    fit_step = cost.fit_step
    monkeypatch.setattr(cost, "fit_step", lambda *args: compiled.append(1) or fit_step(*args))
    config = tmp_path / "config.py"
    config.write_text(
        "from vitplast_jax.training.config import default_config, validate\n"
        f"def get_config():\n    return validate({TINY!r} | {{'clip_norm': 0.0, 'trainable': 'ln1'}})\n"
    )
    argv = ["--config", config, "--workdir", tmp_path / "s", "--config.sweep=learning_rate=0.03|1e30,seed=0|1"]
    status, out, err = call(capsys, *argv)
    assert status == 1 and "error: 2 of 4 runs failed, first learning_rate=1e+30,seed=0: at step" in err
    assert err.count("\nfailed: ") + err.startswith("failed: ") == 2 and "Traceback" not in err
    assert "note: plasticity was not measured: config.weights is empty" in err
    assert len(compiled) == 1
    summary = json.loads((tmp_path / "s" / "summary.json").read_text())
    assert [group["learning_rate"] for group in summary["groups"]] == [0.03] and summary["groups"][0]["seeds"] == 2
    assert summary["groups"][0]["grad_norm"] > 0
    for name in ("table.csv", "table.md", "cells.csv", "sweep.png", "sweep.json"):
        assert (tmp_path / "s" / name).stat().st_size > 0, name
    assert "accuracy" in out and "wrote" in out
