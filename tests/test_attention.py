"""The core of attention whose backward pass is written out, held to the textbook formula and its own derivative."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vitplast_jax import create_model
from vitplast_jax.models.attention import attend


def draw(seed, *shape):
    return np.random.RandomState(seed).randn(*shape).astype(np.float32)


def textbook(q, k, v, causal):
    scores = jnp.einsum("bnhk,bmhk->bhnm", q, k)
    if causal:
        scores = jnp.where(np.tri(q.shape[1], dtype=bool)[None, None], scores, -jnp.inf)
    return jnp.einsum("bhnm,bmhk->bnhk", jax.nn.softmax(scores, -1), v)


@pytest.mark.parametrize("causal", [False, True])
def test_value_and_gradients_are_those_of_the_formula(causal):
    # The scale reaches scores of some hundreds, whose exponentials overflow unless the largest is taken off.
    q, k, v, gradient = 12 * draw(0, 2, 7, 3, 4), 12 * draw(1, 2, 7, 3, 4), draw(2, 2, 7, 3, 4), draw(3, 2, 7, 3, 4)
    y, back = jax.vjp(lambda *qkv: attend(*qkv, causal), q, k, v)
    expected, back_expected = jax.vjp(lambda *qkv: textbook(*qkv, causal), q, k, v)
    np.testing.assert_allclose(y, expected, atol=1e-5)
    for ours, theirs in zip(back(gradient), back_expected(gradient), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-5)


def test_sums_over_tokens_are_float32():
    # R21: 1024 equal tokens; bfloat16 sums of ones stop at 256, and the output would be four times the value.
    q = jnp.zeros((1, 1024, 1, 4), jnp.bfloat16)
    v = jnp.broadcast_to(jnp.asarray([1.0, -2.0, 0.5, 3.0], jnp.bfloat16), q.shape)
    np.testing.assert_array_equal(np.asarray(attend(q, q, v), np.float32), np.asarray(v, np.float32))


@pytest.mark.parametrize("name", ["vit", "gpt2"])
def test_bfloat16_gives_what_float32_gives_within_its_precision(name):
    sizes = {"width": 32, "depth": 1, "heads": 2}
    model = create_model("gpt2", **sizes) if name == "gpt2" else create_model("vit_base_patch16_224", **sizes)
    attention = model.blocks[0].attn
    x = jnp.asarray(draw(4, 2, 9, 32))
    exact, back = jax.vjp(attention, x)
    rounded, rounded_back = jax.vjp(attention, x.astype(jnp.bfloat16))
    gradient = jnp.asarray(draw(5, 2, 9, 32), jnp.bfloat16)
    of_x, of_rounded = back(gradient.astype(jnp.float32))[0], rounded_back(gradient)[0]
    for ours, theirs in ((rounded, exact), (of_rounded, of_x)):
        assert ours.dtype == jnp.bfloat16
        assert float(jnp.abs(ours.astype(jnp.float32) - theirs).max()) < 0.02 * float(jnp.abs(theirs).max())
