"""Bounds of the plasticity: values by hand, and no measured rate above its bound."""

import jax.numpy as jnp
import numpy as np
import pytest

from vitplast_jax import models, trees
from vitplast_jax.models import ViTSpec
from vitplast_jax.plasticity import bounds, measure, rates
from vitplast_jax.plasticity.bounds import attention_bound, layer_norm_bound, spectral_norm, split_heads, why_unbounded


def tiny_spec(**changes):
    fields = dict(name="tiny", img_size=(8, 8), patch_size=(4, 4), width=12, depth=2, heads=3, hidden=24, num_classes=3)
    return ViTSpec(**{**fields, **changes})


def random_model(seed, scale=0.6, **changes):
    """Every parameter drawn, biases and layer norms too."""
    spec, rng = tiny_spec(**changes), np.random.default_rng(seed)
    draw = lambda _, leaf: jnp.asarray(rng.normal(size=leaf.shape) * scale, jnp.float32)  # noqa: E731
    return models.build(spec, trees.map_paths(draw, models.abstract_parameters(spec)))


def random_attention(rng, d, bias=True):
    qkv = {"kernel": rng.normal(size=(d, 3 * d)), "bias": rng.normal(size=3 * d) if bias else np.zeros(3 * d)}
    return {"qkv": qkv, "out": {"kernel": rng.normal(size=(d, d)), "bias": rng.normal(size=d)}}


def test_spectral_norms_equal_a_full_svd():
    rng = np.random.default_rng(0)
    wide, left, right = rng.normal(size=(7, 30)), rng.normal(size=(30, 4)), rng.normal(size=(30, 4))
    assert spectral_norm(wide) == pytest.approx(np.linalg.svd(wide)[1][0], rel=1e-12)
    assert spectral_norm(wide.T) == pytest.approx(np.linalg.svd(wide)[1][0], rel=1e-12)
    assert spectral_norm(left, right) == pytest.approx(np.linalg.svd(left @ right.T)[1][0], rel=1e-12)


def test_layer_norm_bound_by_hand():
    assert layer_norm_bound(np.array([1.0, -3.0]), 0.0, 0.5) == 6.0  # |gamma|, and 1 / sigma
    assert layer_norm_bound(np.ones(2), 1e-2, 0.0) == pytest.approx(10.0)  # epsilon keeps it finite
    assert layer_norm_bound(np.ones(2), 0.0, None) is None


def test_energy_in_head_zero_alone_gives_zero_for_the_others():
    rng, d, heads = np.random.default_rng(0), 12, 3
    attention = random_attention(rng, d)
    for third in range(3):  # q, k, v: the columns of heads 1 and 2
        attention["qkv"]["kernel"][:, third * d + 4 : (third + 1) * d] = 0
    attention["out"]["kernel"][4:] = 0
    parts = split_heads(attention, heads)
    assert all(np.any(parts[0][name]) for name in ("query", "key", "value", "out"))
    for part in parts[1:]:
        assert not any(np.any(part[name]) for name in ("query", "key", "value", "out"))
    first = {
        "qkv": {
            "kernel": np.concatenate([attention["qkv"]["kernel"][:, i * d : i * d + 4] for i in range(3)], 1),
            "bias": np.concatenate([attention["qkv"]["bias"][i * d : i * d + 4] for i in range(3)]),
        },
        "out": {"kernel": attention["out"]["kernel"][:4]},
    }
    assert attention_bound(attention, heads, 5, 2.0) == pytest.approx(attention_bound(first, 1, 5, 2.0))


def test_attention_bound_by_hand():
    # one head of width 1: O = 2, V = 3, A = Wq Wk = 0.5, n = 2 tokens, r = 2
    attention = {
        "qkv": {"kernel": np.array([[1.0, 0.5, 3.0]]), "bias": np.zeros(3)},
        "out": {"kernel": np.array([[2.0]])},
    }
    assert attention_bound(attention, 1, 2, 2.0) == pytest.approx(6 * np.sqrt(6 + 27 * 16 * 0.25))
    attention["qkv"]["bias"] = np.array([1.0, 7.0, 7.0])  # tokens [x, 1]: ||[[0.5], [0.5]]||^2 = 0.5, (r^2 + 1)^2 = 25
    assert attention_bound(attention, 1, 2, 2.0) == pytest.approx(6 * np.sqrt(6 + 27 * 25 * 0.5))


@pytest.mark.parametrize("inputs", ["embedding", "block", "natural"])
@pytest.mark.parametrize("seed", range(3))
def test_no_measured_rate_exceeds_its_bound(seed, inputs):
    rng = np.random.default_rng(seed)
    model = random_model(seed, scale=float(rng.choice([0.05, 0.6, 2.0])))
    x, y = (rng.normal(size=(24, 8, 8, 3)).astype(np.float32) * rng.choice([0.1, 1, 5]) for _ in range(2))
    result = measure(model, x, y, inputs=inputs, pairing="all")
    for row in result["rows"]:
        assert 0 < row["max"] <= row["bound"] * (1 + 1e-4), row


