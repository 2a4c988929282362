"""How strongly does a map stretch the distance between two inputs, and how sure is the average?

In: outputs `fx, fy` of a map and its inputs `x, y`: whole token sequences [n, t, d] (any trailing shape works).
Out: rates of change, their streamed statistics in constant memory, and 95 % confidence intervals.

    P(f) = E over pairs of ||f(x) - f(y)||_F / ||x - y||_F            (arXiv 2602.06883; P(f) <= Lip(f))

A pair of equal inputs has no rate. The array functions mark it with NaN, the statistics leave it out and count it
(`excluded`); an infinite or undefined rate of two *different* inputs is an error, never a number in an average.
"""

from collections.abc import Mapping

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from scipy.special import stdtrit

from vitplast_jax.errors import UserError

CONFIDENCE = 0.95
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)

# A squared distance below this share of the two squared norms loses digits in |u|^2 + |v|^2 - 2 u.v: at most two bits
# are lost above it.
_NEAR = 0.25

# Histogram of log rates: neighbouring bins differ by 0.2 %, so a quantile is within 0.1 % of the exact one.
# Rates at or below 1e-12 fall into the first bin, which stands for zero; those above 1e12 into the last.
_BIN = float(np.log(1.002))
_LOWEST, _HIGHEST = 1e-12, 1e12
_BINS = int(np.ceil(np.log(_HIGHEST / _LOWEST) / _BIN)) + 1


# --- distances and rates ---------------------------------------------------------------------------------------------


def _distance(one, other):
    """Frobenius distance of two arrays, accumulated in fp32 (or in fp64 where the inputs are)."""
    dtype = jnp.promote_types(one.dtype, jnp.float32)
    # The difference is formed before anything is squared: nearly equal inputs and large common means keep their digits.
    return jnp.sqrt(jnp.sum(jnp.square(one.astype(dtype) - other.astype(dtype))))


@jax.jit
def matched_distances(x: jax.Array, y: jax.Array) -> jax.Array:
    """Frobenius distances of `x[i]` and `y[i]`: [n, ...] and [n, ...] -> [n]."""
    chex.assert_equal_shape((x, y))
    return jax.vmap(_distance)(x, y)


@jax.jit
def pairwise_distances(x: jax.Array, y: jax.Array) -> jax.Array:
    """Frobenius distances of every `x[i]` to every `y[j]`: [n, ...] and [m, ...] -> [n, m].

    By one matrix product of the centred inputs, |u|^2 + |v|^2 - 2 u.v, which reads every input once. It would cancel
    for nearly equal inputs, so the rows of x that have such a pair are done again from differences. (A nested vmap of
    differences writes all n * m of them to memory, which is several times slower than one row at a time.)
    """
    chex.assert_equal_shape_suffix((x, y), x.ndim - 1)
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    u, v = (jnp.reshape(side, (len(side), -1)).astype(dtype) for side in (x, y))
    # A large common mean (LayerNorm's input) must not stay in. As a product: XLA's sum over rows is ten times slower.
    total = sum(jnp.matmul(jnp.ones(len(side), dtype), side, precision=lax.Precision.HIGHEST) for side in (u, v))
    centre = lax.optimization_barrier(total / (len(u) + len(v)))
    u, v = u - centre, v - centre
    together = jnp.square(u).sum(1)[:, None] + jnp.square(v).sum(1)[None]
    squares = together - 2 * jnp.matmul(u, v.T, precision=lax.Precision.HIGHEST)

    def finish_row(row):
        one, squares, near = row
        return lax.cond(near.any(), lambda: jax.vmap(lambda other: _distance(one, other))(y), lambda: jnp.sqrt(squares))

    return lax.map(finish_row, (x, squares, squares < _NEAR * together))


def divide_distances(outputs: jax.Array, inputs: jax.Array) -> jax.Array:
    """Rates from distances of any (broadcastable) shape; NaN where the two inputs are equal and no rate exists."""
    return jnp.where(inputs > 0, outputs / jnp.where(inputs > 0, inputs, 1), jnp.nan)


