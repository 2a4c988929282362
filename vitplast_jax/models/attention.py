"""Attention's core in a 16-bit dtype, forward and backward written out.

In: queries (already scaled), keys and values, [..., n, h, k]. Out: the mixed values, likewise.

Plain differentiation divides n x n weights and reduces them once more in the backward pass. Here the n x n arrays that
leave a fused product are two: the exponentials, which the forward pass keeps, and the scores' gradient. What is divided
by the softmax's sum is the product and, coming back, its gradient; and the scores' gradient takes the row sums of
``g * y`` (arXiv 2205.14135, equation 4). Exponentials are kept in the dtype of computation; scores, softmax and sums
are float32, in which the products accumulate.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def attend(q, k, v, causal: bool = False):
    """``softmax(q k^T) v`` over the tokens of k and v; with ``causal`` a token sees those before it and itself."""
    return _forward(q, k, v, causal)[0]


def _forward(q, k, v, causal):
    # The queries' tokens come last: a TPU fills its lanes with them, where a head's width would fill half.
    scores = jnp.einsum("...mhk,...nhk->...hmn", k, q, preferred_element_type=jnp.float32)
    if causal:
        scores = jnp.where(np.tri(q.shape[-3], dtype=bool).T, scores, -jnp.inf)
    factors = jnp.exp(scores - scores.max(-2, keepdims=True)).astype(v.dtype)
    total = rearrange(factors.astype(jnp.float32).sum(-2), "... h n -> ... n h 1")
    y = jnp.einsum("...hmn,...mhk->...nhk", factors, v, preferred_element_type=jnp.float32) / total
    y = y.astype(v.dtype)
    return y, (q, k, v, factors, total, y)


def _backward(causal, kept, gradient):
    del causal  # the factors of what it hides are zeros
    q, k, v, factors, total, y = kept
    gradient = (gradient.astype(jnp.float32) / total).astype(v.dtype)
    common = rearrange((gradient.astype(jnp.float32) * y.astype(jnp.float32)).sum(-1), "... n h -> ... h 1 n")
    of_weights = jnp.einsum("...mhk,...nhk->...hmn", v, gradient, preferred_element_type=jnp.float32)
    of_scores = (factors.astype(jnp.float32) * (of_weights - common)).astype(q.dtype)
    of_scores = jax.lax.optimization_barrier(of_scores)  # computed once, not once for each of its readers
    of_q = jnp.einsum("...hmn,...mhk->...nhk", of_scores, k)
    of_k = jnp.einsum("...hmn,...nhk->...mhk", of_scores, q)
    of_v = jnp.einsum("...hmn,...nhk->...mhk", factors, gradient)
    return of_q, of_k, of_v


attend.defvjp(_forward, _backward)
