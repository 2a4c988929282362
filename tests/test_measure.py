"""The measuring pass against a float64 reimplementation of the protocol, the result's contract, and the command."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vitplast_jax import components, models, sharding, trees
from vitplast_jax.errors import UserError
from vitplast_jax.models import ViTSpec
from vitplast_jax.plasticity import block_pass, measure, protocol, rates, stream
from vitplast_jax.plasticity import pairs as pairing_rules
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
    for contrast in result["contrasts"]:
        by_pair = np.mean([expected[b, contrast["first"]] - expected[b, contrast["second"]] for b in (0, 1)], axis=0)
        assert contrast["difference"] == pytest.approx(by_pair.mean(), rel=1e-4)
        half = 1.96 * by_pair.std() / np.sqrt(7)
        assert contrast["high"] - contrast["difference"] == pytest.approx(half, rel=1e-3)


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
    close = [entry("fc1", 2.0, 0.3), entry("mha", 2.1, 0.2)]  # their intervals overlap, their difference is clear
    contrast = {"first": "mha", "second": "fc1", "difference": 0.1, "low": 0.05, "high": 0.15}
    assert recommend(close, [contrast])["ties"] == []
    assert recommend(close, [contrast | {"low": -0.01}])["ties"] == ["fc1"]
    assert trainable_line(found) == 'trainable=("mha",)'
    assert rank([1.0, 3.0, None, 3.0]) == [3, 1, None, 1]


# --- many devices, kills, single ratios ----------------------------------------------------------------------------


@pytest.mark.parametrize("inputs", ["embedding", "natural"])
def test_eight_devices_give_the_numbers_of_one(model, inputs):
    x, y = draw_images(19, 1), draw_images(21, 2)
    one, eight = (
        measure(model, x, y, inputs=inputs, pairing="all", batch_size=8, mesh=sharding.make_mesh(devices))
        for devices in (1, 8)
    )
    assert one["pairs"] == eight["pairs"] == 19 * 21
    for a, b in zip(one["rows"], eight["rows"], strict=True):
        assert [b[k] for k in ("mean", "low", "max")] == pytest.approx([a[k] for k in ("mean", "low", "max")], rel=1e-5)


def test_ring_distances_are_those_of_all_pairs():
    mesh = sharding.make_mesh(4, 2)
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(n, 3, 5)).astype(np.float32) for n in (8, 16))
    rows = sharding.batch(mesh)
    found = block_pass.make_distances("all", mesh)(*(jax.device_put(a, rows) for a in (x, y)))
    np.testing.assert_allclose(found, np.linalg.norm((x[:, None] - y[None]).reshape(8, 16, -1), axis=-1), rtol=1e-5)


def test_no_device_receives_a_whole_side():
    mesh = sharding.make_mesh(8)
    side = jax.ShapeDtypeStruct((64, 5, 7), jnp.float32, sharding=sharding.batch(mesh))
    text = block_pass.make_distances("all", mesh).lower(side, side).compile().as_text()
    assert "collective-permute" in text
    gathered = [line for line in text.splitlines() if "all-gather" in line]
    assert not any("5,7" in line for line in gathered)


@pytest.mark.parametrize("pairing", ["matched", "all"])
def test_a_killed_measurement_goes_on_with_identical_numbers(model, pairing, tmp_path, monkeypatch):
    x, y = draw_images(12, 1), draw_images(13, 2)
    options = dict(pairing=pairing, batch_size=4, ratios=True)
    monkeypatch.setattr(protocol, "_TILE_BYTES", 1)
    monkeypatch.setattr(stream, "_SAVE_SECONDS", -1.0)
    whole = measure(model, x, y, folder=tmp_path / "whole", **options)
    add, calls = stream.Stream.add, []

    def killed(self, *arguments):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(1)
        add(self, *arguments)

    monkeypatch.setattr(stream.Stream, "add", killed)
    with pytest.raises(KeyboardInterrupt):
        measure(model, x, y, folder=tmp_path / "cut", **options)
    assert (tmp_path / "cut" / "measuring.npz").exists()
    monkeypatch.setattr(stream.Stream, "add", lambda self, *a: (calls.append(1), add(self, *a)))
    assert measure(model, x, y, folder=tmp_path / "cut", **options) == whole
    assert len(calls) == (3 if pairing == "matched" else 12)  # tiles: none was measured twice
    assert sorted(f.name for f in (tmp_path / "cut").iterdir()) == ["ratios.npz"]
    with np.load(tmp_path / "cut" / "ratios.npz") as cut, np.load(tmp_path / "whole" / "ratios.npz") as other:
        assert cut["ratios"].shape == (2, 5, 12) if pairing == "matched" else (2, 5, 12, 13)
        np.testing.assert_array_equal(cut["ratios"], other["ratios"])
        found = cut["ratios"].reshape(2, 5, -1).mean(-1).ravel()
    np.testing.assert_allclose(found, [row["mean"] for row in whole["rows"]], rtol=1e-5)


def test_the_state_of_another_measurement_is_not_taken(model, tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "_SAVE_SECONDS", -1.0)
    monkeypatch.setattr(stream.Stream, "finish", lambda self: None)  # leaves its state behind
    x, y = draw_images(4, 1), draw_images(4, 2)
    measure(model, x, y, folder=tmp_path)
    assert measure(model, x, 2 * y, folder=tmp_path) == measure(model, x, 2 * y)
    (tmp_path / "measuring.npz").write_bytes(b"PK")
    assert measure(model, x, y, folder=tmp_path) == measure(model, x, y)


# --- other pairs -------------------------------------------------------------------------------------------------


def test_pairs_of_other_distributions():
    labels = np.array([0, 1] * 6 + [2])
    x, y = choose(0, 13, distribution="downstream")
    assert len(x) == len(y) == 6 and len({*x, *y}) == 12
    x, y = choose(0, 13, distribution="downstream", pairing="all")
    assert {*x, *y} == set(range(13)) and len(x) == 6
    x, y = choose(0, 13, distribution="class", labels=labels)
    assert len(x) == 6 and len({*x, *y}) == 12 and (labels[x] == labels[y]).all() and 12 not in {*x, *y}
    x, y = choose(0, 13, distribution="perturbation", pairs=5)
    assert x.tolist() == y.tolist() and len(set(x)) == 5
    with pytest.raises(UserError, match="measure.pairing=matched"):
        choose(0, 13, distribution="class", labels=labels, pairing="all")
    with pytest.raises(UserError, match="measure.protocol=ours"):
        choose(0, 13, distribution="downstream", protocol="reference")


def test_perturbations_have_their_radius_and_small_ones_give_the_derivative(model):
    images = draw_images(6, 1)
    side = pairing_rules.open_images(images, SPEC, None, "y")
    moved = side.perturbed(0.5, 3).prepare(jnp.asarray(images), jnp.arange(6))
    np.testing.assert_allclose(jnp.sqrt(jnp.square(moved - images).sum((1, 2, 3))), 0.5, rtol=1e-5)
    again = side.perturbed(0.5, 3).prepare(jnp.asarray(images[2:3]), jnp.array([2]))
    np.testing.assert_allclose(again[0], moved[2], rtol=1e-6)  # of the image, not of its place in a batch
    small = measure(model, None, images, distribution="perturbation", radius=1e-2)
    noise = np.asarray(side.perturbed(1.0, 0).prepare(jnp.zeros((6, 8, 8, 3)), jnp.arange(6)))
    for index, row in ((1, small["rows"][1]), (2, small["rows"][2])):
        component = (model.blocks[0].attn, model.blocks[0].norm2)[index - 1]
        rates = [
            [np.linalg.norm(a) for a in jax.jvp(f, (image[None],), (direction[None],))[1:]][0]
            / np.linalg.norm(jax.jvp(model.embed, (image[None],), (direction[None],))[1])
            for image, direction in zip(images, noise, strict=True)
            for f in [lambda image, component=component: component(model.embed(image))]
        ]
        assert row["mean"] == pytest.approx(float(np.mean(rates)), rel=2e-2)