def test_query_bias_belongs_to_the_bound():
    """Scores that come from the query bias alone: the bound without it is broken, ours holds.

    Tokens (0, 1) and (0, -1), keys and values the tokens themselves, query (a sqrt(2), 0) for every token. Moving the
    first token by (e, 0) moves its score by a e and the output of both tokens by a e / 2: a rate of a / sqrt(2).
    """
    a, eye, zero = 40.0, np.eye(2), np.zeros((2, 2))
    qkv = {"kernel": np.concatenate([zero, eye, eye], 1), "bias": np.array([a * np.sqrt(2), 0, 0, 0, 0, 0])}
    attention = {"qkv": qkv, "out": {"kernel": eye, "bias": np.zeros(2)}}
    module = models.with_parameters(random_model(0, width=2, heads=1, hidden=4).blocks[0].attn, _float32(attention))
    x = jnp.array([[[0.0, 1.0], [0.0, -1.0]]])
    y = x.at[0, 0, 0].set(1e-3)
    found = float(rates.matched_rates(module(x), module(y), x, y)[0])
    assert found == pytest.approx(a / np.sqrt(2), rel=1e-2)
    plain = {"qkv": {"kernel": qkv["kernel"]}, "out": attention["out"]}
    assert attention_bound(plain, 1, 2, 1.001) < found / 10
    assert found < attention_bound(attention, 1, 2, 1.001)


def test_a_masked_key_bias_changes_no_bound():
    """DINOv3's bias mask: what stands in the keys' third is not used; one that is used cancels in the softmax."""
    values = []
    for key_bias in (True, False):
        model = random_model(3, key_bias=key_bias)
        params = models.parameters(model)
        for junk in (0.0, 1e3):
            bias = params["blocks"][0]["attn"]["qkv"]["bias"].at[12:24].set(junk)
            changed = trees.map_paths(lambda p, a, b=bias: b if p == "blocks/0/attn/qkv/bias" else a, params)
            rows = bounds(models.with_parameters(model, changed), sigma=0.5, radius=3.0)
            values.append(rows[1]["bound"])
    assert values[0] > 0 and values == [values[0]] * 4
    x, y = (np.random.default_rng(k).normal(size=(9, 8, 8, 3)).astype(np.float32) for k in (0, 1))
    masked = models.with_parameters(random_model(3, key_bias=False), changed)
    for row in measure(masked, x, y, pairing="all")["rows"]:
        assert 0 < row["max"] <= row["bound"] * (1 + 1e-4), row


def _float32(tree):
    return {k: _float32(v) if isinstance(v, dict) else jnp.asarray(v, jnp.float32) for k, v in tree.items()}


def test_bounds_of_a_model():
    model = random_model(1)
    rows = bounds(model)
    assert [(r["block"], r["component"]) for r in rows[:5]] == [(0, c) for c in ("ln1", "mha", "ln2", "fc1", "fc2")]
    by_name = {r["component"]: r for r in rows[:5]}
    assert by_name["ln1"]["bound"] is None and by_name["mha"]["bound"] is None  # sigma and r are not known
    kernel = np.asarray(models.parameters(model)["blocks"][0]["mlp"]["fc1"]["kernel"], np.float64)
    assert by_name["fc1"]["bound"] == pytest.approx(np.linalg.norm(kernel, 2))
    known = {r["component"]: r["bound"] for r in bounds(model, sigma=0.5, radius=3.0)[:5]}
    assert all(value is not None for value in known.values())
    reference = {r["component"]: r["bound"] for r in bounds(model, reference=True)[:5]}
    assert reference["ln1"] == pytest.approx(float(models.parameters(model)["blocks"][0]["norm1"]["scale"].max()))


def test_attention_without_a_known_bound_says_why():
    model = random_model(0)
    for name, words in (("rope", "rotary positions"), ("causal", "a causal mask")):
        attention = type("Kind", (), {name: True})()
        assert why_unbounded(attention) == f"no bound is known for attention with {words}"
    assert why_unbounded(model.blocks[0].attn) is None
    for block in model.blocks:
        vars(block.attn)["causal"] = True
    rng = np.random.default_rng(0)
    result = measure(model, *(rng.normal(size=(4, 8, 8, 3)).astype(np.float32) for _ in range(2)))
    found = {row["component"]: row["bound"] for row in result["rows"]}
    assert found["mha"] is None and found["fc1"] > 0
    assert result["notes"]["mha_bound"] == "null: no bound is known for attention with a causal mask"
    ranks = {entry["component"]: entry["bound_rank"] for entry in result["components"]}
    assert ranks["mha"] is None and sorted(rank for rank in ranks.values() if rank) == [1, 2, 3, 4]
