"""The measuring pass against a float64 reimplementation of the protocol, the result's contract, and the command."""

import csv
import json

import jax.numpy as jnp
import numpy as np
import pytest

from vitplast_jax import components, models, trees
from vitplast_jax.errors import UserError
from vitplast_jax.models import ViTSpec
from vitplast_jax.plasticity import block_pass, measure, protocol, rates
from vitplast_jax.plasticity.pairs import choose_pairs
from vitplast_jax.plasticity.select import rank, recommend, trainable_line

SPEC = ViTSpec(name="tiny", img_size=(8, 8), patch_size=(4, 4), width=12, depth=2, heads=3, hidden=30, num_classes=3)


@pytest.fixture(scope="module")
def model():
    rng = np.random.default_rng(0)
    return models.build(
        SPEC,
        trees.map_paths(
            lambda _, leaf: jnp.asarray(0.4 * rng.normal(size=leaf.shape), jnp.float32),
            models.abstract_parameters(SPEC),
        ),
    )


def draw_images(n, seed, scale=1.0):
    return (scale * np.random.default_rng(seed).normal(size=(n, 8, 8, 3))).astype(np.float32)


# --- the protocol once more, in numpy and float64 ----------------------------------------------------------------


def layer_norm(x, p):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + SPEC.eps) * p["scale"] + p["bias"]


def attention(x, p):
    outputs = []
    query, key, value = np.split(x @ p["qkv"]["kernel"] + p["qkv"]["bias"], 3, axis=-1)
    for h in range(SPEC.heads):
        s = slice(4 * h, 4 * h + 4)
        scores = query[:, s] @ key[:, s].T / 2.0  # sqrt(4)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        outputs.append(weights / weights.sum(-1, keepdims=True) @ value[:, s])
    return np.concatenate(outputs, -1) @ p["out"]["kernel"] + p["out"]["bias"]


def components_of(x, p):
    padded = np.concatenate([x, np.zeros((len(x), SPEC.hidden - SPEC.width))], -1)
    return {
        "ln1": layer_norm(x, p["norm1"]),
        "mha": attention(x, p["attn"]),
        "ln2": layer_norm(x, p["norm2"]),
        "fc1": x @ p["mlp"]["fc1"]["kernel"] + p["mlp"]["fc1"]["bias"],
        "fc2": padded @ p["mlp"]["fc2"]["kernel"] + p["mlp"]["fc2"]["bias"],
    }


def float64(tree):
    return {k: float64(v) if isinstance(v, dict) else np.asarray(v, np.float64) for k, v in tree.items()}


def reference_rates(model, x, y, pairs):
    """{(block, component): rates of the pairs}, every component on the embedding output."""
    blocks = float64(models.parameters(model))["blocks"]
    embed = [np.asarray(model.embed(jnp.asarray(a)), np.float64) for a in (x, y)]
    found = {}
    for index, block in blocks.items():
        of_x, of_y = ([components_of(one, block) for one in e] for e in embed)
        for name in of_x[0]:
            found[index, name] = np.array(
                [
                    np.linalg.norm(of_x[i][name] - of_y[j][name]) / np.linalg.norm(embed[0][i] - embed[1][j])
                    for i, j in pairs
                ]
            )
    return found


def test_reference_protocol_equals_a_float64_loop(model):
    x, y = draw_images(9, 1), draw_images(7, 2, scale=0.5)
    result = measure(model, x, y, protocol="reference", batch_size=4)
    expected = reference_rates(model, x, y, [(i, i) for i in range(7)])
    assert (result["pairs"], result["images_x"], result["images_y"]) == (7, 7, 7)
    for row in result["rows"]:
        values = expected[row["block"], row["component"]]
        half = 1.96 * values.std() / np.sqrt(7)
        assert row["mean"] == pytest.approx(values.mean(), rel=1e-5)
        assert row["std"] == pytest.approx(values.std(), rel=1e-3)
        assert row["max"] == pytest.approx(values.max(), rel=1e-5)
        assert (row["low"], row["high"]) == pytest.approx((values.mean() - half, values.mean() + half), rel=1e-4)
        assert row["quantiles"]["0.5"] == pytest.approx(np.median(values), rel=2e-3)
    for entry in result["components"]:
        by_pair = np.mean([expected[b, entry["component"]] for b in range(SPEC.depth)], axis=0)
        assert entry["mean"] == pytest.approx(by_pair.mean(), rel=1e-5)
        assert entry["high"] - entry["mean"] == pytest.approx(1.96 * by_pair.std() / np.sqrt(7), rel=1e-3)


