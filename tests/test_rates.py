"""Rates of change against a float64 loop, intervals against simulation, streamed statistics against numpy."""

import jax
import numpy as np
import pytest

from vitplast_jax.errors import UserError
from vitplast_jax.plasticity import rates


def distance64(one, other):
    return np.sqrt(np.sum((one.astype(np.float64) - other.astype(np.float64)) ** 2))


def loop64(fx, fy, x, y):
    """The definition, pair by pair, in float64."""
    second = list(zip(fy, y, strict=True))
    return np.array([[distance64(a, b) / distance64(u, v) for b, v in second] for a, u in zip(fx, x, strict=True)])


def draw(n, m, shape=(7, 12), scale=1.0, mean=0.0, seed=0):
    rng = np.random.default_rng(seed)
    base = rng.normal(size=shape) + mean
    return tuple((base + scale * rng.normal(size=(k, *shape))).astype(np.float32) for k in (n, m))


@pytest.mark.parametrize(("scale", "mean"), [(1.0, 0.0), (1.0, 1000.0), (1e-5, 0.0), (1e-2, 300.0)])
def test_pairwise_rates_equal_a_float64_loop(scale, mean):
    x, y = draw(5, 4, scale=scale, mean=mean)
    fx, fy = draw(5, 4, shape=(7, 20), scale=scale, mean=mean, seed=1)
    found = rates.pairwise_rates(fx, fy, x, y)
    assert found.shape == (5, 4) and found.dtype == np.float32
    np.testing.assert_allclose(found, loop64(fx, fy, x, y), rtol=1e-5)


def test_pairs_on_both_sides_of_the_limit_are_exact():
    """One tile with ordinary pairs alone, one with a pair that is just near, one with a nearly equal pair."""
    x, y = draw(4, 3, scale=1.0)
    for share in (0.3, 0.24, 1e-6):
        close = y.copy()
        close[1] = x[2] + share**0.5 * (y[1] - x[2])
        expected = [[distance64(a, b) for b in close] for a in x]
        np.testing.assert_allclose(rates.pairwise_distances(x, close), expected, rtol=1e-5)


def test_long_sequences_do_not_lose_digits():
    x, y = draw(2, 2, shape=(197, 3072), seed=3)
    expected = [[distance64(a, b) for b in y] for a in x]
    np.testing.assert_allclose(rates.pairwise_distances(x, y), expected, rtol=1e-6)


def test_matched_rates_are_the_diagonal_of_all_pairs():
    x, y = draw(6, 6)
    fx, fy = draw(6, 6, shape=(7, 3), seed=1)
    np.testing.assert_allclose(
        rates.matched_rates(fx, fy, x, y), np.diag(rates.pairwise_rates(fx, fy, x, y)), rtol=1e-6
    )


def test_values_by_hand():
    x, y = np.zeros((1, 1, 2), np.float32), np.array([[[3, 4]]], np.float32)  # 5 apart
    fx, fy = np.zeros((1, 1, 3), np.float32), np.array([[[1, 2, 2]]], np.float32)  # 3 apart
    assert rates.pairwise_rates(fx, fy, x, y)[0, 0] == pytest.approx(0.6)


def test_a_linear_map_along_its_top_singular_vector_attains_the_spectral_norm():
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(6, 9)).astype(np.float32)
    left, values, _ = np.linalg.svd(weights)
    x = rng.normal(size=(1, 1, 6)).astype(np.float32)
    y = x + left[:, 0]
    assert rates.matched_rates(x @ weights, y @ weights, x, y)[0] == pytest.approx(values[0], rel=1e-5)


def test_equal_inputs_have_no_rate_and_integers_are_not_wrapped():
    x = np.array([[[0, 200]], [[10, 10]]], np.uint8)
    found = np.asarray(rates.pairwise_rates(x, x, x, x))
    np.testing.assert_array_equal(np.isnan(found), np.eye(2, dtype=bool))
    assert found[0, 1] == 1.0  # a uint8 difference would wrap around


def test_bfloat16_is_compared_in_float32():
    x, y = (jax.numpy.asarray(a, jax.numpy.bfloat16) for a in draw(2, 3))
    exact = loop64(*(np.asarray(a, np.float32) for a in (x * 2, y * 2, x, y)))
    found = rates.pairwise_rates(x * 2, y * 2, x, y)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, exact, rtol=1e-6)


