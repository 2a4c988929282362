"""The configs of the papers' benchmarks: all parse, agree with the table, say what is missing, and train a step."""

import dataclasses
import io

import pytest
from PIL import Image

from vitplast_jax import models
from vitplast_jax.command import load_config
from vitplast_jax.data import prepare, prepared, protocols
from vitplast_jax.errors import UserError
from vitplast_jax.training import loop

models.specs.SIZES["nano"] = models.specs._Size(width=32, depth=2, heads=2)  # a size for tests alone
CONFIGS = {"plasticity": "plasticity_benchmark", "fgvc": "fgvc", "vtab": "vtab", "pretraining": None, "other": None}
ROWS = [row for row in protocols.TASKS.values() if CONFIGS[row.benchmark]]


def config_of(row, *overrides, suffix=""):
    argument = row.name.removeprefix("fgvc/").removeprefix("vtab/")
    return load_config(f"configs/{CONFIGS[row.benchmark]}.py:{argument}{suffix}", overrides)


def test_every_benchmark_has_a_config_that_agrees_with_its_row():
    for row in ROWS:
        config, pixels = config_of(row), row.pixels
        crop = {"resized": ((0.08, 1.0), 0.0), "plain": ((), pixels.test_crop_pct), "none": ((), 0.0)}[pixels.crop]
        assert config.data.name == row.name
        assert (config.data.mean, config.data.std) == (pixels.mean, pixels.std), row.name
        assert (config.data.crop_scale, config.data.window) == crop, row.name
        assert (config.data.flip, config.data.interpolation) == (pixels.flip, pixels.interpolation), row.name
        assert config.data.test_interpolation == pixels.interpolation, row.name
        assert (config.data.resize, config.data.crop_pct) == (pixels.test_resize, pixels.test_crop_pct), row.name
        if row.benchmark == "plasticity":  # ORACLES A3
            steps = {"domainnet": 20_000, "flowers102": 5000, "pet": 4000}.get(row.name.partition("/")[0], 10_000)
            assert (config.steps, config.warmup_steps, config.batch_size) == (steps, 2000, 512)
        else:  # ORACLES B2
            rate = {"fgvc": (5e-3, 1e-2), "vtab": (1e-2, 0.0)}[row.benchmark]
            assert (config.learning_rate, config.weight_decay, config.batch_size) == (*rate, 32)
            assert config.optimizer == "adamw" and config.warmup_steps == config.steps // 10
        if row.benchmark == "fgvc":
            kept = row.counts["train"] if "validation" in row.counts else int(0.9 * row.counts["train"])
            assert config.steps == 100 * kept // 32, row.name
        if row.few:
            final = config_of(row, suffix=",final")
            assert (config.data.validation, final.data.validation, final.steps) == (0.2, 0.0, 3125)


@pytest.mark.parametrize("file", ["plasticity_benchmark", "fgvc", "vtab"])
def test_a_config_names_its_arguments(file):
    with pytest.raises(UserError, match=f"{file}.py:.*'nonsense'"):
        load_config(f"configs/{file}.py:nonsense")
    with pytest.raises(UserError, match="missing 1 required positional argument"):
        load_config(f"configs/{file}.py")


@pytest.mark.parametrize("name", ["cifar10_c/snow_5", "fgvc/nabirds", "vtab/kitti"])
def test_what_is_missing_is_one_line_before_anything_is_made(name, tmp_path):
    config = config_of(protocols.task(name))
    with pytest.raises(UserError, match=f"needs data.path, a prepared folder; .*prepare_dataset.py {name} --output"):
        loop.train_and_evaluate(config, tmp_path / "run")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["cifar100", "fgvc/cars", "vtab/dspr_loc"])
def test_a_step_of_each_kind(name, tmp_path, monkeypatch):
    """Ragged, small and equal, and grey images of 0 and 1; protocol and fingerprints are in the results (R24)."""
    row = protocols.task(name)
    parts = {split: ((found[0][0], 0, None),) for split, found in row.parts.items()}
    row = dataclasses.replace(row, parts=parts, counts=dict.fromkeys({part[0][0] for part in parts.values()}, 8))
    monkeypatch.setitem(protocols.TASKS, name, row)

    def images():
        for split in sorted(row.counts):
            for place in range(8):
                stream = io.BytesIO()
                side = 8 + (place if name == "fgvc/cars" else 0)
                colour = place % 2 if row.scale > 1 else 20 * place
                Image.new("L" if row.scale > 1 else "RGB", (8, side), colour).save(stream, "PNG")
                yield split, stream.getvalue(), place

    prepare.write_records(tmp_path / "set" / prepared.DATA, name, [str(i) for i in range(row.classes)], images())
    for rule in ("dsprites_x", "dsprites_orientation"):
        monkeypatch.setitem(protocols.RULES, rule, lambda values: int(values("label")[0]))
    prepare.write_index(row, tmp_path / "set", {"label": [str(i) for i in range(row.classes)]})
    small = [("weights", ""), ("model", "vit_nano_patch4_8"), ("image_size", "0"), ("batch_size", "8"), ("steps", "1")]
    small += [("warmup_steps", "0"), ("mesh.data", "1"), ("data.path", str(tmp_path / "set")), ("trainable", "ln1")]
    config = config_of(row, *small, ("data.mean", "0.5"), ("data.std", "0.5"))
    results = loop.train_and_evaluate(config, tmp_path / "run")
    assert results["protocol"]["benchmark"]["source"] == row.source and results["test"]["count"] == 8
    assert results["protocol"]["benchmark"]["size"] == ("1k" if row.few else "full")
    assert results["protocol"]["preprocessing"]["crop_pct"] == row.pixels.test_crop_pct
    assert results["protocol"]["preprocessing"]["resize"] == row.pixels.test_resize
    assert len(results["data_fingerprint"]["train"]) == 64
    if row.scale > 1:
        other = config_of(row, *small, ("data.mean", "0.3"), ("data.std", "0.5"))
        again = loop.train_and_evaluate(other, tmp_path / "other")
        assert again["data_fingerprint"] == results["data_fingerprint"] and again["protocol"] != results["protocol"]