@jax.jit
def pairwise_rates(fx: jax.Array, fy: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """Rates of change ||fx[i] - fy[j]||_F / ||x[i] - y[j]||_F of all pairs.

    Args:
      fx, x: outputs and inputs of the first set, [n, ...] each; their trailing shapes may differ (FC1 widens).
      fy, y: the same of the second set, [m, ...].
    Returns:
      [n, m] fp32, non-negative; NaN exactly where `x[i] == y[j]`.
    """
    chex.assert_equal_shape_prefix((fx, x), 1)
    chex.assert_equal_shape_prefix((fy, y), 1)
    return divide_distances(pairwise_distances(fx, fy), pairwise_distances(x, y))


@jax.jit
def matched_rates(fx: jax.Array, fy: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """Rates of change of the pairs (x[i], y[i]) alone: [n] fp32; NaN exactly where `x[i] == y[i]`."""
    chex.assert_equal_shape_prefix((fx, fy, x, y), 1)
    return divide_distances(matched_distances(fx, fy), matched_distances(x, y))


# --- intervals -------------------------------------------------------------------------------------------------------


def matched_interval(mean, std, count, *, reference: bool = False):
    """95 % interval of the mean of `count` independent pairs -> (low, high).

    `reference=True` is the paper's: 1.96 * population std / sqrt(n). Ours: t quantile * sample std / sqrt(n). `std` is
    the population or the sample standard deviation accordingly. Fewer than two pairs: NaN, since nothing is known.
    """
    mean, std, count = np.broadcast_arrays(*(np.asarray(a, np.float64) for a in (mean, std, count)))
    known = count >= 2
    safe = np.where(known, count, 2)
    factor = 1.96 if reference else stdtrit(safe - 1, (1 + CONFIDENCE) / 2)
    half = np.where(known, factor * std / np.sqrt(safe), np.nan)
    return mean - half, mean + half


def all_pairs_interval(row_means, column_means, squares):
    """95 % interval of the mean over all n * m pairs of n and m independent images -> (low, high).

    The pairs share images, so std / sqrt(n m) is far too narrow. The variance of the two-sample U-statistic is
    z1 / n + z2 / m + e / (n m): the spread of the images' own means, and what is left of a pair once both are known.
    The variances of the row means and of the column means each contain the last term, so it is subtracted once. The
    t quantile has Welch's degrees of freedom.

    Args:
      row_means: [..., n] mean rate of each image of the first set over the second; NaN for an image without any pair.
      column_means: [..., m] the same of the second set.
      squares: [...] sum over all pairs of the squared deviation from the mean.
    """
    spread, known, means = [], [], []
    for values in (np.asarray(row_means, np.float64), np.asarray(column_means, np.float64)):
        valid = np.isfinite(values)
        count = valid.sum(-1)
        mean = np.where(valid, values, 0).sum(-1) / np.maximum(count, 1)
        spread.append(np.where(valid, np.square(values - mean[..., None]), 0).sum(-1))
        known.append(count)
        means.append(mean)
    (rows, columns), (n, m) = spread, known
    enough = (n >= 2) & (m >= 2)
    n, m = np.where(enough, n, 2), np.where(enough, m, 2)
    by_row, by_column = rows / (n - 1) / n, columns / (m - 1) / m
    pair = np.maximum(np.asarray(squares) - m * rows - n * columns, 0) / ((n - 1) * (m - 1) * n * m)
    variance = np.maximum(by_row + by_column - pair, pair)
    welch = by_row**2 / (n - 1) + by_column**2 / (m - 1)
    degrees = np.where(welch > 0, (by_row + by_column) ** 2 / np.where(welch > 0, welch, 1), np.minimum(n, m) - 1)
    half = np.where(enough, stdtrit(degrees, (1 + CONFIDENCE) / 2) * np.sqrt(variance), np.nan)
    return means[0] - half, means[0] + half


# --- streaming -------------------------------------------------------------------------------------------------------


class RateStatistics:
    """Count, mean, standard deviation, maximum and quantiles of streamed rates of independent (matched) pairs.

    Memory does not depend on the number of pairs. One object holds several cells (`shape`, for instance components).
    Sums are float64 on the host and merge by Chan's formula, so the batch size changes no more than their rounding.

    >>> statistics = RateStatistics((2,))
    >>> statistics.update(np.array([[1.0, 3.0, np.nan], [2.0, 2.0, np.nan]]), np.array([1.0, 1.0, 0.0]))
    >>> statistics.mean.tolist(), statistics.excluded.tolist()
    ([2.0, 2.0], [1, 1])
    """

    def __init__(self, shape: tuple[int, ...] = (), *, reference: bool = False):
        self.shape = tuple(shape)
        self.reference = reference
        self.count = np.zeros(self.shape, np.int64)
        self.excluded = np.zeros(self.shape, np.int64)
        self.mean = np.zeros(self.shape, np.float64)
        self.max = np.full(self.shape, -np.inf)
        self._squares = np.zeros(self.shape, np.float64)
        self._histogram = np.zeros((*self.shape, _BINS), np.int64)

    def update(self, rates, distances) -> None:
        """Add rates [*shape, p] of pairs whose inputs are `distances` apart (broadcastable to the same shape)."""
        rates = np.asarray(rates, np.float64)
        valid = np.broadcast_to(np.asarray(distances) > 0, rates.shape)
        if not np.isfinite(rates[valid]).all():
            raise UserError(
                "a component gives infinite or undefined outputs for two different inputs; "
                "check the weights and the images for NaN, or measure in float32"
            )
        values = np.where(valid, rates, 0)

        count = valid.sum(-1)
        mean = values.sum(-1) / np.maximum(count, 1)
        squares = np.where(valid, np.square(values - mean[..., None]), 0).sum(-1)
        total = self.count + count
        delta = mean - self.mean
        share = count / np.maximum(total, 1)
        self._squares += squares + delta**2 * self.count * share
        self.mean += delta * share
        self.count = total
        self.excluded += (~valid).sum(-1)
        self.max = np.maximum(self.max, np.where(valid, rates, -np.inf).max(-1, initial=-np.inf))

        bins = np.floor((np.log(np.maximum(values, _LOWEST)) - np.log(_LOWEST)) / _BIN).astype(np.int64)
        cells = np.arange(self.count.size).reshape(*self.shape, 1) * _BINS + np.minimum(bins, _BINS - 1)
        self._histogram += np.bincount(cells[valid], minlength=self._histogram.size).reshape(self._histogram.shape)

    def state(self) -> dict[str, np.ndarray]:
        """Everything streamed so far as arrays, from which :meth:`restore` continues with the identical numbers."""
        return {name: value for name, value in vars(self).items() if isinstance(value, (np.ndarray, np.generic))}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Takes over what :meth:`state` gave, of statistics of the same shape."""
        for name, value in self.state().items():
            if state[name].shape != value.shape or state[name].dtype != value.dtype:
                raise ValueError(f"{name} is {state[name].dtype}{state[name].shape}, not {value.dtype}{value.shape}")
            setattr(self, name, state[name])

    def std(self) -> np.ndarray:
        """Sample standard deviation [*shape] (of the population under `reference`); NaN where it is not defined."""
        free = self.count - (0 if self.reference else 1)
        return np.sqrt(np.where(free > 0, self._squares / np.maximum(free, 1), np.nan))

    def interval(self) -> tuple[np.ndarray, np.ndarray]:
        """95 % interval of the mean: (low [*shape], high [*shape])."""
        return matched_interval(self.mean, self.std(), self.count, reference=self.reference)

    def quantiles(self, probabilities=QUANTILES) -> np.ndarray:
        """Quantiles [*shape, len(probabilities)], linear between order statistics, each of which is known to 0.1 %."""
        totals = np.cumsum(self._histogram.reshape(-1, _BINS), axis=-1)
        result = np.full((len(totals), len(probabilities)), np.nan)
        for cell, (total, largest) in enumerate(zip(totals, self.max.ravel(), strict=True)):
            if total[-1] == 0:
                continue
            place = np.asarray(probabilities) * (total[-1] - 1)
            lower, upper = np.floor(place), np.ceil(place)
            below, above = (_bin_center(np.searchsorted(total, order, side="right")) for order in (lower, upper))
            result[cell] = np.minimum(below + (place - lower) * (above - below), largest)
        return result.reshape(*self.shape, len(probabilities))


def _bin_center(index: np.ndarray) -> np.ndarray:
    """The rate that stands for a bin; the lowest one collects zero rates."""
    return np.where(index == 0, 0.0, _LOWEST * np.exp((index + 0.5) * _BIN))


class AllPairsStatistics(RateStatistics):
    """The same for all n * m pairs of two sets; keeps each image's own mean, for the interval of dependent pairs."""

    def __init__(self, shape: tuple[int, ...], n: int, m: int):
        super().__init__(shape)
        self._sums_x, self._sums_y = (np.zeros((*self.shape, k), np.float64) for k in (n, m))
        self._counts_x, self._counts_y = (np.zeros((*self.shape, k), np.int64) for k in (n, m))

    def update(self, rates, distances, start: tuple[int, int] = (0, 0)) -> None:
        """Add a tile of rates [*shape, a, b] whose first pair is (x[start[0]], y[start[1]])."""
        rates = np.asarray(rates, np.float64)
        valid = np.broadcast_to(np.asarray(distances) > 0, rates.shape)
        super().update(rates.reshape(*self.shape, -1), valid.reshape(*self.shape, -1))
        values = np.where(valid, rates, 0)
        for (sums, counts), first, length, axis in zip(self._sides(), start, rates.shape[-2:], (-1, -2), strict=True):
            sums[..., first : first + length] += values.sum(axis)
            counts[..., first : first + length] += valid.sum(axis)

    def _sides(self):
        return (self._sums_x, self._counts_x), (self._sums_y, self._counts_y)

    def interval(self) -> tuple[np.ndarray, np.ndarray]:
        rows, columns = (np.where(counts > 0, sums / np.maximum(counts, 1), np.nan) for sums, counts in self._sides())
        return all_pairs_interval(rows, columns, self._squares)
