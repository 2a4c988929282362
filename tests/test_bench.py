import importlib.util
import json
import runpy
import subprocess
import sys

import pytest

from vitplast_jax import command


def call(*argv):
    bench = runpy.run_path("tools/bench.py")
    with pytest.raises(SystemExit) as caught:
        command.run(bench["main"], bench["__doc__"], bench["FLAGS"], list(argv))
    return caught.value.code


def test_an_unknown_suite_is_one_line(capsys):
    assert call("--suite", "cpu") == 1
    assert "no suite is called 'cpu'; there is: cpu-step, gpu, tpu-static, " in capsys.readouterr().err


def test_flops_of_a_step():
    flops = runpy.run_path("tools/suites/steps.py")["training_flops"]
    # One image, forward: 17.56 G multiply-adds as published for ViT-B/16 at 224 pixels; thrice that for a full step.
    assert flops("vit_base_patch16_224", "all") == pytest.approx(3 * 2 * 17.56e9, rel=0.01)
    # Nothing but norms and head: no kernel has a gradient, all activations have.
    assert flops("vit_base_patch16_224", "ln1") == pytest.approx(2 * 2 * 17.56e9, rel=0.02)
    assert flops("vit_base_patch16_224", "ln1") < flops("vit_base_patch16_224", "mha")


SMALL = ("--model", "vit_tiny_patch16_224", "--batch", "1", "--repeats", "1", "--trainable", "all,ln1")


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
    assert call("--suite", "cpu-step", *SMALL, "--json", str(path)) == 0
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


@pytest.mark.parity
def test_the_gpu_suite_runs_with_few_packages(tmp_path):
    """As on a machine with only jax, flax, optax, orbax, torch, timm and einops."""
    absent = ("ml_collections", "grain", "chex", "sklearn", "matplotlib", "tensorflow_datasets")
    code = f"import sys; sys.modules.update(dict.fromkeys({absent})); sys.argv = sys.argv[1:]\n"
    code += "import runpy; runpy.run_path(sys.argv[0], run_name='__main__')"
    out = tmp_path / "gpu.json"
    small = (*SMALL[:-1], "ln1", "--json", str(out))
    argv = [sys.executable, "-c", code, "tools/bench.py", "--suite", "gpu", *small]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    (row,) = json.loads(out.read_text())["rows"]
    assert row["dtype"] == "bfloat16" and row["ours_mfu"] is None  # a CPU's best is not in the table
    expected = row["ours_images_per_second"] / row["peer_images_per_second"]
    assert row["ratio"] == pytest.approx(expected, rel=0.05)


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="libtpu is installed")
def test_tpu_static_without_its_compiler_is_one_line(capsys):
    assert call("--suite", "tpu-static") == 1
    assert "pip install libtpu" in capsys.readouterr().err


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
    steps = {row["method"]: row for row in json.loads(path.read_text())["rows"] if "flops" in row}
    assert all(steps[name]["step_s"] > 0 for name in ("lora", "aoft-lora", "ln1"))  # of the biases FLOPs are enough
    assert steps["lora"]["flops"] > steps["aoft-lora"]["flops"] > steps["qkv biases"]["flops"] > 0


@pytest.mark.slow
def test_the_convert_suite_measures_processes_of_their_own(tmp_path):
    path = tmp_path / "bench.json"
    assert call("--suite", "convert", "--model", "vit_tiny_patch16_224", "--repeats", "1", "--json", str(path)) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["case"] for row in rows] == ["import", "export to timm", "export to transformers", "load_model"]
    for row in rows:
        # 5,717,416 parameters as published, in float32, and a header
        assert 0 < row["file_bytes"] - 4 * 5_717_416 < 50_000 and row["peak_bytes"] > row["file_bytes"]
        assert row["ratio"] == pytest.approx(row["peak_bytes"] / row["file_bytes"], abs=1e-3) and row["seconds"] > 0
