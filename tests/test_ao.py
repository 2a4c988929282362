"""The AO matrix against its formula in float64 and every identity of arXiv 2507.13260 that holds for it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vitplast_jax.errors import UserError
from vitplast_jax.peft import ao

N = 12


def vector(seed=0, n=N, unit=False, spread=0.5):
    q = np.random.RandomState(seed).randn(n) * spread
    q[0] = abs(q[0]) + 0.3
    return q / np.linalg.norm(q) if unit else q


def formula(q, rank=None):
    """Q[:, :rank] as it is printed, float64."""
    q = np.asarray(q, np.float64)
    v = q[1:, None]
    full = np.block([[q[:1, None], -v.T], [v, np.eye(q.size - 1) - v @ v.T / (1 + q[0])]])
    return full[:, :rank]


def f32(x):
    return jnp.asarray(x, jnp.float32)


@pytest.mark.parametrize("rank", [1, 2, 5, N])
def test_matrix_project_and_expand_are_the_printed_formula(rank):
    q, x, y = vector(), np.random.RandomState(1).randn(3, 4, N), np.random.RandomState(2).randn(3, 4, rank)
    matrix = ao.ao_matrix(f32(q), rank)
    assert matrix.shape == (N, rank)
    np.testing.assert_allclose(matrix, formula(q, rank), atol=1e-6)
    np.testing.assert_allclose(ao.ao_project(f32(x), f32(q), rank), x @ formula(q, rank), atol=3e-6)
    np.testing.assert_allclose(ao.ao_expand(f32(y), f32(q)), y @ formula(q, rank).T, atol=3e-6)


def test_a_unit_vector_makes_a_rotation_which_is_householders_reflector_with_one_sign():
    q = vector(unit=True)
    matrix = np.asarray(ao.ao_matrix(f32(q), N), np.float64)
    np.testing.assert_allclose(matrix.T @ matrix, np.eye(N), atol=1e-6)
    assert np.linalg.det(matrix) == pytest.approx(1.0, abs=1e-5)
    w = np.eye(N)[0] + q
    reflector = np.eye(N) - 2 * np.outer(w, w) / (w @ w)
    np.testing.assert_allclose(matrix, reflector @ np.diag([-1.0] + [1.0] * (N - 1)), atol=1e-6)


def test_gram_matrix_and_determinant_of_any_vector():
    q = vector()
    matrix, v, square = np.asarray(ao.ao_matrix(f32(q), N), np.float64), q[1:, None], q @ q
    cross = v.T * (1 - square) / (1 + q[0])
    gram = np.block(
        [[np.full((1, 1), square), cross], [cross.T, np.eye(N - 1) + v @ v.T * (square - 1) / (1 + q[0]) ** 2]]
    )
    np.testing.assert_allclose(matrix.T @ matrix, gram, atol=3e-6)
    assert np.linalg.det(matrix) == pytest.approx((q[0] + square) / (1 + q[0]), rel=1e-5)


@pytest.mark.parametrize("rank", [1, 4, 8])
def test_a_pair_is_a_diagonal_block_and_three_rank_one_terms(rank):
    p, q, s = vector(0), vector(1, n=8), np.random.RandomState(3).randn(rank)
    left, right, diagonal = ao.ao_pair(f32(p), f32(q), rank, f32(s))
    block = np.zeros((N, 8))
    block[np.arange(1, rank), np.arange(1, rank)] = diagonal
    np.testing.assert_allclose(left @ right + block, formula(p, rank) @ np.diag(s) @ formula(q, rank).T, atol=3e-6)
    # Never zero: AO(p) AO(q)^T is that block and rank <= 3, of spectral norm about 1 for any small p and q.
    assert left.shape == (N, 3) and (rank == 1 or np.linalg.norm(formula(p, rank) @ formula(q, rank).T, 2) > 0.9)


@pytest.mark.parametrize("rank", [1, 4, 8])
def test_the_difference_of_two_pairs_is_exact_and_exactly_zero_at_the_start(rank):
    p, q, p0, q0 = (f32(vector(seed, n=n)) for seed, n in ((0, N), (1, 8), (2, N), (3, 8)))
    x, y = f32(np.random.RandomState(4).randn(5, N)), f32(np.random.RandomState(5).randn(5, rank))

    @jax.jit  # compiled, where products and subtractions may be fused into one rounding
    def differences(p, q, p0, q0):
        dp, dq = p - p0, q - q0
        left, right = ao.ao_pair_difference(p0, q0, dp, dq, rank)
        return x @ left @ right, ao.project_difference(x, p0, dp, rank), ao.expand_difference(y, q0, dq)

    deltas = [formula(a, rank) - formula(b, rank) for a, b in ((p, p0), (q, q0))]
    expected = x @ (formula(p, rank) @ formula(q, rank).T - formula(p0, rank) @ formula(q0, rank).T)
    for value, truth in zip(differences(p, q, p0, q0), (expected, x @ deltas[0], y @ deltas[1].T), strict=True):
        np.testing.assert_allclose(value, truth, atol=2e-5)
    for value in differences(p, q, p, q):
        np.testing.assert_array_equal(value, 0.0)


def test_gradients_are_those_of_the_formula():
    rank, q, x = 5, f32(vector()), f32(np.random.RandomState(1).randn(7, N))
    weights = f32(np.random.RandomState(2).randn(7, rank))

    def by_matrix(q):
        v = q[1:, None]
        full = jnp.block([[q[:1, None], -v.T], [v, jnp.eye(N - 1) - v @ v.T / (1 + q[0])]])
        return (jnp.dot(x, full[:, :rank]) * weights).sum()

    expected = jax.grad(by_matrix)(q)
    np.testing.assert_allclose(
        jax.grad(lambda q: (ao.ao_project(x, q, rank) * weights).sum())(q), expected, rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(
        jax.grad(lambda q: (x @ ao.ao_matrix(q, rank) * weights).sum())(q), expected, rtol=1e-4, atol=1e-5
    )
    by_expand = jax.grad(lambda q: (ao.ao_expand(weights, q) * x).sum())(q)
    np.testing.assert_allclose(by_expand, expected, rtol=1e-4, atol=1e-5)


AWKWARD = np.full((9, N), 0.1)
AWKWARD[:, 0] = (-1, -1, -1 + 1e-7, -1 - 1e-3, 0, 1e-20, 1e4, -1e4, 1)
AWKWARD[:, 1:] = np.asarray([0, 0.1, 0.1, 0.1, 0, 1e-20, 1e4, 1e4, 0])[:, None]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_and_gradients_are_finite_wherever_the_vector_is(dtype):
    x = jnp.ones((2, N), dtype)

    def everything(q):
        parts = [ao.ao_project(x, q, 1), ao.ao_project(x, q, N), ao.ao_expand(x[:, :3], q), ao.ao_matrix(q, N)]
        return sum(part.astype(jnp.float32).sum() for part in (*parts, ao.ao_project(x, ao.normalized(q), 3)))

    values, grads = jax.jit(jax.vmap(jax.value_and_grad(everything)))(jnp.asarray(AWKWARD, dtype))
    assert grads.dtype == dtype
    assert np.isfinite(values).all() and np.isfinite(np.asarray(grads, np.float32)).all()


def test_huge_vectors_overflow_nowhere():
    q = f32(vector() * 1e20)
    assert np.isfinite(ao.ao_matrix(q, N)).all()
    np.testing.assert_allclose(ao.ao_matrix(q, N), formula(vector() * 1e20), rtol=1e-5)
    grad = jax.grad(lambda q: ao.ao_project(jnp.ones((1, N)), q, 3).sum())(q)
    assert np.isfinite(grad).all() and np.abs(grad).max() > 0


def test_the_guard_is_continuous_and_leaves_the_rest_alone():
    inside, outside = (ao._inverse(jnp.float32(s)) for s in (ao.GUARD * (1 - 1e-6), ao.GUARD * (1 + 1e-6)))
    assert float(inside) == pytest.approx(float(outside), rel=1e-5)
    assert float(ao._inverse(jnp.float32(0.0))) == 0.0 and float(ao._inverse(jnp.float32(-0.25))) == -4.0


def test_sixteen_bit_tokens_are_summed_in_float32():
    n = 4096
    q, x = jnp.full((n,), 1e-2).at[0].set(1.0), jnp.ones((1, n), jnp.bfloat16)
    projected = ao.ao_project(x, q, 2)
    assert projected.dtype == jnp.bfloat16  # 1 + 40.95: a sum in bfloat16 would stop long before
    assert float(projected[0, 0]) == pytest.approx(41.95, rel=5e-3)


def test_leading_axes():
    q = f32(np.stack([vector(0), vector(1)]))
    x = f32(np.random.RandomState(0).randn(2, 5, N))
    matrices = ao.ao_matrix(q, 3)
    assert matrices.shape == (2, N, 3)
    np.testing.assert_allclose(ao.ao_project(x, q, 3), x @ matrices, atol=3e-6)
    np.testing.assert_allclose(ao.ao_expand(x[..., :3], q), x[..., :3] @ matrices.swapaxes(1, 2), atol=3e-6)


@pytest.mark.parametrize("rank", [0, N + 1])
def test_impossible_ranks_are_said(rank):
    with pytest.raises(UserError, match=f"rank is {rank}; an AO matrix of a vector of 12 entries has 1 to 12 columns"):
        ao.ao_matrix(jnp.ones(N), rank)


@jax.jit
def _change_of_norm(start, end):
    return ao.normalized_change(start, end - start)


def test_the_change_of_a_normalised_vector_is_exact_and_zero_without_a_change():
    start, end = f32(vector(0)), f32(vector(1))
    unit, change = _change_of_norm(start, end)
    np.testing.assert_allclose(unit, ao.normalized(start), atol=1e-6)
    np.testing.assert_allclose(unit + change, ao.normalized(end), atol=1e-6)
    np.testing.assert_array_equal(_change_of_norm(start, start)[1], 0.0)
    assert np.isfinite(_change_of_norm(start, jnp.zeros(N))[1]).all()
