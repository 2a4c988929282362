"""Do two ways of training differ, and do two rankings agree? Small-sample statistics of finished runs.

In: one number a run (or a data set, or a component), paired where they are compared. Out: means with intervals,
p-values, rank correlations with intervals; None where the sample is too small or has no spread to say anything.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

MOST_EXACT_RANKS = 8  # items up to which all orders are counted (40,320)


def summarise(values: Sequence[float], confidence: float = 0.95) -> dict[str, float | int | None]:
    """``mean``, ``std`` (n - 1 in the denominator), ``count``, and the interval ``low`` to ``high`` of the mean.

    The interval is Student's t; std, low and high are None for a single value.
    """
    from scipy import stats

    values = np.asarray(values, np.float64)
    count, mean = len(values), float(values.mean())
    if count < 2:
        return {"mean": mean, "std": None, "count": count, "low": None, "high": None}
    std = float(values.std(ddof=1))
    half = float(stats.t.ppf(0.5 + confidence / 2, count - 1)) * std / math.sqrt(count)
    return {"mean": mean, "std": std, "count": count, "low": mean - half, "high": mean + half}


def _differences(a: Sequence[float], b: Sequence[float]) -> np.ndarray:
    if len(a) != len(b):
        raise ValueError(f"paired samples must be of one length, not {len(a)} and {len(b)}")
    # 97.09 - 97.06 and 89.44 - 89.41 must be the tie that they are on paper
    return np.round(np.asarray(a, np.float64) - np.asarray(b, np.float64), 10)


def paired_t(a: Sequence[float], b: Sequence[float]) -> float | None:
    """p-value of the two-sided paired t-test; None for fewer than two pairs or differences without spread."""
    from scipy import stats

    d = _differences(a, b)
    if len(d) < 2 or np.ptp(d) == 0:
        return None
    return float(stats.ttest_1samp(d, 0.0).pvalue)


def wilcoxon_greater(a: Sequence[float], b: Sequence[float]) -> float | None:
    """p-value of Wilcoxon's one-sided signed-rank test that ``a`` tends to exceed ``b``.

    Exact, ties included: all 2^n sign flips are counted, by the generating function of their rank sums. Pairs that do
    not differ are left out, as Wilcoxon did; None if no pair differs.
    """
    from scipy import stats

    d = _differences(a, b)
    d = d[d != 0]
    if not len(d):
        return None
    doubled = np.round(2 * stats.rankdata(np.abs(d))).astype(int)  # tied ranks are halves
    ways = np.ones(1)  # ways[s] / 2^n: probability that the positive ranks sum to s
    for rank in doubled:
        ways = (np.pad(ways, (0, rank)) + np.pad(ways, (rank, 0))) / 2
    return float(ways[doubled[d > 0].sum() :].sum())


def holm(pvalues: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down correction (1979) of a family of p-values; None stays None and does not count.

    The i-th smallest of m (from 0) is multiplied by m - i; no corrected value is below that of a smaller one, none
    above 1.
    """
    known = sorted((p, place) for place, p in enumerate(pvalues) if p is not None)
    corrected: list[float | None] = [None] * len(pvalues)
    largest = 0.0
    for i, (p, place) in enumerate(known):
        largest = max(largest, min(1.0, p * (len(known) - i)))
        corrected[place] = largest
    return corrected


def compare(samples: Mapping[str, Sequence[float]], against: str) -> list[dict]:
    """One sample against each of the others, paired by position.

    Args:
      samples: name -> one number a pair (a data set, or a data set and a seed), in one order.
      against: the name of the sample that the others are compared with.
    Returns:
      [{``config``, ``pairs``, ``difference`` (mean of against - other), ``t_p`` two-sided, ``t_holm``, ``wilcoxon_p``
      one-sided (against is greater), ``wilcoxon_holm``}].
    """
    others = [name for name in samples if name != against]
    ts = [paired_t(samples[against], samples[name]) for name in others]
    signed = [wilcoxon_greater(samples[against], samples[name]) for name in others]
    return [
        {
            "config": name,
            "pairs": len(samples[name]),
            "difference": float(np.mean(_differences(samples[against], samples[name]))),
            "t_p": t,
            "t_holm": t_corrected,
            "wilcoxon_p": w,
            "wilcoxon_holm": w_corrected,
        }
        for name, t, t_corrected, w, w_corrected in zip(others, ts, holm(ts), signed, holm(signed), strict=True)
    ]


