"""A run in a bucket: every path goes through one layer that neither appends nor renames. Issue 7."""

import importlib.util
import json
import os
import signal

import bucket
import numpy as np
import pytest

from vitplast_jax import command, files, train
from vitplast_jax.errors import Stopped, UserError
from vitplast_jax.plasticity import experiments
from vitplast_jax.reports import overview, plasticity
from vitplast_jax.training import loop, processes, run
from vitplast_jax.training.evaluation import evaluate_run


@pytest.fixture
def objects(monkeypatch):
    with bucket.serving(monkeypatch) as found:
        yield found


def test_the_bucket_of_these_tests_refuses_what_a_bucket_cannot(objects):
    path = files.as_path("gs://bucket/a/b.txt")
    path.write_text("x")
    with pytest.raises(NotImplementedError, match="appended"):
        path.open("a")
    with pytest.raises(NotImplementedError, match="renamed"):
        path.rename("gs://bucket/a/c.txt")
    with pytest.raises(NotImplementedError, match="renamed"):
        path.replace("gs://bucket/a/c.txt")
    assert path.read_text() == "x" and list(objects) == ["bucket/a/b.txt"]


def test_a_file_that_is_not_written_to_its_end_is_not_there(objects):
    files.write_text("gs://bucket/x", "old")
    with pytest.raises(RuntimeError), files.replacing("gs://bucket/x") as file:
        file.write(b"new")
        raise RuntimeError
    assert objects == {"bucket/x": b"old"}
    lines = files.Lines("gs://bucket/lines", ["a\n"])
    lines.write("b\n")
    assert objects["bucket/lines"] == b"a\n"  # one object takes one upload a second: lines are gathered
    lines.flush()
    assert objects["bucket/lines"] == b"a\nb\n"
    files.remove("gs://bucket/lines")
    files.remove("gs://bucket/none")
    assert list(objects) == ["bucket/x"]


@pytest.mark.skipif(importlib.util.find_spec("gcsfs") is not None, reason="gcsfs is installed")
def test_without_the_package_for_buckets_one_line_names_it():
    with pytest.raises(UserError, match=r"gs://bucket/run: buckets need the package gcsfs \(pip install"):
        files.as_path("gs://bucket/run")


@pytest.mark.slow
def test_a_run_in_a_bucket_stops_goes_on_is_measured_and_reported(objects, small_config, tmp_path, monkeypatch):
    place = "gs://bucket/runs/one"
    config = small_config(image_size=8, mesh__data=1, checkpoint_every=6, profile=(1, 2))
    write, alone = run.MetricsLog.write, loop.train_and_evaluate(config, tmp_path)

    def interrupt(self, **entry):
        write(self, **entry)
        if entry["step"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(run.MetricsLog, "write", interrupt)
        loop.train_and_evaluate(config, place)
    assert "bucket/runs/one/config.json" in objects and "bucket/runs/one/results.json" not in objects
    assert any("/profile/" in name and name.endswith(".xplane.pb") for name in objects)
    results = loop.train_and_evaluate(config, place)
    train.report(results, place)
    assert json.loads(objects["bucket/runs/one/results.json"]) == json.loads(json.dumps(results))
    lines = [json.loads(line) for line in objects["bucket/runs/one/metrics.jsonl"].splitlines()]
    assert [line["step"] for line in lines if "split" not in line] == list(range(1, 7))

    assert results["test"] == alone["test"] and results["best_step"] == alone["best_step"]  # as on a disk, unstopped
    assert loop.train_and_evaluate(config, place) == json.loads(objects["bucket/runs/one/results.json"])  # finished
    assert evaluate_run(place)[0]["accuracy"] == results["test"]["accuracy"]

    measured = experiments.measure_run(place, [], "gs://bucket/measured")
    assert len(measured["difference"]["rows"]) == 25  # from every ratio before and after, which are not kept
    assert not [name for name in objects if name.startswith("bucket/measured/")]
    names = plasticity.save(measured, "gs://bucket/measured")
    assert {f"bucket/measured/{name}" for name in names} <= objects.keys()
    overview.write_report(place)
    assert b"<html" in objects["bucket/runs/one/report.html"]

    with run.take(place, run.Claim({"seed": 1}, overwrite=True), 1):
        left = {name.removeprefix("bucket/runs/one/") for name in objects if name.startswith(f"{place[5:]}/")}
        assert left & {*run.RUN_FILES} == {"config.json", "environment.json"} and "checkpoints" not in str(left)


def test_a_measurement_in_a_bucket_goes_on_after_a_kill(objects, small_config, monkeypatch):
    from vitplast_jax.plasticity import stream

    monkeypatch.setattr(stream, "_SAVE_SECONDS", -1.0)
    config, add, tiles = small_config(image_size=8, mesh__data=1), stream.Stream.add, []

    def killed(self, *arguments):
        add(self, *arguments)
        tiles.append(self.tiles)
        if len(tiles) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(stream.Stream, "add", killed)
    with pytest.raises(KeyboardInterrupt):
        experiments.measure_config(config, "gs://bucket/measured")
    assert "bucket/measured/measuring.npz" in objects
    experiments.measure_config(config, "gs://bucket/measured")
    assert tiles == [1, 2] and not objects  # eight images a side, four at once


def test_weights_in_a_bucket_are_fetched(objects):
    from vitplast_jax.weights import convert, places

    name = "vit_pico_patch4_28.fashion_mnist"
    for ending in ("safetensors", "json"):
        files.copy(f"{places.ASSETS}/{name}.{ending}", f"gs://bucket/weights/{name}.{ending}")
    expected = convert.load(name)
    loaded = convert.load(f"gs://bucket/weights/{name}.safetensors")
    assert loaded.spec == expected.spec and loaded.identity["sha256"] == expected.identity["sha256"]


def test_a_bucket_that_one_host_does_not_see_is_noticed(objects, monkeypatch):
    import jax

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes, "gather", lambda values: np.stack([np.asarray(values)] * 2))
    processes.check_shared("gs://bucket/run", "--workdir")
    assert not objects  # the mark is gone again
    files.check_writable("gs://bucket/run", "--workdir")
    assert not objects
    monkeypatch.setattr(type(files.as_path("gs://bucket/run")), "exists", lambda self: False)
    with pytest.raises(UserError, match="--workdir gs://bucket/run is not shared"):
        processes.check_shared("gs://bucket/run", "--workdir")


def test_data_in_a_bucket_is_one_line(objects, tmp_path, capsys):
    argv = ["--config", "configs/quickstart.py", "--workdir", str(tmp_path)]
    argv += ["--config.data.name=folder", "--config.data.path=gs://bucket/images"]
    with pytest.raises(SystemExit) as caught:
        command.run(train.main, train.__doc__, train.FLAGS, argv)
    assert caught.value.code == 1
    assert "gs://bucket/images: data are read from a disk" in capsys.readouterr().err
