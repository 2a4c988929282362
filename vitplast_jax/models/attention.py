"""Attention's core in a 16-bit dtype, forward and backward written out.

In: queries (already scaled), keys and values with tokens last, [..., h, k, n]. Out: the mixed values, likewise.

Plain differentiation computes the exponentials five times and divides n x n weights; the TPU compiler puts tokens into
lanes, for a head's width would fill half of them. So: tokens last; the softmax's sum is one more row of the product
with the values; what is divided is the product; and the backward pass gets the scores' gradient from the row sums of
``g * y`` (arXiv 2205.14135, equation 4). Scores are kept in the dtype of computation; all of the softmax but the
factor of the product is float32, whose products accumulate in float32.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def attend(q, k, v, causal: bool = False):
    """``softmax(q^T k) v`` over the tokens of k and v; with ``causal`` a token sees those before it and itself."""
    return _forward(q, k, v, causal)[0]


def _forward(q, k, v, causal):
    scores = jnp.einsum("...km,...kn->...mn", k, q)
    if causal:
        scores = jnp.where(np.tri(q.shape[-1], dtype=bool).T, scores, -jnp.inf)
    largest = scores.max(-2, keepdims=True).astype(jnp.float32)
    factors = jnp.exp(scores.astype(jnp.float32) - largest).astype(v.dtype)
    ones = jnp.ones((*v.shape[:-2], 1, v.shape[-1]), v.dtype)
    sums = jnp.einsum("...km,...mn->...kn", jnp.concatenate([v, ones], -2), factors, preferred_element_type=jnp.float32)
    total = sums[..., -1:, :]
    # The barriers keep what lies behind them from being computed once for every reader.
    y = jax.lax.optimization_barrier((sums[..., :-1, :] / total).astype(v.dtype))
    return y, (q, k, v, scores, largest + jnp.log(total), y)


def _backward(causal, kept, gradient):
    del causal  # the scores that it hides are minus infinity
    q, k, v, scores, log_total, y = kept
    weights = jnp.exp(scores.astype(jnp.float32) - log_total)
    common = (gradient.astype(jnp.float32) * y.astype(jnp.float32)).sum(-2, keepdims=True)
    of_weights = jnp.einsum("...km,...kn->...mn", v, gradient).astype(jnp.float32)
    of_scores = jax.lax.optimization_barrier((weights * (of_weights - common)).astype(q.dtype))
    of_q = jnp.einsum("...mn,...km->...kn", of_scores, k)
    of_k = jnp.einsum("...mn,...kn->...km", of_scores, q)
    of_v = jnp.einsum("...mn,...kn->...km", weights.astype(v.dtype), gradient)
    return of_q, of_k, of_v


attend.defvjp(_forward, _backward)
