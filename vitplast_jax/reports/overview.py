"""What belongs on the page of a run, and on that of a sweep? Sections for page.py, and the files beside it.

In: a run's folder, a sweep's, or one whose subfolders are runs. Out: `report.html`, and for a run `report.csv` and
`report.md`; for several, the tables and the picture of collect.py.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitplast_jax.errors import UserError
from vitplast_jax.files import as_path, write_text
from vitplast_jax.reports import collect, page, paper, plots, tables
from vitplast_jax.training import run


def write_report(folder: str | Path) -> list[str]:
    """Writes the report of a folder into it; returns the names of the files.

    Raises:
      UserError: nothing there to report, or files that are damaged.
    """
    folder = as_path(folder)
    if (folder / "config.json").exists():
        return _write_run(folder)
    summary = collect.summarise(folder)
    names = collect.save(summary, folder)
    write_text(folder / "report.html", page.page(f"Sweep {folder.name}", sweep_sections(summary, folder)))
    return [*names, "report.html"]


# --- one run ---------------------------------------------------------------------------------------------------------


def _write_run(folder: Path) -> list[str]:
    described, results = run.read_description(folder), run.read_results(folder)
    if results is None:
        raise UserError(f"{folder} holds a run that has not ended; let train finish it first")
    rows, names = run_rows(results), []
    if run.read_metrics(folder / "metrics.jsonl"):
        plots.plot_curves(folder / "metrics.jsonl", folder / "curves.png", ", ".join(results["trainable"]))
        names.append("curves.png")
    write_text(folder / "report.csv", tables.csv_text(rows))
    write_text(folder / "report.md", tables.markdown_table(rows))
    write_text(folder / "report.html", page.page(f"Run {folder.name}", _run_sections(described, results, folder)))
    return [*names, "report.csv", "report.md", "report.html"]


def run_rows(results: Mapping[str, Any]) -> list[dict]:
    """One row a split, the paper's accuracy beside ours where the paper has this configuration and data set."""
    trained = [name for name in results["trainable"] if name not in ("head", "final_norm")]
    reported = (paper.accuracy(results["protocol"]["data"]) or {}).get("+".join(trained))
    rows = []
    for split in ("test", "validation"):
        if results[split]:
            row = {"split": split, **results[split]}
            if reported is not None:
                row["paper"] = reported if split == "test" else None
            rows.append(row)
    return rows


def _run_sections(described: Mapping, results: Mapping, folder: Path) -> list[tuple[str, list[str]]]:
    counted, rows = results["parameters"], run_rows(results)
    intro = (
        f"{described['spec']['name']} on {results['protocol']['data']}; trained {', '.join(results['trainable'])}: "
        f"{counted['trainable']:,} of {counted['total']:,} parameters in {results['seconds']:.0f} s. Tested: step "
        f"{results['best_step']} ({results['protocol']['selection']})."
    )
    first = [page.paragraph(intro), page.table(rows)]
    if any("paper" in row for row in rows):
        first.append(page.paragraph(f"paper: {paper.SOURCE}", note=True))
    settings = {name: value for name, value in described.items() if name not in ("class_names", "spec")}
    return [
        ("Result", first),
        ("Training", _pictures(folder, {"curves.png": "loss, accuracy and learning rate against the step"})),
        ("Confusion", _pictures(folder, {"confusion.png": "confusion matrix"})),
        ("Plasticity", _pictures(folder, {"plasticity.png": "plasticity by component and block"})),
        ("Settings", [page.table(_flat_rows(settings))]),
        ("Environment", _environment(folder)),
    ]


# --- many runs -------------------------------------------------------------------------------------------------------


def sweep_sections(summary: Mapping[str, Any], folder: Path) -> list[tuple[str, list[str]]]:
    """The sections of the page of a sweep."""
    groups = [{**group, "edge": "yes" if group["edge"] else "no"} for group in summary["groups"]]
    done = sum(cell["state"] == "finished" for cell in summary["cells"])
    first = [page.paragraph(f"{done} of {len(summary['cells'])} runs have ended. Chosen: {summary['selection']}.")]
    if groups:
        first += [
            page.table(groups, collect.table_columns(summary)),
            page.paragraph(
                "accuracy: test, mean over seeds with standard deviation and 95 % interval (Student's t). edge: the "
                "chosen learning rate is an end of the grid, so a better one may lie beyond. grad norm: of all that "
                "trains but head and final norm, averaged over training.",
                note=True,
            ),
        ]
    if any(group["paper"] is not None for group in groups):
        first.append(page.paragraph(f"paper: {paper.SOURCE}", note=True))
    first += _pictures(folder, {"sweep.png": "accuracy of each configuration, by learning rate and against plasticity"})
    tests = []
    if summary["tests"]:
        tests = [
            page.paragraph(
                f"{summary['tests'][0]['against']} against each other configuration, paired by task and seed: "
                "two-sided paired t-test, one-sided Wilcoxon signed-rank test, and both with Holm's correction."
            ),
            page.table(summary["tests"], [name for name in summary["tests"][0] if name != "against"]),
        ]
    agreement = []
    if summary["agreement"]:
        agreement = [
            page.paragraph("Over the components that were trained alone: rank correlations with 95 % intervals."),
            page.table(summary["agreement"]),
        ]
    measured = [
        part
        for place in sorted(folder.glob("plasticity/*/plasticity.png"))
        for part in (page.paragraph(place.parent.name), *_pictures(place.parent, {place.name: "plasticity"}))
    ]
    first_cell = next((folder / "cells" / cell["cell"] for cell in summary["cells"]), folder)
    return [
        ("Configurations", first),
        ("Tests", tests),
        ("Does plasticity predict?", agreement),
        ("Plasticity of the start", measured),
        ("Notes", [page.paragraph(note) for note in summary["notes"]]),
        ("All runs", [page.table(summary["cells"])]),
        ("Environment", _environment(first_cell)),
    ]


def _pictures(folder: Path, descriptions: Mapping[str, str]) -> list[str]:
    return [page.picture(folder / name, text) for name, text in descriptions.items() if (folder / name).exists()]


def _flat_rows(settings: Mapping, prefix: str = "") -> list[dict]:
    rows = []
    for name, value in settings.items():
        if isinstance(value, Mapping):
            rows += _flat_rows(value, f"{prefix}{name}.")
        else:
            rows.append({"key": f"{prefix}{name}", "value": json.dumps(value)})
    return rows


def _environment(folder: Path) -> list[str]:
    try:
        return [page.table(_flat_rows(json.loads((folder / "environment.json").read_text())))]
    except (OSError, ValueError):
        return []
