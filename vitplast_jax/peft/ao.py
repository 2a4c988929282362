"""The AO matrix: how does one vector make an (approximately) orthogonal matrix? AOFT, arXiv 2507.13260.

In: q [n], any float dtype. With v = q[1:],

    Q = [[q0, -v^T], [v, I - v v^T / (1 + q0)]],      AO(q) = Q[:, :rank].

Out: AO(q), or its products with tokens at O(n + rank) a token. For ||q|| = 1 the columns are orthonormal; the paper
lets q move freely, so that they are so approximately. Everything is computed in float32 (float64 stays float64).

Q is singular at q0 = -1. Where |1 + q0| < GUARD, 1 / (1 + q0) is replaced by (1 + q0) / GUARD^2: continuous, bounded,
with bounded derivatives, and 0 at q0 = -1. Elsewhere the formula and its gradient are exact.

What a pair of them does, AO(p) diag(s) AO(q)^T, is a diagonal block and three rank-one terms, whatever the rank. With
c = [1, v / (1 + q0)], u = [0, v[:rank-1], 0, ...], and ' for those of q:

    AO(p) diag(s) AO(q)^T = diag(0, s[1:], 0) + s0 p q^T - (s u') c'^T - c (s u)^T + (u . s u') c c'^T
"""

import functools

import jax
import jax.numpy as jnp

from vitplast_jax.errors import UserError

GUARD = 2.0**-20
_TINY = 1e-30  # a squared norm below which a vector counts as zero


@functools.partial(jax.jit, static_argnames="rank")
def ao_matrix(q, rank: int):
    """AO(q), the first ``rank`` columns of Q.

    Args:
      q: [..., n].
      rank: 1 to n.
    Returns:
      [..., n, rank] in the dtype of q.
    Raises:
      UserError: the rank is not between 1 and n.
    """
    _check_rank(rank, q.shape[-1])
    if q.ndim > 1:
        return jax.vmap(lambda row: ao_matrix(row, rank))(q)
    wide = _wide(q)
    c, v = _spoke(wide), wide[1:rank]
    rest = jnp.eye(wide.size, rank, dtype=wide.dtype)[:, 1:] - c[:, None] * v[None, :]
    return jnp.concatenate([wide[:, None], rest], axis=1).astype(q.dtype)


@functools.partial(jax.jit, static_argnames="rank")
def ao_project(x, q, rank: int):
    """``x @ ao_matrix(q, rank)`` without forming the matrix.

    Args:
      x: [..., n] tokens.
      q: [n]; leading axes that q has besides are shared with the first of x.
      rank: 1 to n.
    Returns:
      [..., rank] in the dtype of x.
    """
    _check_rank(rank, q.shape[-1])
    if q.ndim > 1:
        return jax.vmap(lambda x, q: ao_project(x, q, rank))(x, q)
    wide, tokens = _wide(q), _wide(x)
    both = _dot(tokens, jnp.stack([wide, _spoke(wide)], axis=1))
    rest = tokens[..., 1:rank] - both[..., 1:] * _row(wide[1:rank], tokens)
    return jnp.concatenate([both[..., :1], rest], axis=-1).astype(x.dtype)


@jax.jit
def ao_expand(y, q):
    """``y @ ao_matrix(q, rank).T`` without forming the matrix; the rank is the width of y.

    Args:
      y: [..., rank].
      q: [n]; leading axes that q has besides are shared with the first of y.
    Returns:
      [..., n] in the dtype of y.
    """
    rank, n = y.shape[-1], q.shape[-1]
    _check_rank(rank, n)
    if q.ndim > 1:
        return jax.vmap(ao_expand)(y, q)
    wide, narrow = _wide(q), _wide(y)
    first, rest = narrow[..., :1], narrow[..., 1:]
    along = _dot(rest, wide[1:rank, None])
    padded = jnp.pad(rest, [(0, 0)] * (rest.ndim - 1) + [(1, n - rank)])
    return (first * _row(wide, narrow) + padded - along * _row(_spoke(wide), narrow)).astype(y.dtype)


def ao_pair(p, q, rank: int, scales=None):
    """AO(p) diag(scales) AO(q)^T as ``left @ right`` and a diagonal block.

    Args:
      p: [n], q: [m].
      rank: 1 to min(n, m).
      scales: [rank], AOFT*'s lambda; None: ones.
    Returns:
      left [n, 3], right [3, m], diagonal [rank - 1] (entries (1, 1) to (rank - 1, rank - 1)); in float32 or wider.
    """
    _check_rank(rank, min(p.size, q.size))
    p, q = _wide(p), _wide(q)
    scales = jnp.ones((rank,), p.dtype) if scales is None else scales.astype(p.dtype)
    u, w = p[1:rank] * scales[1:], q[1:rank]
    c, other = _spoke(p), _spoke(q)
    left = jnp.stack([p, _embed(w * scales[1:], p.size), c], axis=1)
    right = jnp.stack([scales[0] * q, -other, jnp.vdot(u, w) * other - _embed(u, q.size)])
    return left, right, scales[1:]