def rank_agreement(x: Sequence[float], y: Sequence[float], confidence: float = 0.95) -> dict:
    """Spearman's and Kendall's rank correlation of two measurements of the same items, each with an interval.

    Intervals are Fisher's: tanh(atanh(r) +- z s), with s^2 = (1 + r^2 / 2) / (n - 3) for Spearman (Bonett and Wright,
    Psychometrika 2000) and 0.437 / (n - 4) for Kendall (Fieller, Hartley and Pearson, Biometrika 1957). Where r is 1 or
    -1, which says little in small samples, the value halfway to the nearest one below stands for it: the interval then
    ends at r but does not collapse to it. With five items, the components of a block, intervals are wide: that is what
    five items say.

    Returns:
      {``items``, ``spearman``, ``spearman_low``, ``spearman_high``, ``spearman_p`` (two-sided; exact up to 8 items),
      ``kendall``, ``kendall_low``, ``kendall_high``}; None for what the sample is too small or too uniform to give.
    """
    from scipy import stats

    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if len(x) != len(y):
        raise ValueError(f"paired samples must be of one length, not {len(x)} and {len(y)}")
    n = len(x)
    names = ("spearman", "spearman_low", "spearman_high", "spearman_p", "kendall", "kendall_low", "kendall_high")
    result: dict = {"items": n, **dict.fromkeys(names)}
    if n < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return result
    z = float(stats.norm.ppf(0.5 + confidence / 2))
    rank_x, rank_y = stats.rankdata(x), stats.rankdata(y)
    rho, tau = float(np.corrcoef(rank_x, rank_y)[0, 1]), float(stats.kendalltau(x, y).statistic)
    result |= {"spearman": _clip(rho), "kendall": _clip(tau), "spearman_p": _spearman_p(rank_x, rank_y, rho)}
    if n > 3:
        r = _inside(result["spearman"], 6 / (n * (n * n - 1)))
        low, high = _fisher(result["spearman"], r, z * math.sqrt((1 + r * r / 2) / (n - 3)))
        result |= {"spearman_low": low, "spearman_high": high}
    if n > 4:
        r = _inside(result["kendall"], 2 / (n * (n - 1)))
        low, high = _fisher(result["kendall"], r, z * math.sqrt(0.437 / (n - 4)))
        result |= {"kendall_low": low, "kendall_high": high}
    return result


def _clip(r: float) -> float:
    """Rounding must neither hide a perfect agreement nor exceed it."""
    return math.copysign(1.0, r) if abs(r) > 1 - 1e-12 else r


def _inside(r: float, half_step: float) -> float:
    return math.copysign(1 - half_step, r) if abs(r) == 1 else r


def _fisher(r: float, inside: float, half: float) -> tuple[float, float]:
    low, high = math.tanh(math.atanh(inside) - half), math.tanh(math.atanh(inside) + half)
    return (r if r == -1 else low), (r if r == 1 else high)


def _spearman_p(rank_x: np.ndarray, rank_y: np.ndarray, rho: float) -> float:
    """Two-sided: the share of all orders whose correlation is at least as far from zero."""
    from scipy import stats

    if len(rank_x) > MOST_EXACT_RANKS:
        return float(stats.spearmanr(rank_x, rank_y).pvalue)
    x, y = rank_x - rank_x.mean(), rank_y - rank_y.mean()
    sums = np.asarray(list(itertools.permutations(y))) @ x
    scale = math.sqrt(float(x @ x) * float(y @ y))
    return float(np.mean(np.abs(sums / scale) >= abs(rho) - 1e-9))