def test_all_pairs_equal_a_float64_loop_whatever_the_tile(model, monkeypatch):
    x, y = draw_images(9, 1), draw_images(6, 2)
    expected = reference_rates(model, x, y, [(i, j) for i in range(9) for j in range(6)])
    whole = measure(model, x, y, pairing="all", batch_size=4)
    monkeypatch.setattr(protocol, "_TILE_BYTES", 1)  # tiles of one batch
    tiled = measure(model, x, y, pairing="all", batch_size=4)
    assert whole["pairs"] == tiled["pairs"] == 54
    for one, other in zip(whole["rows"], tiled["rows"], strict=True):
        values = expected[one["block"], one["component"]]
        assert one["mean"] == pytest.approx(values.mean(), rel=1e-5)
        assert one["max"] == pytest.approx(values.max(), rel=1e-5)
        assert other["mean"] == pytest.approx(one["mean"], rel=1e-6)
        assert other["low"] == pytest.approx(one["low"], rel=1e-5)


@pytest.mark.parametrize("inputs", ["block", "natural"])
def test_other_inputs_are_those_of_the_forward_pass(model, inputs):
    x, y = draw_images(6, 1), draw_images(6, 2)
    result = measure(model, x, y, protocol="reference", inputs=inputs, batch_size=4)
    (_, of_x), (_, of_y) = (model(jnp.asarray(a), intermediates=True) for a in (x, y))
    given = {"ln1": "input", "mha": "norm1", "ln2": "mid", "fc1": "norm2", "fc2": "act"}
    returned = {"ln1": "norm1", "mha": "mha", "ln2": "norm2", "fc1": "fc1", "fc2": "fc2"}
    blocks = float64(models.parameters(model))["blocks"]
    for row in result["rows"]:
        a, b = of_x["blocks"][row["block"]], of_y["blocks"][row["block"]]
        name = row["component"]
        if inputs == "natural":
            values = rates.matched_rates(a[returned[name]], b[returned[name]], a[given[name]], b[given[name]])
        else:
            streams = [np.asarray(s["input"], np.float64) for s in (a, b)]
            outputs = [np.stack([components_of(one, blocks[row["block"]])[name] for one in s]) for s in streams]
            values = [
                np.linalg.norm(u - v) / np.linalg.norm(s - t) for u, v, s, t in zip(*outputs, *streams, strict=True)
            ]
        assert row["mean"] == pytest.approx(float(np.mean(values)), rel=1e-4), name


def test_batch_size_changes_nothing(model):
    x, y = draw_images(10, 1), draw_images(10, 2)
    results = [measure(model, x, y, batch_size=size) for size in (3, 4)]
    for rows in zip(*(r["rows"] for r in results), strict=True):
        assert [r["mean"] for r in rows] == pytest.approx([rows[0]["mean"]] * 2, rel=1e-6)


def test_fc1_factor_keeps_distances():
    rng = np.random.default_rng(0)
    kernel, x = rng.normal(size=(6, 20)).astype(np.float32), rng.normal(size=(5, 6)).astype(np.float32)
    factor = block_pass.fc1_factor(jnp.asarray(kernel))
    assert factor.shape == (6, 6)
    np.testing.assert_allclose(jnp.linalg.norm(x @ factor), np.linalg.norm(x @ kernel), rtol=1e-5)
    wide = jnp.asarray(kernel.T)
    assert block_pass.fc1_factor(wide) is wide or (block_pass.fc1_factor(wide) == wide).all()


# --- which images ------------------------------------------------------------------------------------------------


def choose(n_x, n_y, **changes):
    fields = dict(protocol="ours", pairing="matched", pairs=0, images=0, batch_size=4, seed=0)
    return choose_pairs(n_x, n_y, **{**fields, **changes})


