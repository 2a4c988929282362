"""The loss of a training step, by hand. R21."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vitplast_jax.training import step as steps


def test_the_loss_is_float32_whatever_the_logits_are():
    logits = jnp.asarray(np.random.RandomState(0).randn(4, 1000) * 3, jnp.bfloat16)
    loss = steps.cross_entropy(logits, jnp.arange(4))
    expected = -jax.nn.log_softmax(logits.astype(jnp.float32))[jnp.arange(4), jnp.arange(4)]
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, expected, rtol=1e-6)


def test_label_smoothing_by_hand():
    # Two classes, logits (0, 0): ln 2 whatever the target; logits (ln 3, 0), target 0 with 0.9 + 0.1 / 2.
    loss = steps.cross_entropy(jnp.asarray([[np.log(3.0), 0.0]]), jnp.asarray([0]), 0.1)
    assert float(loss[0]) == pytest.approx(-(0.95 * np.log(0.75) + 0.05 * np.log(0.25)), abs=1e-6)
