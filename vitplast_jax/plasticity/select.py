"""Which components should be trained, how sure is that, what does it cost, and does it fit a budget?

In: the components and rows of a plasticity result, and a function that gives the cost of a choice. Out: ranked choices
and a recommendation whose `trainable` the train command takes as it is.

High plasticity finetunes better (arXiv 2602.06883), so the component with the highest mean wins; components that cannot
be told apart from it are named as ties: those whose difference to it, over the same pairs of images, may be 0. Where
all its blocks are more than the budget allows, single components of single blocks are taken in the order of their
plasticity, each if the whole choice still fits.
"""

import re
from collections.abc import Callable, Iterable, Sequence

from vitplast_jax.errors import UserError


def rank(values: Sequence[float | None]) -> list[int | None]:
    """1 for the largest; None stays None."""
    order = sorted((v for v in values if v is not None), reverse=True)
    return [None if v is None else order.index(v) + 1 for v in values]


def recommend(components: Sequence[dict], contrasts: Sequence[dict] = ()) -> dict:
    """The component with the highest mean plasticity.

    Args:
      components: [{component, mean, low, high, parameters}]; low and high may be None (interval unknown).
      contrasts: [{first, second, difference, low, high}] over the same pairs; where there is none for two components,
        it is asked whether their own intervals overlap, which says "tie" more often.
    Returns:
      {trainable: [names], reason: one sentence, ties: [names of the components that may be as good as the winner]}.
    """
    ranked = sorted(components, key=lambda c: -c["mean"])
    best, others = ranked[0], ranked[1:]
    known = {frozenset((c["first"], c["second"])): c for c in contrasts}

    def tied_with_best(entry):
        contrast = known.get(frozenset((best["component"], entry["component"])))
        if contrast is None:
            return _overlap(best, entry)
        return contrast["low"] is None or contrast["low"] <= 0 <= contrast["high"]

    ties = [c for c in others if tied_with_best(c)]
    text = f"{best['component']} has the highest mean plasticity, {_interval(best)}"
    if others:
        text += f"; next comes {others[0]['component']} with {_interval(others[0])}"
    if ties:
        tied = ", ".join(f"{c['component']} ({c['parameters']:,} parameters)" for c in ties)
        text += f"; {best['component']} and {tied} cannot be told apart by this measurement"
    text += f". It trains {best['parameters']:,} parameters in all blocks"
    return {"trainable": [best["component"]], "reason": text, "ties": [c["component"] for c in ties]}


def choose(result: dict, cost_of: Callable[[Sequence[str]], dict], params: int = 0, flops: float = 0.0) -> dict:
    """What to train under a budget, with the cost of every choice.

    Args:
      result: a plasticity result: `components` and `rows`.
      cost_of: from selectors to {parameters, flops, ...}, as :class:`vitplast_jax.plasticity.costs.Costs`.
      params: at most so many parameters of the components chosen (without head and final norm); 0: no limit.
      flops: at most this share of the FLOPs of a step of full finetuning; 0: no limit.
    Returns:
      {budget: {params, flops}, choices: {components: [...], rows: [...]}, recommendation}: every choice has
      `trainable`, `mean`, `low`, `high`, `fits` and its costs, the most plastic first.
    Raises:
      UserError: nothing fits.
    """

    def fits(cost):
        return (not params or cost["parameters"] <= params) and (not flops or cost["flops"] <= flops)

    def ranked(entries, selector_of):
        choices = []
        for entry in sorted(entries, key=lambda entry: -entry["mean"]):
            cost = cost_of([selector_of(entry)])
            values = {name: entry[name] for name in ("mean", "low", "high")}
            choices.append({"trainable": [selector_of(entry)], **values, "fits": fits(cost), **cost})
        return choices

    by_component = ranked(result["components"], lambda entry: entry["component"])
    by_row = ranked(result["rows"], lambda row: f"{row['component']}@{row['block']}")
    recommendation = recommend(result["components"], result.get("contrasts", ()))
    if not by_component[0]["fits"]:
        recommendation = _fill(by_component, by_row, cost_of, fits, _budget_text(params, flops))
    elif params or flops:
        recommendation["reason"] += f", which fits the budget of {_budget_text(params, flops)}"
    cost = cost_of(recommendation["trainable"])
    recommendation["reason"] += (
        f"; a step costs {cost['flops']:.0%} of full finetuning's FLOPs, the optimizer keeps "
        f"{cost['optimizer_bytes'] / 1e6:.3g} MB, and devices exchange {cost['allreduce_bytes'] / 1e6:.3g} MB a step "
        "(head and final norm included where they train)"
    )
    return {
        "budget": {"params": params or None, "flops": flops or None},
        "choices": {"components": by_component, "rows": by_row},
        "recommendation": recommendation,
    }


