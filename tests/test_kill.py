"""A run killed with SIGKILL at any moment and started again ends bit for bit where an undisturbed one does."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from vitplast_jax import trees
from vitplast_jax.training import run

STEPS = 40
COMMAND = [sys.executable, "-m", "vitplast_jax.train", "--config", "configs/quickstart.py"]
SETTINGS = {
    "weights": "",
    "model": "vit_pico_patch4_28",
    "image_size": 8,
    "batch_size": 16,
    "steps": STEPS,
    "warmup_steps": 2,
    "eval_every": 5,
    "checkpoint_every": 3,
    "log_every": 1,
    "dropout": 0.1,
    "weight_decay": 0.1,
}


def start(workdir, repository):
    overrides = [f"--config.{key}={value}" for key, value in SETTINGS.items()]
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}  # one device
    with open(f"{workdir}.log", "a") as log:
        return subprocess.Popen(
            [*COMMAND, "--workdir", str(workdir), *overrides], cwd=repository, env=environment, stdout=log, stderr=log
        )


def final(workdir):
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        return trees.flatten(checkpointer.restore(workdir / "checkpoints" / "latest" / str(STEPS) / "state"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
def test_killed_and_continued_equals_undisturbed(tmp_path, pytestconfig):
    repository = pytestconfig.rootpath
    straight = start(tmp_path / "straight", repository)
    assert straight.wait(timeout=300) == 0, (tmp_path / "straight.log").read_text()

    draw = random.Random(os.environ.get("PYTEST_KILL_SEED", "7"))
    workdir, kills = tmp_path / "killed", 0
    while not (workdir / "results.json").exists():
        process = start(workdir, repository)
        seen = len(run.read_metrics(workdir / "metrics.jsonl"))
        target = draw.randrange(3, STEPS) if kills < 2 else 10**9
        while process.poll() is None:
            lines = len(run.read_metrics(workdir / "metrics.jsonl"))
            if lines - seen >= target or (kills < 2 and lines >= STEPS):
                time.sleep(draw.random() * 0.2)
                process.send_signal(signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.02)
        process.wait(timeout=300)
        if process.returncode not in (0, -signal.SIGKILL):
            pytest.fail((tmp_path / "killed.log").read_text())

    assert kills >= 1
    expected, got = final(tmp_path / "straight"), final(workdir)
    assert expected.keys() == got.keys()
    for path, leaf in expected.items():
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(got[path]), err_msg=path)
    results = [json.loads((folder / "results.json").read_text()) for folder in (tmp_path / "straight", workdir)]
    assert results[0]["test"] == results[1]["test"] and results[0]["best_step"] == results[1]["best_step"]
    steps = [line["step"] for line in run.read_metrics(workdir / "metrics.jsonl") if "split" not in line]
    assert steps == list(range(1, STEPS + 1))
