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
    assert "no suite is called 'cpu'; there is: cpu-step, input" in capsys.readouterr().err


@pytest.mark.parity
def test_input_compares_host_times(tmp_path):
    path = tmp_path / "bench.json"
    assert call("--suite", "input", "--batch", "16", "--repeats", "1", "--json", str(path)) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["case"] for row in rows] == ["32x32 decoded", "32x32 PNG records", "500x375 JPEG"]
    for row in rows:
        assert {"model", "batch", "dtype"} <= row.keys()
        assert row["ratio"] == pytest.approx(row["peer_us"] / row["ours_us"], rel=0.05)


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
