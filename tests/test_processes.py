"""Several processes: who is there, what they share, one run on two of them. PITFALLS R54, R55, R63, R64."""

import concurrent.futures
import json
import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from vitplast_jax import trees
from vitplast_jax.errors import Stopped, UserError
from vitplast_jax.training import loop, processes, run


def free_address() -> str:
    """A loopback address whose port and the next are free."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as one:
            port = one.getsockname()[1]
            try:
                with socket.create_server(("", port + 1)):
                    return f"127.0.0.1:{port}"
            except OSError:
                continue


# --- the roll call ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, environ, expected",
    [
        ((), {}, None),
        (("h:5", 2, 1), {}, ("h:5", 2, 1)),
        ((), {"JAX_COORDINATOR_ADDRESS": "h:5", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "0"}, ("h:5", 4, 0)),
        (("h:5", 1, 0), {}, None),  # alone after all
        ((), {"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1"}, ("a:8476", 2, 1)),
        ((), {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, None),
    ],
)
def test_the_group_comes_from_flags_or_environment(flags, environ, expected):
    group = processes.find_group(*flags, environ=environ)
    assert (group and (group.coordinator, group.count, group.index)) == expected


@pytest.mark.parametrize("flags", [("h:5", 2, -1), ("h:5", 2, 2), ("h", 2, 0), ("", 2, 0), ("h:5", 0, 0)])
def test_half_a_group_is_an_error_that_names_the_flags(flags):
    with pytest.raises(UserError, match="--coordinator .* --processes .* --process"):
        processes.find_group(*flags, environ={})


def call(groups, timeout):
    """What each of these processes hears in a roll call of all at once; None if all is well."""

    def one(group):
        try:
            processes.roll_call(group, timeout)
        except UserError as error:
            return str(error)

    with concurrent.futures.ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(one, groups))


def test_a_complete_group_starts():
    address = free_address()
    assert call([processes.Group(address, 3, index) for index in range(3)], 20) == [None] * 3


def test_who_is_missing_is_named_to_all_that_are_there_and_soon():
    began, hosts = time.monotonic(), ("a.example", "b.example", "c.example")
    address = free_address()
    heard = call([processes.Group(address, 3, index, hosts) for index in (0, 2)], 1)
    assert heard[0] == heard[1] and "1 (b.example) did not report" in heard[0] and "(c.example)" not in heard[0]
    assert time.monotonic() - began < 30  # not the five minutes that jax would wait


def test_without_the_first_process_the_others_say_so():
    (heard,) = call([processes.Group(free_address(), 2, 1)], 0.5)
    assert "process 0 does not answer at 127.0.0.1" in heard


def test_one_started_twice_and_other_counts_are_noticed():
    address = free_address()
    heard = call([processes.Group(address, 3, 0), processes.Group(address, 3, 1), processes.Group(address, 3, 1)], 4)
    assert "process 1 was started twice" in heard[0]
    address = free_address()
    heard = call([processes.Group(address, 2, 0), processes.Group(address, 4, 1)], 4)
    assert all("process 1 was told of 4 processes, process 0 of 2" in line for line in heard)


# --- an end that is asked for ----------------------------------------------------------------------------------------


def stored(workdir, step, like=None):
    """The state that a run saved; ``like``, a restored state, where the processes that saved it are gone."""
    import jax
    import orbax.checkpoint as ocp

    target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), like)
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(workdir / "checkpoints" / "latest" / str(step) / "state", target)


@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
def test_sigterm_saves_at_the_next_step_and_the_run_goes_on_from_there(small_config, tmp_path, monkeypatch):
    config = small_config(image_size=8, mesh__data=1, checkpoint_every=6)
    straight = loop.train_and_evaluate(config, tmp_path / "straight")
    write = run.MetricsLog.write

    def interrupt(self, **entry):
        write(self, **entry)
        if entry["step"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch, pytest.raises(Stopped, match="stopped at step [34] of 6, which is saved"):
        patch.setattr(run.MetricsLog, "write", interrupt)
        loop.train_and_evaluate(config, tmp_path / "stopped")
    assert signal.getsignal(signal.SIGTERM) is before
    results = loop.train_and_evaluate(config, tmp_path / "stopped")
    assert results["test"] == straight["test"]
    ours, theirs = (trees.flatten(stored(tmp_path / name, 6)) for name in ("stopped", "straight"))
    for path, leaf in theirs.items():
        np.testing.assert_array_equal(np.asarray(ours[path]), np.asarray(leaf), err_msg=path)


def test_a_profile_of_some_steps_is_written(small_config, tmp_path):
    config = small_config(image_size=8, mesh__data=1, steps=3, warmup_steps=1, profile=(2, 3))
    loop.train_and_evaluate(config, tmp_path)
    assert any(file.stat().st_size for file in (tmp_path / "profile").rglob("*.xplane.pb"))


# --- two processes on this machine -----------------------------------------------------------------------------------

CONFIG = """
from vitplast_jax.models import specs
from vitplast_jax.training.config import default_config

