"""A pod rehearsed without a TPU: what is asked, what the compiler's answer means, the search for what fits."""

import importlib.util
import json
import os
import runpy
import subprocess
import sys
import types

import pytest

from vitplast_jax import command
from vitplast_jax.errors import UserError
from vitplast_jax.training import rehearsal

TOOL = "tools/rehearse_pod.py"
has_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")


def call(*argv):
    tool = runpy.run_path(TOOL)
    with pytest.raises(SystemExit) as caught:
        command.run(tool["main"], tool["__doc__"], tool["FLAGS"], list(argv))
    return caught.value.code


@pytest.mark.parametrize("topology", ["v5e", "v5e:16", "v9:2x2", "v5e:2x2x2x2", "2x2"])
def test_a_topology_that_is_none_is_one_line(topology, capsys):
    assert call("--config", "configs/quickstart.py", "--topology", topology) == 1
    assert f"--topology {topology}: expected CHIP:SHAPE" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="libtpu is installed")
def test_without_libtpu_one_line_says_what_to_install(capsys):
    assert call("--config", "configs/quickstart.py", "--topology", "v5e:2x4") == 1
    error = capsys.readouterr().err.strip()
    assert "pip install libtpu" in error and "\n" not in error


def test_what_if_makes_every_combination():
    tool = runpy.run_path(TOOL)
    combinations = tool["read_combinations"]("batch_size=8,16; trainable=ln1+mha")
    assert combinations == [
        (("batch_size", "8"), ("trainable", "ln1+mha")),
        (("batch_size", "16"), ("trainable", "ln1+mha")),
    ]
    changed = tool["changed"](command.load_config("configs/quickstart.py"), combinations[1])
    assert changed.batch_size == 16 and changed.trainable == ("ln1", "mha")
    with pytest.raises(UserError, match="KEY=VALUE"):
        tool["read_combinations"]("remat")
    with pytest.raises(UserError, match="config.remat"):
        tool["changed"](command.load_config("configs/quickstart.py"), (("remat", "everything"),))


class Program:
    """Needs 100 bytes and 7 an image."""

    def __init__(self, batch):
        self.batch = batch

    def memory_analysis(self):
        return types.SimpleNamespace(
            argument_size_in_bytes=100, temp_size_in_bytes=7 * self.batch, output_size_in_bytes=0, alias_size_in_bytes=0
        )

    def cost_analysis(self):
        return {"flops": 0.0}


@pytest.mark.parametrize("limit, expected", [(801, 100), (1507, 201), (107, 1), (106, 0)])
def test_the_largest_batch_is_found_in_a_few_compilations(limit, expected):
    chip, tried = rehearsal.Chip(limit, 1.0, 1.0), []

    def compile_step(batch):
        tried.append(batch)
        return Program(batch)

    assert rehearsal.largest_batch(compile_step, 256, Program(256), chip) == expected
    assert len(tried) <= 5


def test_what_the_compiler_refuses_is_read_and_searched_past():
    # The form of libtpu's message on v5e; the figures are made up.
    message = (
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 31.50G of "
        "15.75G hbm. Exceeded hbm capacity by 15.75G."
    )
    assert rehearsal.refusal(message) == rehearsal.TooLarge(int(31.5 * 2**30), int(15.75 * 2**30))
    assert rehearsal.refusal("RESOURCE_EXHAUSTED: scoped vmem") == rehearsal.TooLarge()

    def compile_step(batch):
        if batch > 90:
            raise RuntimeError("RESOURCE_EXHAUSTED: no figures")
        return Program(batch)

    assert rehearsal.largest_batch(compile_step, 256, rehearsal.TooLarge(), rehearsal.Chip(10**6, 1.0, 1.0)) == 90
    with pytest.raises(ValueError):  # any other failure is not taken for too large
        rehearsal.try_compile(lambda batch: (_ for _ in ()).throw(ValueError("bug")), 1)


@pytest.mark.slow
@has_libtpu
@pytest.mark.parametrize("program", ["train", "measure"])
def test_a_shipped_config_is_rehearsed_on_two_slices(program, tmp_path):
    out = tmp_path / "row.json"
    argv = ["--config", "configs/quickstart.py", "--topology", "v5e:2x2", "--slices", "2", "--json", str(out)]
    environ = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, TOOL, *argv, "--program", program], env=environ, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "the compiler's estimate" in done.stdout
    row = json.loads(out.read_text())
    fields = "model trainable method topology slices chips batch_per_device argument_bytes temp_bytes hbm_bytes fits "
    fields += "largest_batch flops collective_bytes estimated_cycles mfu compile_s"
    assert row.keys() >= set(fields.split())
    assert row["fits"] and row["chips"] == 8 and row["batch_per_device"] == 8 == row["largest_batch"]
    assert row["estimated_cycles"] > 0 and 0 < row["mfu"] < 1
    if program == "train":
        # mha of the pico ViT (5 blocks, width 96), its final norm and a head of ten classes, summed in float32.
        trained = 5 * (4 * 96**2 + 4 * 96) + 2 * 96 + 97 * 10
        # Over two slices the compiler splits sums into steps within a slice and across, so this is a lower bound.
        assert sum(row["collective_bytes"].values()) >= 4 * trained
