"""What did a set of runs find? The runs below a folder, reduced to one row a configuration.

In: a folder that `sweep` filled, or any folder of run folders. Out: a summary (plain dicts, ready for JSON): every run,
every configuration at the learning rate that validation chose, tests between configurations, and whether plasticity,
gradient norm and accuracy put the components in one order.

Of the keys in which the runs differ, `seed` repeats a run, `learning_rate` is chosen (by mean validation accuracy over
the seeds; the paper's code chooses on test), those in TASK_KEYS and `data.*` say which task it is, and all others make
up the configuration.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitplast_jax.components import BLOCK_COMPONENTS
from vitplast_jax.errors import UserError
from vitplast_jax.files import as_path, write_json, write_text
from vitplast_jax.reports import paper, plots, statistics, tables
from vitplast_jax.training import config as settings
from vitplast_jax.training import run

TASK_KEYS = ("model", "weights", "image_size")
REPEATED, CHOSEN = "seed", "learning_rate"
FIELDS = (
    *("cell", "state", "error", "validation_accuracy", "test_accuracy", "test_count", "best_step"),
    *("parameters", "grad_norm", "seconds"),
)
SELECTION = "learning rate of the highest mean validation accuracy over the seeds; test accuracy is not looked at"


def read_runs(folder: str | Path) -> tuple[list[str], list[dict[str, Any]]]:
    """(keys in which the runs differ, one row a run: ``cell``, those keys, and FIELDS); None for what is not known.

    Raises:
      UserError: no runs there.
    """
    folder = as_path(folder)
    if (folder / "sweep.json").exists():
        try:
            index = json.loads((folder / "sweep.json").read_text())
            return index["axes"], [
                _with_results(dict(cell), folder / "cells" / cell["cell"]) for cell in index["cells"]
            ]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{folder / 'sweep.json'} is damaged: not what sweep writes; start sweep again") from None
    places = sorted(path.parent for path in folder.glob("*/config.json"))
    if not places:
        raise UserError(f"{folder} holds neither a run (config.json), nor a sweep (sweep.json), nor folders of runs")
    flat = {place: _flat(run.config_of(run.read_description(place)).to_dict()) for place in places}
    axes = [
        key
        for key in settings.FIELDS
        if key not in run.FREE_KEYS and len({values[key] for values in flat.values()}) > 1
    ]
    rows = []
    for place, values in flat.items():
        finished = (place / "results.json").exists()
        row = {"cell": place.name} | {key: text_of(values[key]) for key in axes}
        rows.append(_with_results(row | {"state": "finished" if finished else "waiting", "error": None}, place))
    return axes, rows


def text_of(value: Any) -> Any:
    """Tuples as tables name them: ("ln1", "ln2") is ln1+ln2; anything else stays."""
    return "+".join(map(str, value)) if isinstance(value, (tuple, list)) else value


def _flat(config: Mapping, prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in config.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _with_results(row: dict, place: Path) -> dict:
    row |= dict.fromkeys(name for name in FIELDS if name not in row)
    results = run.read_results(place) if row["state"] == "finished" else None
    if results is None:
        return row
    for split in ("validation", "test"):
        row[f"{split}_accuracy"] = results[split]["accuracy"] if results[split] else None
    row |= {
        "test_count": results["test"]["count"] if results["test"] else None,
        "best_step": results["best_step"],
        "parameters": results["parameters"]["method"],
        "grad_norm": gradient_norm(run.read_metrics(place / "metrics.jsonl")),
        "seconds": results["seconds"],
        "data": results["protocol"]["data"],
    }
    return row


def gradient_norm(lines: Sequence[Mapping]) -> float | None:
    """The norm of the gradient of all that trains but head and final norm, averaged over the logged steps."""
    norms = []
    for line in lines:
        parts = [
            value
            for name, value in line.items()
            if name.startswith("grad_norm/") and name not in ("grad_norm/head", "grad_norm/final_norm")
        ]
        if parts:
            norms.append(sum(value**2 for value in parts) ** 0.5)
    return float(np.mean(norms)) if norms else None


# --- the summary -----------------------------------------------------------------------------------------------------


def summarise(folder: str | Path) -> dict[str, Any]:
    """The whole summary of a folder of runs.

    Returns:
      {``axes``, ``selection``, ``cells`` (rows of :func:`read_runs`), ``groups`` (one a task and configuration: its
      keys, ``learning_rate``, ``edge`` if that is the end of the grid, ``seeds``, ``accuracy`` with ``std low high``
      over the seeds, ``validation``, ``grad_norm``, ``plasticity``, ``parameters``, ``seconds``, ``paper``), ``tests``
      (statistics.compare), ``agreement``, ``notes``}.
    """
    axes, cells = read_runs(folder)
    notes = [f"{row['cell']} failed: {row['error']}" for row in cells if row["state"] == "failed"]
    waiting = sum(row["state"] == "waiting" for row in cells)
    if waiting:
        notes.append(f"{waiting} of {len(cells)} runs have not ended")
    tasks = task_keys(axes)
    configs = [key for key in axes if key not in (*tasks, REPEATED, CHOSEN)]
    plasticity = read_plasticity(folder)
    groups, chosen = [], {}
    for key in dict.fromkeys(tuple(row[name] for name in (*tasks, *configs)) for row in cells):
        members = [row for row in cells if tuple(row[name] for name in (*tasks, *configs)) == key]
        found, runs = _group(members, notes)
        if found is None:
            continue
        named = dict(zip((*tasks, *configs), key, strict=True))
        task, config = _label(named, tasks), _label(named, configs)
        found |= {"plasticity": _plasticity_of(plasticity.get(task_name(named, tasks)), named.get("trainable"))}
        reported = paper.accuracy(runs[0]["data"]) or {}
        found |= {"paper": reported.get(named.get("trainable"))}
        groups.append({"task": task, "config": config, **named, **found})
        chosen[task, config] = {row.get(REPEATED): row["test_accuracy"] for row in runs}
    return {
        "axes": list(axes),
        "selection": SELECTION,
        "groups": groups,
        "tests": _tests(groups, chosen),
        "agreement": _agreement(groups),
        "cells": cells,
        "notes": notes,
    }


def _label(named: Mapping[str, Any], keys: Sequence[str]) -> str:
    return ", ".join(str(named[key]) for key in keys) or "all runs"


def task_keys(axes: Iterable[str]) -> list[str]:
    """Those keys that say on which task, and from which start, a run is."""
    return [key for key in axes if key.startswith("data.") or key in TASK_KEYS]


def task_name(named: Mapping[str, Any], tasks: Sequence[str]) -> str:
    """The folder in which a task's plasticity lies, below ``plasticity/``."""
    label = "-".join(str(named[key]) for key in tasks) or "start"
    return "".join(c if c.isalnum() or c in "._+-" else "_" for c in label)