def test_choosing_pairs():
    x, y = choose(10, 6)
    assert len(x) == len(y) == 6 and len(set(x)) == len(set(y)) == 6
    x, y = choose(10, 10)
    assert x.tolist() != y.tolist()  # two orders: one set given twice is not compared with itself
    assert choose(10, 10, seed=1)[0].tolist() != x.tolist()
    x, y = choose(10, 6, protocol="reference")
    assert x.tolist() == y.tolist() == list(range(6))
    x, y = choose(10, 6, protocol="reference", pairs=12)  # the loader drops the incomplete batch of 4 and starts again
    assert x.tolist() == [*range(8), *range(4)] and y.tolist() == [0, 1, 2, 3] * 3
    assert [len(side) for side in choose(10, 6, pairing="all")] == [10, 6]
    assert [len(side) for side in choose(10, 6, pairing="all", pairs=16)] == [4, 4]
    assert [len(side) for side in choose(100, 3, pairing="all", pairs=30)] == [10, 3]
    assert [len(side) for side in choose(10, 6, pairing="all", images=5)] == [5, 5]
    with pytest.raises(UserError, match="at least 2 images"):
        choose(1, 6)


def test_uint8_images_are_normalised_as_the_protocol_says(model):
    rng = np.random.default_rng(0)
    x, y = (rng.integers(0, 256, (4, 8, 8, 3), dtype=np.uint8) for _ in range(2))
    for name, mean, std in (("ours", 0.5, 0.5), ("reference", [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])):
        by_hand = [((a / 255 - mean) / std).astype(np.float32) for a in (x, y)]
        found, expected = measure(model, x, y, protocol=name), measure(model, *by_hand, protocol=name)
        if name == "ours":
            spec = models.specs.replace(SPEC, preprocessing=models.Preprocessing(crop_pct=1.0))
            found = measure(models.build(spec, models.parameters(model)), x, y, protocol=name)
        for one, other in zip(found["rows"], expected["rows"], strict=True):
            assert one["mean"] == pytest.approx(other["mean"], rel=1e-4)


def test_files_are_read_like_arrays(model, tmp_path):
    from PIL import Image

    from vitplast_jax.data.sources import Source

    rng = np.random.default_rng(0)
    x, y = (rng.integers(0, 256, (4, 8, 8, 3), dtype=np.uint8) for _ in range(2))
    files = tuple(str(tmp_path / f"{i}.png") for i in range(4))
    for image, file in zip(x, files, strict=True):
        Image.fromarray(image).save(file)
    labels = np.zeros(4, np.int32)
    source = Source("folder", "test", labels, ("a",), tuple("0123"), files=files)
    found, expected = (measure(model, side, y, protocol="reference", batch_size=3) for side in (source, x))
    for one, other in zip(found["rows"], expected["rows"], strict=True):
        assert one["mean"] == pytest.approx(other["mean"], rel=1e-5)


def test_equal_images_are_left_out_and_said(model):
    x, y = draw_images(4, 1), draw_images(4, 2)
    y[2] = x[2]
    result = measure(model, x, y, protocol="reference")
    assert result["pairs"] == 3 and result["excluded_pairs"] == 1 and "1 pairs" in result["notes"]["excluded_pairs"]
    json.dumps(result, allow_nan=False)
    with pytest.raises(UserError, match="two equal images"):
        measure(model, x, x, protocol="reference")


def test_bad_input_is_one_clear_line(model):
    x = draw_images(4, 1)
    with pytest.raises(UserError, match=r"measure.protocol is 'paper', expected one of ours, reference"):
        measure(model, x, x, protocol="paper")
    with pytest.raises(UserError, match=r"must be \(8, 8\), not \(4, 4\)"):
        measure(model, x[:, :4, :4], x)
    with pytest.raises(UserError, match="int64"):
        measure(model, x.astype(np.int64), x)
    params = models.parameters(model)
    broken = trees.map_paths(lambda p, a: a * np.nan if p == "blocks/1/mlp/fc2/kernel" else a, params)
    with pytest.raises(UserError, match="block 1: fc2 returns NaN"):
        measure(models.with_parameters(model, broken), x, draw_images(4, 2))


# --- the result --------------------------------------------------------------------------------------------------


def test_result_keeps_its_contract(model):
    result = measure(model, draw_images(5, 1), draw_images(5, 2))
    row_keys = {"block", "component", "mean", "low", "high", "std", "max", "quantiles", "bound", "spectral_norm"}
    assert row_keys | {"parameters", "grad_norm"} == set(result["rows"][0])
    assert {"component", "mean", "low", "high", "rank", "bound_rank"} <= set(result["components"][0])
    assert {"trainable", "reason", "ties"} == set(result["recommendation"])
    assert len(result["rows"]) == 5 * SPEC.depth
    params = models.parameters(model)
    counted = components.counts(params)
    for entry in result["components"]:
        assert entry["parameters"] == counted[entry["component"]]
    components.mask(params, result["recommendation"]["trainable"])  # train takes it
    assert result["rows"][0]["grad_norm"] is None and "grad_norm" in result["notes"]
    assert json.loads(json.dumps(result, allow_nan=False)) == result


