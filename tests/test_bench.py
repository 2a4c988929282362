import json
import runpy

import pytest

from vitplast_jax import command


def call(*argv):
    bench = runpy.run_path("tools/bench.py")
    with pytest.raises(SystemExit) as caught:
        command.run(bench["main"], bench["__doc__"], bench["FLAGS"], list(argv))
    return caught.value.code


def test_an_unknown_suite_is_one_line(capsys):
    assert call("--suite", "cpu") == 1
    assert "no suite is called 'cpu'; there is: cpu-step" in capsys.readouterr().err


@pytest.mark.parity
def test_cpu_step_compares_the_same_work(tmp_path):
    path = tmp_path / "bench.json"
    small = ("--model", "vit_tiny_patch16_224", "--batch", "1", "--repeats", "1", "--trainable", "all,ln1")
    assert call("--suite", "cpu-step", *small, "--json", str(path)) == 0
    written = json.loads(path.read_text())
    assert written["environment"]["versions"]["jax"]
    for row, trainable in zip(written["rows"], ("all", "ln1"), strict=True):
        assert {"model", "batch", "dtype", "trainable", "method", "ours_s", "peer", "peer_s", "ratio"} <= row.keys()
        assert row["trainable"] == trainable and row["ratio"] == pytest.approx(row["ours_s"] / row["peer_s"], abs=0.05)


@pytest.mark.parity
def test_plasticity_gives_the_means_of_the_papers_way(tmp_path):
    path = tmp_path / "bench.json"
    small = ("--model", "vit_tiny_patch16_224", "--batch", "2", "--repeats", "1")
    assert call("--suite", "plasticity", *small, "--json", str(path)) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["largest_difference"] < 1e-4  # all 60 means, the same weights and images
    assert (row["pairs"], row["peer_pairs"]) == (4, 2) and row["ratio"] > 0