def _fill(by_component, by_row, cost_of, fits, budget: str) -> dict:
    """Rows in the order of their plasticity, each taken if the whole still fits."""
    taken: list[dict] = []
    for row in by_row:
        if row["fits"] and fits(cost_of(_selectors([*taken, row]))):
            taken.append(row)
    if not taken:
        least = min(by_row, key=lambda row: (row["parameters"], row["flops"]))
        raise UserError(
            f"no component of any block fits the budget of {budget}: the smallest is {least['trainable'][0]} with "
            f"{least['parameters']:,} parameters and {least['flops']:.0%} of full finetuning's FLOPs; raise the budget"
        )
    best, last = by_component[0], taken[-1]
    left = [row for row in by_row if row not in taken]
    ties = [row["trainable"][0] for row in left if row["fits"] and _overlap(row, last)]
    chosen = _selectors(taken)
    text = (
        f"{best['trainable'][0]} has the highest mean plasticity, {_interval(best)}, but with {best['parameters']:,} "
        f"parameters and {best['flops']:.0%} of full finetuning's FLOPs it does not fit the budget of {budget}; "
        f"the most plastic components of single blocks that fit together are {', '.join(chosen)}, "
        f"{cost_of(chosen)['parameters']:,} parameters, the last of them {last['trainable'][0]} with {_interval(last)}"
    )
    if ties:
        text += f"; {', '.join(ties)} cannot be told apart from that last one by this measurement"
    return {"trainable": chosen, "reason": text, "ties": ties}


def _selectors(rows: Iterable[dict]) -> list[str]:
    """`fc1@0-2` for the blocks 0, 1, 2 of fc1, in the order in which components first appear."""
    blocks: dict[str, list[int]] = {}
    for row in rows:
        name, block = re.fullmatch(r"(\w+)@(\d+)", row["trainable"][0]).groups()
        blocks.setdefault(name, []).append(int(block))
    found = []
    for name, numbers in blocks.items():
        runs: list[list[int]] = []
        for number in sorted(numbers):
            if runs and number == runs[-1][-1] + 1:
                runs[-1].append(number)
            else:
                runs.append([number])
        found += [f"{name}@{run[0]}" + (f"-{run[-1]}" if len(run) > 1 else "") for run in runs]
    return found


def trainable_line(recommendation: dict) -> str:
    """The line that a config takes: `trainable=("mha",)`."""
    names = ", ".join(f'"{name}"' for name in recommendation["trainable"])
    return f"trainable=({names}{',' if len(recommendation['trainable']) == 1 else ''})"


def _budget_text(params: int, flops: float) -> str:
    parts = [f"{params:,} parameters"] if params else []
    return " and ".join([*parts, *([f"{flops:.0%} of full finetuning's FLOPs"] if flops else [])])


def _overlap(one: dict, other: dict) -> bool:
    if None in (one["low"], one["high"], other["low"], other["high"]):
        return True  # nothing is known, so nothing can be told apart
    return one["low"] <= other["high"] and other["low"] <= one["high"]


def _interval(entry: dict) -> str:
    if entry["low"] is None or entry["high"] is None:
        return f"{entry['mean']:#.4g} (interval unknown)"
    return f"{entry['mean']:#.4g} (95 % interval {entry['low']:#.4g} to {entry['high']:#.4g})"