def _group(members: Sequence[Mapping], notes: list[str]) -> tuple[dict | None, list]:
    """One configuration on one task: its row, and the runs at the chosen learning rate."""
    finished = [row for row in members if row["state"] == "finished" and row["test_accuracy"] is not None]
    if not finished:
        return None, []
    rates = sorted({row[CHOSEN] for row in finished}) if CHOSEN in finished[0] else [None]
    by_rate = {rate: [row for row in finished if row.get(CHOSEN) == rate] for rate in rates}
    most = max(map(len, by_rate.values()))
    complete = [rate for rate in rates if len(by_rate[rate]) == most]  # a rate at which a seed diverged is no choice
    if len(complete) > 1:
        if any(row["validation_accuracy"] is None for row in finished):
            notes.append(f"{finished[0]['cell']}: no validation data, so no learning rate can be chosen")
            return None, []
        best = max(complete, key=lambda rate: np.mean([row["validation_accuracy"] for row in by_rate[rate]]))
    else:
        best = complete[0]
    runs = by_rate[best]
    tested = statistics.summarise([row["test_accuracy"] for row in runs])
    validated = [row["validation_accuracy"] for row in runs]
    asked = sorted({row[CHOSEN] for row in members}) if CHOSEN in members[0] else []
    norms = [row["grad_norm"] for row in runs if row["grad_norm"] is not None]
    return {
        "learning_rate": best,
        "edge": len(asked) > 1 and best in (asked[0], asked[-1]),
        "seeds": tested["count"],
        "accuracy": tested["mean"],
        "std": tested["std"],
        "low": tested["low"],
        "high": tested["high"],
        "validation": None if None in validated else float(np.mean(validated)),
        "grad_norm": float(np.mean(norms)) if norms else None,
        "parameters": runs[0]["parameters"],
        "seconds": float(np.mean([row["seconds"] for row in runs])),
    }, runs


def read_plasticity(folder: str | Path) -> dict[str, dict]:
    """The plasticity results that ``sweep`` measured, by task."""
    found = {}
    for path in sorted(as_path(folder).glob("plasticity/*/plasticity.json")):
        try:
            found[path.parent.name] = json.loads(path.read_text())
        except ValueError:
            raise UserError(f"{path} is damaged; delete it and start sweep again") from None
    return found


