"""Pictures are written whole, from files or from memory, and bad input is one clear line."""

import json

import numpy as np
import pytest

from vitplast_jax.errors import UserError
from vitplast_jax.reports import plots

LINES = [
    {"step": 1, "loss": 2.0, "learning_rate": 0.1},
    {"step": 2, "loss": 1.0, "learning_rate": 0.2},
    {"step": 2, "split": "validation", "accuracy": 0.5, "loss": 1.5, "count": 10},
]


def is_png(path):
    return path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_curves_from_lines_and_from_a_file_cut_short(tmp_path):
    plots.plot_curves(LINES, tmp_path / "a.png", "title")
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, LINES)) + '\n{"step": 3, "lo')
    plots.plot_curves(tmp_path / "metrics.jsonl", tmp_path / "new" / "b.png")
    assert is_png(tmp_path / "a.png") and is_png(tmp_path / "new" / "b.png")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.png", "metrics.jsonl", "new"]  # no temporary file is left


def test_a_step_logged_twice_counts_once():
    steps, values = plots._series([*LINES, {"step": 2, "loss": 0.5}], "loss", None)
    assert steps.tolist() == [1, 2] and values.tolist() == [2.0, 0.5]


def test_smoothing_keeps_a_constant_and_its_length():
    np.testing.assert_allclose(plots._smooth(np.full(100, 3.0)), np.full(100, 3.0))


def test_no_metrics_is_a_clear_error(tmp_path):
    with pytest.raises(UserError, match="no metric lines"):
        plots.plot_curves([], tmp_path / "a.png")


def test_a_failed_picture_leaves_the_old_one(tmp_path):
    png = tmp_path / "a.png"
    plots.plot_curves(LINES, png)
    before = png.read_bytes()
    with pytest.raises(ZeroDivisionError):
        plots._draw(png, (2, 2), lambda figure: 1 / 0)
    assert png.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_confusion(tmp_path):
    plots.plot_confusion(np.array([[3, 1], [0, 0]]), ["cat", "a class whose name is very long"], tmp_path / "c.png")
    assert is_png(tmp_path / "c.png")
    with pytest.raises(UserError, match=r"expected \(3, 3\)"):
        plots.plot_confusion(np.eye(2), ["a", "b", "c"], tmp_path / "d.png")


@pytest.mark.parametrize("known", [True, False])
def test_plasticity(tmp_path, known):
    names = ("ln1", "mha", "ln2", "fc1", "fc2")
    low, high, bound = (0.9, 1.1, 7.0) if known else (None, None, None)
    rows = [
        {"block": b, "component": c, "mean": 1.0, "low": low, "high": high, "max": 2.0, "bound": bound}
        for b in range(2)
        for c in names
    ]
    components = [
        {"component": c, "mean": 1.0, "low": low, "high": high, "rank": 1, "bound_rank": 1 if known else None}
        for c in names
    ]
    result = {"model": "m", "pairs": 4, "pairing": "matched", "protocol": "ours", "inputs": "embedding"}
    plots.plot_plasticity(result | {"rows": rows, "components": components}, tmp_path / "p.png")
    assert is_png(tmp_path / "p.png")


def test_class_names_are_taken_literally(tmp_path):
    plots.plot_confusion([[1, 0], [0, 1]], ["$^$", "a$x$"], tmp_path / "confusion.png")
    plots.plot_confusion([[1, 0], [0, 1]], ["\u72d7", "\u732b"], tmp_path / "confusion.png")
    assert (tmp_path / "confusion.png").stat().st_size > 1000