# --- statistics --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 7, 1000])
def test_streamed_statistics_equal_numpy(batch):
    values = np.random.default_rng(0).lognormal(size=(2, 3, 1000))
    statistics = rates.RateStatistics((2, 3))
    for start in range(0, 1000, batch):
        part = values[..., start : start + batch]
        statistics.update(part, np.ones(part.shape[-1]))
    np.testing.assert_allclose(statistics.mean, values.mean(-1), rtol=1e-12)
    np.testing.assert_allclose(statistics.std(), values.std(-1, ddof=1), rtol=1e-12)
    np.testing.assert_array_equal(statistics.max, values.max(-1))
    exact = np.moveaxis(np.quantile(values, rates.QUANTILES, axis=-1), 0, -1)
    np.testing.assert_allclose(statistics.quantiles(), exact, rtol=1.1e-3)


def test_interval_by_hand():
    statistics, reference = rates.RateStatistics(), rates.RateStatistics(reference=True)
    for one in (statistics, reference):
        one.update(np.array([1.0, 2.0, 3.0, 4.0]), np.ones(4))
    # mean 2.5; sample variance 5/3, t(0.975, 3) = 3.18245; population variance 5/4
    np.testing.assert_allclose(statistics.interval(), [2.5 - 2.05426, 2.5 + 2.05426], atol=2e-5)
    np.testing.assert_allclose(reference.interval(), [2.5 - 1.095673, 2.5 + 1.095673], atol=2e-6)


def test_equal_inputs_are_left_out_and_counted_but_a_broken_output_is_an_error():
    statistics = rates.RateStatistics()
    statistics.update(np.array([1.0, np.nan, 3.0]), np.array([1.0, 0.0, 1.0]))
    assert (statistics.count, statistics.excluded, statistics.mean, statistics.max) == (2, 1, 2.0, 3.0)
    with pytest.raises(UserError, match="NaN"):
        statistics.update(np.array([np.inf]), np.array([1.0]))
    assert np.isnan(rates.RateStatistics().interval()).all()


def test_zero_rates_are_counted():
    statistics = rates.RateStatistics()
    statistics.update(np.array([0.0, 0.0, 2.0]), np.ones(3))
    np.testing.assert_allclose(statistics.quantiles([0.5, 1.0]), [0.0, 2.0])


def test_all_pairs_interval_by_hand():
    # rows 1 and 3, columns all 2: only the rows differ, their variance is 2 and n = 2, so the variance of the mean is 1
    statistics = rates.AllPairsStatistics((), 2, 2)
    statistics.update(np.array([[1.0, 1.0], [3.0, 3.0]]), np.ones((2, 2)))
    half = 12.7062047  # t(0.975, 1)
    np.testing.assert_allclose(statistics.interval(), [2 - half, 2 + half], rtol=1e-6)


def test_tiles_of_all_pairs_change_nothing():
    values = np.random.default_rng(0).lognormal(size=(2, 9, 7))
    whole, tiled = (rates.AllPairsStatistics((2,), 9, 7) for _ in range(2))
    whole.update(values, np.ones((9, 7)))
    for i in range(0, 9, 4):
        for j in range(0, 7, 5):
            part = values[:, i : i + 4, j : j + 5]
            tiled.update(part, np.ones(part.shape[1:]), (i, j))
    np.testing.assert_allclose(whole.interval(), tiled.interval(), rtol=1e-10)


def simulate_rates(rng, n, m, weights):
    """Rates of a saturating map between two sets of random inputs; [n, m]."""
    x, y = rng.normal(size=(n, 6)), rng.normal(size=(m, 6)) + 0.5
    outputs = np.tanh(x @ weights)[:, None] - np.tanh(y @ weights)[None]
    return np.linalg.norm(outputs, axis=-1) / np.linalg.norm(x[:, None] - y[None], axis=-1)


@pytest.mark.parametrize(("n", "m"), [(16, 16), (12, 40)])
def test_intervals_of_all_pairs_cover(n, m):
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(6, 6)) * np.array([3, 1, 0.3, 1, 1, 1])
    truth = np.mean([simulate_rates(rng, 300, 300, weights).mean() for _ in range(40)])
    draws = np.stack([simulate_rates(rng, n, m, weights) for _ in range(2000)])
    statistics = rates.AllPairsStatistics((2000,), n, m)
    statistics.update(draws, np.ones((n, m)))
    low, high = statistics.interval()
    assert 0.93 <= np.mean((low <= truth) & (truth <= high)) <= 0.97
    naive = 1.96 * draws.std((1, 2)) / np.sqrt(n * m)  # what independent pairs would have
    assert np.mean(np.abs(draws.mean((1, 2)) - truth) <= naive) < 0.7


def test_intervals_of_matched_pairs_cover():
    draws = np.random.default_rng(1).normal(1.0, 0.3, size=(4000, 8))
    statistics = rates.RateStatistics((4000,))
    statistics.update(draws, np.ones(8))
    low, high = statistics.interval()
    assert 0.94 <= np.mean((low <= 1) & (1 <= high)) <= 0.96