def _plasticity_of(result: Mapping | None, trainable: str | None) -> float | None:
    entries = {} if result is None else {entry["component"]: entry["mean"] for entry in result["components"]}
    return entries.get(trainable)


def _tests(groups: Sequence[Mapping], chosen: Mapping) -> list[dict]:
    """One configuration (mha, as in the paper, else the first) against the others, paired by task and seed."""
    configs = list(dict.fromkeys(group["config"] for group in groups))
    if len(configs) < 2:
        return []
    tasks = list(dict.fromkeys(group["task"] for group in groups))
    seeds = {
        task: [chosen.get((task, config), {}).keys() for config in configs] for task in tasks
    }  # only pairs that every configuration has
    pairs = [(task, seed) for task in tasks for seed in seeds[task][0] if all(seed in has for has in seeds[task])]
    if not pairs:
        return []
    samples = {config: [chosen[task, config][seed] for task, seed in pairs] for config in configs}
    against = "mha" if "mha" in configs else configs[0]
    return [{"against": against, **row} for row in statistics.compare(samples, against)]


def _agreement(groups: Sequence[Mapping]) -> list[dict]:
    """For each task, over the components trained alone: do plasticity, gradient norm and accuracy agree in rank?"""
    rows = []
    for task in dict.fromkeys(group["task"] for group in groups):
        single = [group for group in groups if group["task"] == task and group.get("trainable") in BLOCK_COMPONENTS]
        for x, y in (("plasticity", "accuracy"), ("grad_norm", "accuracy"), ("plasticity", "grad_norm")):
            known = [group for group in single if group[x] is not None and group[y] is not None]
            if len(known) > 2:
                found = statistics.rank_agreement([group[x] for group in known], [group[y] for group in known])
                rows.append({"task": task, "of": x, "with": y, **found})
    return rows


# --- its files -------------------------------------------------------------------------------------------------------

COLUMNS = (
    *("accuracy", "std", "low", "high", "seeds", "learning_rate", "edge", "validation", "plasticity", "grad_norm"),
    *("parameters", "seconds", "paper"),
)


def table_columns(summary: Mapping[str, Any]) -> list[str]:
    """The columns of the table of configurations: those that say something."""
    groups = summary["groups"]
    named = [name for name in ("task", "config") if len({group[name] for group in groups}) > 1] or ["config"]
    return named + [name for name in COLUMNS if any(group[name] is not None for group in groups)]


def markdown(summary: Mapping[str, Any]) -> str:
    """The summary for a README: configurations, tests, agreement, notes."""
    parts = [
        "Test accuracy (mean, standard deviation and 95 % interval over seeds) at the chosen learning rate. Chosen: "
        f"{summary['selection']}. `edge`: the chosen rate is an end of the grid, a better one may lie beyond.",
        tables.markdown_table(_readable(summary["groups"]), table_columns(summary)),
    ]
    if summary["tests"]:
        parts += [
            f"{summary['tests'][0]['against']} against the others, paired by task and seed: two-sided paired t, "
            "one-sided Wilcoxon, and both with Holm's correction.",
            tables.markdown_table(summary["tests"], [name for name in summary["tests"][0] if name != "against"]),
        ]
    if summary["agreement"]:
        parts += [
            "Rank agreement over the components that were trained alone, with 95 % intervals.",
            tables.markdown_table(summary["agreement"]),
        ]
    parts += [f"* {note}" for note in summary["notes"]]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def _readable(groups: Sequence[Mapping]) -> list[dict]:
    return [{**group, "edge": "yes" if group["edge"] else "no"} for group in groups]


def text(summary: Mapping[str, Any]) -> str:
    """The table of configurations for a terminal."""
    hidden = ("low", "high", "seconds", "validation")
    columns = [name for name in table_columns(summary) if name not in hidden]
    return tables.text_table(_readable(summary["groups"]), columns)


def save(summary: Mapping[str, Any], folder: str | Path) -> list[str]:
    """Writes ``summary.json table.csv table.md cells.csv`` and, where a run has ended, ``sweep.png``; their names."""
    folder = as_path(folder)
    write_json(folder / "summary.json", summary)
    write_text(folder / "table.csv", tables.csv_text(summary["groups"], None if summary["groups"] else COLUMNS))
    write_text(folder / "table.md", markdown(summary))
    write_text(folder / "cells.csv", tables.csv_text(summary["cells"]))
    names = ["summary.json", "table.csv", "table.md", "cells.csv"]
    if summary["groups"]:
        plots.plot_sweep(summary, folder / "sweep.png")
        names.append("sweep.png")
    return names
