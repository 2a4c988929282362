"""The commands on a folder of real images: train, evaluate, predict; and what each says to bad input."""

import csv
import json

import numpy as np
import pytest
from PIL import Image

from vitplast_jax import command, evaluate, predict, train

CONFIG = ["--config", "configs/quickstart.py"]
SMALL = [
    *("--config.weights=", "--config.model=vit_pico_patch4_28", "--config.image_size=8", "--config.data.name=folder"),
    *("--config.batch_size=16", "--config.steps=4", "--config.warmup_steps=1", "--config.eval_every=2"),
    *("--config.checkpoint_every=2", "--config.log_every=1", "--config.mesh.data=1"),
    *("--config.data.crop_scale=0.5,1.0", "--config.data.flip=true"),
]


def call(module, *argv):
    """Runs a command in this process; returns its exit status."""
    with pytest.raises(SystemExit) as caught:
        command.run(module.main, module.__doc__, module.FLAGS, list(map(str, argv)))
    return caught.value.code


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Eleven classes named 0 to 10 ("10" sorts before "2") of real digits as PNG, split into train and test."""
    from sklearn.datasets import load_digits

    root, digits = tmp_path_factory.mktemp("images"), load_digits()
    for label in range(11):
        chosen = np.flatnonzero(digits.target == label % 10)[: 14 if label < 10 else 20][10 * (label == 10) :]
        for number, index in enumerate(chosen):
            place = root / ("train" if number < 8 else "test") / str(label)
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray((digits.images[index] * 15).astype(np.uint8)).resize((12, 10)).save(place / f"{index}.png")
    (root / "train" / "3" / "broken.jpg").write_bytes((root / "train" / "3").iterdir().__next__().read_bytes()[:60])
    return root


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("run")
    argv = [*CONFIG, *SMALL, "--workdir", workdir, f"--config.data.path={folder}", "--config.data.unreadable=skip"]
    assert call(train, *argv) == 0
    return workdir


def test_a_run_on_a_folder_counts_what_it_left_out_and_draws_its_curves(finished, folder):
    results = json.loads((finished / "results.json").read_text())
    assert results["unreadable"]["train"] + results["unreadable"]["validation"] == 1
    assert results["test"]["count"] == sum(1 for _ in (folder / "test").rglob("*.png"))
    assert results["protocol"]["preprocessing"]["mean"] == [0.5, 0.5, 0.5]
    with Image.open(finished / "curves.png") as curves:
        assert curves.width > 400


def test_evaluate_writes_what_it_prints(finished, capsys):
    assert call(evaluate, "--workdir", finished, "--batch_size", 5) == 0
    results = json.loads((finished / "results.json").read_text())["test"]
    evaluation = json.loads((finished / "evaluation.json").read_text())
    assert {key: evaluation[key] for key in ("accuracy", "balanced_accuracy", "count")} == {
        key: results[key] for key in ("accuracy", "balanced_accuracy", "count")
    }
    assert evaluation["loss"] == pytest.approx(results["loss"], rel=1e-5)
    assert list(evaluation["per_class"]) == sorted(map(str, range(11)))  # "10" before "2", as the model has learnt them
    rows = list(csv.DictReader((finished / "confusion.csv").read_text().splitlines()))
    assert sum(int(row[name]) for row in rows for name in row if name != "true") == results["count"]
    assert f"test accuracy {results['accuracy']:.2%}" in capsys.readouterr().out


def test_predict_agrees_with_evaluate_and_lists_what_it_cannot_read(finished, folder, tmp_path, capsys):
    assert call(predict, "--workdir", finished, "--images", folder, "--output", tmp_path / "out.csv") == 0
    assert "broken.jpg" in capsys.readouterr().err
    rows = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
    assert len(rows) == sum(1 for _ in folder.rglob("*.png"))
    tested = [row for row in rows if "/test/" in row["file"]]
    right = np.mean([row["class"] == row["file"].split("/")[-2] for row in tested])
    assert right == pytest.approx(json.loads((finished / "results.json").read_text())["test"]["accuracy"], abs=1e-9)
    first = rows[0]
    assert first["class"] == first["class_1"] and first["probability"] == first["probability_1"]
    assert float(first["probability_1"]) >= float(first["probability_5"]) > 0
    assert len({first[f"class_{place}"] for place in range(1, 6)}) == 5


def test_predict_on_one_file_prints(finished, folder, capsys):
    image = next((folder / "test" / "4").glob("*.png"))
    assert call(predict, "--workdir", finished, "--images", image) == 0
    assert str(image) in capsys.readouterr().out


@pytest.mark.parametrize(
    "module, argv, status, says",
    [
        (train, [*CONFIG, "--config.weights=missing.safetensors"], 1, "missing.safetensors: no such weights"),
        (train, [*CONFIG, "--config.weights={tmp}/cut.safetensors"], 1, "cut.safetensors"),
        (train, [*CONFIG, *SMALL, "--config.data.name=digits", "--config.trainable=mhaa"], 1, "names no component"),
        (train, [*CONFIG, "--config.trainabel=mha"], 2, "did you mean config.trainable?"),
        (train, [*CONFIG, *SMALL, "--config.data.path={tmp}/empty"], 1, "class 'b' has no images"),
        (train, [*CONFIG, *SMALL, "--config.data.path={tmp}/nowhere"], 1, "nowhere"),
        (train, [*CONFIG, *SMALL, "--config.data.path={folder}"], 1, "broken.jpg"),
        (train, [*CONFIG, *SMALL, "--config.data.name=digits", "--config.image_size=9"], 1, "patch size 4"),
        (train, ["--config", "configs/none.py"], 1, "configs/none.py"),
        (evaluate, ["--workdir", "{tmp}/empty"], 1, "is not a run's folder"),
        (evaluate, ["--workdir", "{run}", "--split", "tset"], 1, "tset"),
        (predict, ["--workdir", "{run}", "--images", "{tmp}/nowhere"], 1, "no such file or folder"),
        (predict, ["--workdir", "{run}"], 2, "images"),
    ],
)
def test_bad_input_is_one_clear_line(module, argv, status, says, finished, folder, tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / "empty" / "train" / name).mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "empty" / "train" / "a" / "x.png")
    (tmp_path / "cut.safetensors").write_bytes(b"\x40\0\0\0\0\0\0\0{")
    argv = [text.format(tmp=tmp_path, folder=folder, run=finished) for text in argv]
    if module is train:
        argv += ["--workdir", str(tmp_path / "run")]
    assert call(module, *argv) == status
    error = capsys.readouterr().err.strip()
    assert says in error and error.startswith("error: ") and "\n" not in error
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_base_weights_that_changed_or_vanished_are_noticed(finished, tmp_path, capsys):
    described = json.loads((finished / "config.json").read_text())
    weights = tmp_path / "base.npz"
    np.savez(weights, a=np.zeros(3))
    described["base_weights"] = {"source": str(weights), "sha256": "0" * 64}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps(described))
    (tmp_path / "run" / "checkpoints" / "best" / "4").mkdir(parents=True)
    assert call(evaluate, "--workdir", tmp_path / "run") == 1
    assert "have changed since the run" in capsys.readouterr().err
    weights.unlink()
    assert call(evaluate, "--workdir", tmp_path / "run") == 1
    assert "base.npz: no such weights" in capsys.readouterr().err
