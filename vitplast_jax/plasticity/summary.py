"""What do the measured rates add up to? Rows, components with ranks, and remarks: the tables of plasticity.json.

In: streamed statistics of every block, the model (for bounds and parameter counts). Out: plain dicts and lists, ready
for JSON: what is not known is None.
"""

import dataclasses

import numpy as np

from vitplast_jax import components, trees
from vitplast_jax.plasticity import rates, select
from vitplast_jax.plasticity.bounds import COMPONENTS, bounds, why_unbounded
from vitplast_jax.plasticity.stream import CONTRASTS


def _number(value) -> float | None:
    return float(value) if value is not None and np.isfinite(value) else None


def make_tables(model, params, stream, with_bounds: bool) -> dict:
    """`rows`, `components` and `recommendation` of a plasticity result, from a finished stream.

    Without bounds their columns are None.
    """
    by_block, overall = stream.by_block, stream.overall
    sizes: dict[tuple[int, str], int] = {}
    for path, leaf in trees.flatten(params).items():
        place = components.locate(path)
        sizes[place.block, place.component] = sizes.get((place.block, place.component), 0) + leaf.size
    known = bounds(model, sigma=stream.sigma, radius=stream.radius) if with_bounds else ()
    limits = {(row["block"], row["component"]): row for row in known}
    rows, entries = [], []
    for index, statistics in enumerate(by_block):
        low, high, std, quantiles = *statistics.interval(), statistics.std(), statistics.quantiles()
        for k, name in enumerate(COMPONENTS):
            limit = limits.get((index, name), {"bound": None, "spectral_norm": None})
            rows.append(
                {
                    "block": index,
                    "component": name,
                    "mean": float(statistics.mean[k]),
                    "low": _number(low[k]),
                    "high": _number(high[k]),
                    "std": _number(std[k]),
                    "max": float(statistics.max[k]),
                    "quantiles": {str(p): float(q) for p, q in zip(rates.QUANTILES, quantiles[k], strict=True)},
                    "bound": _number(limit["bound"]),
                    "spectral_norm": _number(limit["spectral_norm"]),
                    "parameters": sizes[index, name],
                    "grad_norm": None,
                }
            )
    low, high = overall.interval()
    mean_bounds = [_mean([row["bound"] for row in rows if row["component"] == name]) for name in COMPONENTS]
    ranks, bound_ranks = select.rank(list(overall.mean)), select.rank(mean_bounds)
    for k, name in enumerate(COMPONENTS):
        entries.append(
            {
                "component": name,
                "mean": float(overall.mean[k]),
                "low": _number(low[k]),
                "high": _number(high[k]),
                "rank": ranks[k],
                "bound_rank": bound_ranks[k],
                "parameters": sum(row["parameters"] for row in rows if row["component"] == name),
            }
        )
    contrasts = _contrasts(stream)
    return {
        "rows": rows,
        "components": entries,
        "contrasts": contrasts,
        "recommendation": select.recommend(entries, contrasts),
    }


def _contrasts(stream) -> list[dict]:
    """Differences of two components' means over the blocks, with the interval over the same pairs of images."""
    low, high = stream.contrasts.interval()
    return [
        {
            "first": COMPONENTS[one],
            "second": COMPONENTS[other],
            "difference": float(stream.contrasts.mean[k]),
            "low": _number(low[k]),
            "high": _number(high[k]),
        }
        for k, (one, other) in enumerate(CONTRASTS)
    ]


def _mean(values) -> float | None:
    return None if None in values else float(np.mean(values))


def make_notes(model, stream, protocol: str, with_bounds: bool) -> dict[str, str]:
    """What a reader of the numbers must know, and why some of them are null."""
    overall, (places_x, places_y) = stream.overall, stream.places
    notes = {
        "grad_norm": "null: loss gradients were not measured",
        "spectral_norm": "null for mha, which has no single matrix; max|gamma| for layer norms",
        "bound": "for inputs with the sigma and the radius (largest token norm) of these images",
    }
    if not with_bounds:
        notes["bound"] = notes["spectral_norm"] = "null: bounds were not computed"
    if reason := why_unbounded(model.blocks[0].attn):
        notes["mha_bound"] = f"null: {reason}"
    if overall.excluded.max():
        notes["excluded_pairs"] = f"{overall.excluded.max()} pairs of equal inputs have no rate and were left out"
    if protocol == "reference" and stream.pairing == "matched":
        notes["interval"] = "1.96 std / sqrt(pairs), as the paper's"
        used = min(len(np.unique(places_x)), len(np.unique(places_y)))
        if used < len(places_x):
            notes["pairs"] = f"one side has only {used} images, which were used again: the intervals are too narrow"
    return notes


def describe_preprocessing(*prepares) -> dict | None:
    """The preprocessing of the images as JSON; None where all were given as normalised floats."""
    for prepare in prepares:
        if prepare.preprocessing is not None:
            fields = dataclasses.asdict(prepare.preprocessing)
            return {key: list(value) if isinstance(value, tuple) else value for key, value in fields.items()}
    return None