specs.SIZES["nano"] = specs._Size(width=32, depth=2, heads=2)

def get_config():
    config = default_config()
    config.model = "vit_nano_patch4_8"
    config.data.name = "digits"
    config.data.crop_scale = ()
    config.data.shift = 0.1
    config.dropout = 0.1
    config.batch_size = 16
    config.steps = 20
    config.warmup_steps = 2
    config.learning_rate = 0.03
    config.eval_every = 10
    config.checkpoint_every = 10
    config.log_every = 1
    return config
"""


def start(module, argv, index=None, address=None, devices=1, log=None):
    environ = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    if index is not None:
        argv = [*argv, "--coordinator", address, "--processes", "2", "--process", str(index)]
    with open(log, "a") as file:
        return subprocess.Popen([sys.executable, *module, *argv], env=environ, stdout=file, stderr=file)


def both(module, argv, logs, devices=1):
    address = free_address()
    return [start(module, argv, index, address, devices, log) for index, log in enumerate(logs)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
def test_two_processes_train_stop_resume_and_evaluate_as_one_does(tmp_path):
    (tmp_path / "config.py").write_text(CONFIG)
    logs = [tmp_path / "0.log", tmp_path / "1.log"]
    train = ["-m", "vitplast_jax.train"]
    argv = ["--config", f"{tmp_path}/config.py", "--workdir"]
    alone = start(train, [*argv, f"{tmp_path}/one"], devices=2, log=tmp_path / "one.log")
    assert alone.wait(600) == 0, (tmp_path / "one.log").read_text()

    two = tmp_path / "two"
    pair = both(train, [*argv, str(two)], logs)
    while len(run.read_metrics(two / "metrics.jsonl")) < 3 and pair[0].poll() is None:
        time.sleep(0.02)
    pair[1].send_signal(signal.SIGTERM)  # one hears of it, both stop, at one step
    assert [process.wait(600) for process in pair] == [143, 143], "".join(log.read_text() for log in logs)
    pair = both(train, [*argv, str(two)], logs)
    assert [process.wait(600) for process in pair] == [0, 0], "".join(log.read_text() for log in logs)
    assert "continuing at step" in logs[0].read_text()
    assert "process 1/2 on" in logs[1].read_text() and "1 of 2 devices" in logs[1].read_text()

    expected = stored(tmp_path / "one", 20)
    got = trees.flatten(stored(two, 20, expected))
    for path, leaf in trees.flatten(expected).items():
        np.testing.assert_allclose(np.asarray(got[path]), np.asarray(leaf), rtol=0, atol=1e-6, err_msg=path)
    results = [json.loads((folder / "results.json").read_text()) for folder in (tmp_path / "one", two)]
    for split in ("test", "validation"):
        assert results[0][split]["accuracy"] == results[1][split]["accuracy"]
        assert results[0][split]["loss"] == pytest.approx(results[1][split]["loss"], abs=1e-5)
    steps = [line["step"] for line in run.read_metrics(two / "metrics.jsonl") if "split" not in line]
    assert steps == list(range(1, 21))  # one process writes

    # specs.SIZES["nano"] is only in the config: the command imports it first.
    code = f"exec({CONFIG!r}); import runpy; runpy.run_module('vitplast_jax.evaluate', run_name='__main__')"
    pair = both(["-c", code], ["--workdir", str(two)], logs)
    assert [process.wait(600) for process in pair] == [0, 0], "".join(log.read_text() for log in logs)
    evaluation = json.loads((two / "evaluation.json").read_text())
    assert evaluation["accuracy"] == results[1]["test"]["accuracy"]
    assert evaluation["count"] == results[1]["test"]["count"] == 359


MEASURE = """
import os, runpy
exec({config!r})
from vitplast_jax.plasticity import stream
stream._SAVE_SECONDS = -1.0
add = stream.Stream.add
def counted(self, *arguments):
    add(self, *arguments)
    print("tile", self.tiles, flush=True)
    if self.tiles == {last}:
        os._exit(9)