def ao_pair_difference(start_p, start_q, change_p, change_q, rank: int):
    """AO(p) AO(q)^T - AO(p0) AO(q0)^T as ``left @ right``, without a diagonal block: that cancels.

    Every term is written as a product with a change, so that the result is exactly zero where nothing has changed, and
    loses no digits near there.

    Args:
      start_p, start_q: p0 [n] and q0 [m].
      change_p, change_q: p - p0 [n] and q - q0 [m].
      rank: 1 to min(n, m).
    Returns:
      left [n, 6], right [6, m], in float32 or wider.
    """
    n, m = start_p.size, start_q.size
    _check_rank(rank, min(n, m))
    p0, q0, dp, dq = _wide(start_p), _wide(start_q), _wide(change_p), _wide(change_q)
    q, u0, w0, du, dw = q0 + dq, p0[1:rank], q0[1:rank], dp[1:rank], dq[1:rank]
    c0, dc, other, dother = _spoke(p0), spoke_difference(p0, dp), _spoke(q), spoke_difference(q0, dq)
    dot0 = jnp.vdot(u0, w0)
    change = jnp.vdot(du, q[1:rank]) + jnp.vdot(u0, dw)
    left = [dp, _embed(dw, n), dc, p0, _embed(w0, n), c0]
    right = [q, -other, (dot0 + change) * other - _embed(u0 + du, m)]
    right += [dq, -dother, change * other + dot0 * dother - _embed(du, m)]
    return jnp.stack(left, axis=1), jnp.stack(right)


def spoke_difference(start, change):
    """c(q) - c(q0) for c = [1, v / (1 + q0)], q = start + change: exactly zero without a change."""
    start, change = _wide(start), _wide(change)
    first = 1 + start[0]
    moved = _ratio(change[1:], first + change[0])
    moved = moved + start[1:] * (_inverse(first + change[0]) - _inverse(first))
    return jnp.concatenate([jnp.zeros((1,), start.dtype), moved])


def project_difference(x, start, change, rank: int):
    """``x @ (AO(start + change) - AO(start))``: x [..., n] -> [..., rank], exactly zero without a change; float32."""
    q0, dq, tokens = _wide(start), _wide(change), _wide(x)
    columns = jnp.stack([dq, spoke_difference(q0, dq), _spoke(q0)], axis=1)
    parts = _dot(tokens, columns)
    du = dq[1:rank]
    rest = -(parts[..., 1:2] * _row(q0[1:rank] + du, tokens) + parts[..., 2:] * _row(du, tokens))
    return jnp.concatenate([parts[..., :1], rest], axis=-1)


def expand_difference(y, start, change):
    """``y @ (AO(start + change) - AO(start))^T``: y [..., rank] -> [..., n], exactly zero without a change; float32."""
    rank = y.shape[-1]
    q0, dq, narrow = _wide(start), _wide(change), _wide(y)
    du = dq[1:rank]
    along = _dot(narrow[..., 1:], jnp.stack([q0[1:rank] + du, du], axis=1))
    rows = jnp.stack([dq, -spoke_difference(q0, dq), -_spoke(q0)])
    return _dot(jnp.concatenate([narrow[..., :1], along], axis=-1), rows)


def normalized_change(start, change):
    """(start / ||start||, how that changes when ``change`` is added): the second is exactly zero without a change."""
    start, change = _wide(start), _wide(change)
    end = start + change
    before, after = jnp.vdot(start, start), jnp.vdot(end, end)
    before, after = (jnp.sqrt(jnp.where(square > _TINY, square, 1.0)) for square in (before, after))
    grown = jnp.vdot(change, start + end)  # ||end||^2 - ||start||^2
    return start / before, change / after - start * (grown / (after * before * (after + before)))


def normalized(q):
    """q / ||q||, finite with finite gradients at 0 (where it stays 0), for tiny and for huge q; [n] -> [n]."""
    wide = _wide(q)
    # The result does not depend on the factor that is taken out first, so that needs no gradient.
    largest = jax.lax.stop_gradient(jnp.abs(wide).max())
    row = wide / jnp.where(largest > 0, largest, 1.0)
    square = jnp.vdot(row, row)
    return row / jnp.sqrt(jnp.where(largest > 0, square, 1.0))


def _check_rank(rank: int, n: int):
    if not 1 <= rank <= n:
        raise UserError(f"rank is {rank}; an AO matrix of a vector of {n} entries has 1 to {n} columns")


def _wide(x):
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _dot(x, y):
    return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)


def _row(vector, like):
    """A vector [k] with as many axes as ``like``."""
    return vector.reshape((1,) * (like.ndim - 1) + vector.shape)


def _embed(values, n: int):
    """[rank - 1] -> [n], behind a zero."""
    return jnp.pad(values, (1, n - 1 - values.size))


def _spoke(q):
    """c = [1, v / (1 + q0)]."""
    return jnp.concatenate([jnp.ones((1,), q.dtype), _ratio(q[1:], 1 + q[0])])


def _inverse(s):
    """1 / s, guarded at 0."""
    near = jnp.abs(s) < GUARD
    return jnp.where(near, s / GUARD**2, 1 / jnp.where(near, 1.0, s))


@jax.custom_jvp
def _ratio(v, s):
    """v / s, guarded at s = 0; its own derivative so that huge v and s overflow in neither direction."""
    return v * _inverse(s)


@_ratio.defjvp
def _ratio_jvp(primals, tangents):
    (v, s), (dv, ds) = primals, tangents
    inverse = _inverse(s)
    ratio = v * inverse
    slope = jnp.where(jnp.abs(s) < GUARD, v / GUARD**2, -ratio * inverse)
    return ratio, dv * inverse + slope * ds
