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
    assert "no suite is called 'cpu'; there are: cpu-step, peft" in capsys.readouterr().err


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


def test_the_peft_suite_counts_as_the_paper(tmp_path):
    path = tmp_path / "bench.json"
    assert call("--suite", "peft", "--model", "vit_base_patch16_224", "--repeats", "0", "--json", str(path)) == 0
    rows = {row["method"]: row["parameters"] for row in json.loads(path.read_text())["rows"]}
    assert rows["LoRA+AOFT, q and v"] == rows["Adapter+AOFT, formula"] == 36_864
    assert rows["Adapter+AOFT, count-single"] == rows["Adapter+AOFT, count-tied"] == 18_432
    assert (rows["VPT-Deep+AOFT"], rows["LoRA, q and v"], rows["Adapter at FFN"]) == (9_216, 294_912, 156_768)


@pytest.mark.slow
def test_the_peft_suite_times_and_counts_the_same_steps(tmp_path):
    path = tmp_path / "bench.json"
    small = ("--model", "vit_tiny_patch16_224", "--batch", "1", "--repeats", "1")
    assert call("--suite", "peft", *small, "--json", str(path)) == 0
    steps = {row["method"]: row for row in json.loads(path.read_text())["rows"] if "step_s" in row}
    assert steps["lora"]["flops"] > steps["aoft-lora"]["flops"] > steps["qkv biases"]["flops"] > 0