stream.Stream.add = counted
runpy.run_module("vitplast_jax.measure", run_name="__main__")
"""


@pytest.mark.slow
def test_two_processes_go_on_with_a_killed_measurement(tmp_path):
    (tmp_path / "config.py").write_text(CONFIG)
    argv = [
        "--config",
        f"{tmp_path}/config.py",
        "--config.measure.distribution=downstream",
        "--config.measure.images=40",
    ]
    argv += ["--config.measure.batch_size=8", "--config.measure.ratios=True", "--workdir"]
    code = [MEASURE.format(config=CONFIG, last=last) for last in (2, 0)]
    alone = start(["-c", code[1]], [*argv, f"{tmp_path}/one"], devices=2, log=tmp_path / "one.log")
    assert alone.wait(600) == 0, (tmp_path / "one.log").read_text()
    logs = [tmp_path / "0.log", tmp_path / "1.log"]
    pair = both(["-c", code[0]], [*argv, f"{tmp_path}/two"], logs)
    assert [process.wait(600) for process in pair] == [9, 9], "".join(log.read_text() for log in logs)
    pair = both(["-c", code[1]], [*argv, f"{tmp_path}/two"], logs)
    assert [process.wait(600) for process in pair] == [0, 0], "".join(log.read_text() for log in logs)
    for log in logs:  # no tile twice, by either
        assert [line for line in log.read_text().splitlines() if line.startswith("tile")] == [
            f"tile {k}" for k in range(1, 6)
        ]
    one, two = (json.loads((tmp_path / name / "plasticity.json").read_text()) for name in ("one", "two"))
    for a, b in zip(one["rows"], two["rows"], strict=True):
        assert [b[k] for k in ("mean", "low", "max")] == pytest.approx([a[k] for k in ("mean", "low", "max")], rel=1e-5)
    ratios = [np.load(tmp_path / name / "ratios.npz")["ratios"] for name in ("one", "two")]
    np.testing.assert_allclose(ratios[1], ratios[0], rtol=1e-5)


@pytest.mark.slow
def test_a_folder_that_one_host_does_not_see_is_an_error_on_both(tmp_path):
    code = """
import pathlib, sys
from types import SimpleNamespace
from vitplast_jax.training import processes
address, index = sys.argv[2], int(sys.argv[6])
processes.join(SimpleNamespace(coordinator=address, processes=2, process=index))
if index == 1:
    pathlib.Path.exists = lambda self: False  # a disk of its own
try:
    processes.check_shared(pathlib.Path.cwd() / "run", "--workdir")
except processes.UserError as error:
    print("said:", error)
try:
    processes.check_agreement("data", {"index": index})
except processes.UserError as error:
    print("said:", error)
"""
    logs = [tmp_path / "0.log", tmp_path / "1.log"]
    pair = both(["-c", code], [], logs)
    assert [process.wait(300) for process in pair] == [0, 0], "".join(log.read_text() for log in logs)
    for log in logs:
        assert "is not shared: process 1 does not see what process 0 writes" in log.read_text()
        assert "process 1 has other data than process 0" in log.read_text()