def entry(name, mean, half, parameters=10):
    return {"component": name, "mean": mean, "low": mean - half, "high": mean + half, "parameters": parameters}


def test_recommendation():
    found = recommend([entry("fc1", 2.0, 0.3), entry("mha", 2.1, 0.2, 1234), entry("ln1", 1.0, 0.1)])
    assert found["trainable"] == ["mha"] and found["ties"] == ["fc1"]
    assert "1,234" in found["reason"] and "cannot be told apart" in found["reason"]
    assert recommend([entry("fc1", 2.0, 0.1), entry("mha", 2.5, 0.1)])["ties"] == []
    assert trainable_line(found) == 'trainable=("mha",)'
    assert rank([1.0, 3.0, None, 3.0]) == [3, 1, None, 1]


# --- the command -------------------------------------------------------------------------------------------------


@pytest.fixture
def config_file(tmp_path):
    """A config on the digits with a small random ViT stored as a file, and a sample of images beside it."""
    from vitplast_jax.weights.export import save_timm

    spec = models.specs.replace(SPEC, img_size=28, patch_size=(7, 7))
    rng = np.random.default_rng(0)
    shapes = models.abstract_parameters(spec)
    save_timm(
        trees.map_paths(lambda _, leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes),
        spec,
        tmp_path / "small.safetensors",
    )
    images = np.random.default_rng(0).integers(0, 256, (12, 28, 28, 1), dtype=np.uint8)
    np.savez(tmp_path / "small.sample.npz", images=images, labels=np.zeros(12, np.int32))
    path = tmp_path / "config.py"
    path.write_text(
        "from vitplast_jax.training.config import default_config\n"
        "def get_config():\n"
        "    config = default_config()\n"
        f"    config.weights = {str(tmp_path / 'small.safetensors')!r}\n"
        "    config.data.name = 'digits'\n"
        "    config.measure.batch_size = 8\n"
        "    return config\n"
    )
    return path


def run_command(*arguments):
    from vitplast_jax import command
    from vitplast_jax import measure as measure_command

    with pytest.raises(SystemExit) as ending:
        command.run(measure_command.main, measure_command.__doc__, measure_command.FLAGS, arguments)
    return ending.value.code


def test_command_writes_files_that_agree(config_file, tmp_path, capsys):
    folder = tmp_path / "out"
    assert run_command(f"--config={config_file}", f"--workdir={folder}") == 0
    printed = capsys.readouterr().out
    result = json.loads((folder / "plasticity.json").read_text())
    assert (result["pairs"], result["images_x"], result["images_y"]) == (12, 12, 12)
    with open(folder / "plasticity.csv") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(result["rows"]) == 5 * SPEC.depth
    for line, row in zip(lines, result["rows"], strict=True):
        assert (int(line["block"]), line["component"]) == (row["block"], row["component"])
        assert float(line["mean"]) == row["mean"] and float(line["quantiles_0.5"]) == row["quantiles"]["0.5"]
        assert f"{row['mean']:.3f}" in printed
    assert (folder / "plasticity.png").read_bytes()[:4] == b"\x89PNG"
    assert "12 matched pairs" in printed and trainable_line(result["recommendation"]) in printed


def test_command_without_a_sample_says_what_to_do(config_file, tmp_path, capsys):
    (tmp_path / "small.sample.npz").unlink()
    assert run_command(f"--config={config_file}", f"--workdir={tmp_path / 'out'}") == 1
    error = capsys.readouterr().err
    assert "--config.measure.x_name" in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_command_says_first_that_the_folder_cannot_be_written(config_file, tmp_path, capsys):
    (tmp_path / "taken").write_text("")
    assert run_command(f"--config={config_file}", f"--workdir={tmp_path / 'taken' / 'out'}") == 1
    assert "taken is a file" in capsys.readouterr().err


def test_command_needs_one_of_config_and_run(tmp_path, capsys):
    assert run_command(f"--workdir={tmp_path}") == 2
    assert "--config" in capsys.readouterr().err
