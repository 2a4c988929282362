"""Do two quantities put the components of all blocks in the same order, and how sure is that?

In: two tables [blocks, components]. Out: Spearman's and Kendall's rank correlation with intervals.
"""

import numpy as np

_DRAWS = 2000


def spearman(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Spearman's rank correlation along the last axis, ties at their mean rank; NaN where one side is constant."""
    from scipy.stats import rankdata

    first, second = (rankdata(side, axis=-1) for side in (a, b))
    first, second = (ranks - ranks.mean(-1, keepdims=True) for ranks in (first, second))
    return _ratio((first * second).sum(-1), np.sqrt((first**2).sum(-1) * (second**2).sum(-1)))


def kendall(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Kendall's tau-b along the last axis; NaN where one side is constant."""
    first, second = (np.sign(side[..., :, None] - side[..., None, :]) for side in (a, b))
    both = (first * second).sum((-1, -2))
    return _ratio(both, np.sqrt((first**2).sum((-1, -2)) * (second**2).sum((-1, -2))))


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    return np.where(below > 0, above / np.where(below > 0, below, 1), np.nan)


def rank_agreement(a: np.ndarray, b: np.ndarray, seed: int = 0) -> dict:
    """Rank correlations of two tables [blocks, components] over all their cells.

    The intervals are percentile bootstraps that draw whole blocks: the cells of a block share its weights, and all
    blocks the network's, so cells drawn alone would look more certain than they are. With few blocks they are rough;
    with fewer than three, None.

    Returns:
      {"spearman": {"value", "low", "high"}, "kendall": {...}, "cells", "blocks"}; None where it is not defined.
    """
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    blocks = len(a)
    drawn = np.random.default_rng(seed).integers(blocks, size=(_DRAWS, blocks))
    result: dict = {}
    for name, correlation in (("spearman", spearman), ("kendall", kendall)):
        value, low, high = float(correlation(a.ravel(), b.ravel())), None, None
        if blocks >= 3:
            again = [correlation(a[i].ravel(), b[i].ravel()) for i in drawn]
            again = np.asarray(again)[np.isfinite(again)]
            if len(again):
                low, high = (float(q) for q in np.quantile(again, (0.025, 0.975)))
        result[name] = {"value": value if np.isfinite(value) else None, "low": low, "high": high}
    return result | {"cells": int(a.size), "blocks": blocks}
