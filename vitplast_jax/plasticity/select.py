"""Which component should be trained, how sure is that, and what does it cost in parameters?

In: the components of a plasticity result (mean, interval, parameters). Out: a recommendation whose `trainable` the
train command takes as it is. High plasticity finetunes better (arXiv 2602.06883), so the highest mean wins; components
whose intervals overlap the winner's cannot be told apart from it and are named as ties.
"""

from collections.abc import Sequence


def rank(values: Sequence[float | None]) -> list[int | None]:
    """1 for the largest; None stays None."""
    order = sorted((v for v in values if v is not None), reverse=True)
    return [None if v is None else order.index(v) + 1 for v in values]


def recommend(components: Sequence[dict]) -> dict:
    """The component with the highest mean plasticity.

    Args:
      components: [{component, mean, low, high, parameters}]; low and high may be None (interval unknown).
    Returns:
      {trainable: [names], reason: one sentence, ties: [names of the components that overlap the winner]}.
    """
    ranked = sorted(components, key=lambda c: -c["mean"])
    best, others = ranked[0], ranked[1:]
    ties = [c for c in others if _overlap(best, c)]
    text = f"{best['component']} has the highest mean plasticity, {_interval(best)}"
    if others:
        text += f"; next comes {others[0]['component']} with {_interval(others[0])}"
    if ties:
        tied = ", ".join(f"{c['component']} ({c['parameters']:,} parameters)" for c in ties)
        text += f"; its interval overlaps that of {tied}: they cannot be told apart by this measurement"
    text += f". It trains {best['parameters']:,} parameters in all blocks"
    return {"trainable": [best["component"]], "reason": text, "ties": [c["component"] for c in ties]}


def trainable_line(recommendation: dict) -> str:
    """The line that a config takes: `trainable=("mha",)`."""
    names = ", ".join(f'"{name}"' for name in recommendation["trainable"])
    return f"trainable=({names}{',' if len(recommendation['trainable']) == 1 else ''})"


def _overlap(one: dict, other: dict) -> bool:
    if None in (one["low"], one["high"], other["low"], other["high"]):
        return True  # nothing is known, so nothing can be told apart
    return one["low"] <= other["high"] and other["low"] <= one["high"]


def _interval(entry: dict) -> str:
    if entry["low"] is None or entry["high"] is None:
        return f"{entry['mean']:#.4g} (interval unknown)"
    return f"{entry['mean']:#.4g} (95 % interval {entry['low']:#.4g} to {entry['high']:#.4g})"
