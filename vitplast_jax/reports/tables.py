"""How do records become tables? Plain text for a terminal, Markdown for a README, CSV for other programs.

In: records (mappings), or a plasticity result. Out: text; the caller prints it or writes it.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any


def format_cell(value: Any) -> str:
    """A value for people: four significant digits, thousands separated, nothing for None."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:#.4g}".rstrip(".") if abs(value) < 1e4 else f"{value:.0f}"
    return f"{value:.3e}"


def _columns(rows: Sequence[Mapping], columns: Sequence[str] | None) -> list[str]:
    return list(columns) if columns is not None else list(dict.fromkeys(key for row in rows for key in row))


def _is_number(text: str) -> bool:
    return text == "-" or text.lstrip("+-")[:1].isdigit()


def text_table(rows: Sequence[Mapping], columns: Sequence[str] | None = None) -> str:
    """Aligned columns with a header and a rule; columns of numbers are flush right.

    >>> print(text_table([{"component": "mha", "mean": 1.25}, {"component": "fc1", "mean": 10.5}]))
    component   mean
    ---------  -----
    mha        1.250
    fc1        10.50
    """
    names = _columns(rows, columns)
    cells = [[format_cell(row.get(name)) for name in names] for row in rows]
    widths = [max([len(name), *(len(line[i]) for line in cells)]) for i, name in enumerate(names)]
    right = [bool(cells) and all(_is_number(line[i]) for line in cells) for i in range(len(names))]

    def join(line):
        parts = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True))
        return "  ".join(parts).rstrip()

    return "\n".join([join(names), join(["-" * width for width in widths]), *map(join, cells)])


def markdown_table(rows: Sequence[Mapping], columns: Sequence[str] | None = None) -> str:
    """A GitHub-flavoured Markdown table; columns of numbers are flush right."""
    names = _columns(rows, columns)
    cells = [[format_cell(row.get(name)).replace("|", "\\|") for name in names] for row in rows]
    rule = ["---:" if cells and all(_is_number(line[i]) for line in cells) else "---" for i in range(len(names))]
    return "\n".join("| " + " | ".join(line) + " |" for line in [names, rule, *cells]) + "\n"


def csv_text(rows: Sequence[Mapping], columns: Sequence[str] | None = None) -> str:
    """CSV with a header; floats in full precision, None empty, a nested mapping as columns `key_subkey`."""
    flat = [_flat(row) for row in rows]
    names = _columns(flat, columns)
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(names)
    for row in flat:
        writer.writerow(["" if row.get(name) is None else row[name] for name in names])
    return buffer.getvalue()


def _flat(row: Mapping) -> dict[str, Any]:
    result = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            result |= {f"{key}_{subkey}": subvalue for subkey, subvalue in value.items()}
        else:
            result[key] = value
    return result


# The order of the bounds in arXiv 2602.06883, whatever the model: MHA > FC1 ~ FC2 > LN2 ~ LN1.
PAPER_RANKS = {"mha": "1", "fc1": "2-3", "fc2": "2-3", "ln2": "4-5", "ln1": "4-5"}


def plasticity_table(result: Mapping) -> str:
    """A plasticity result for a terminal: blocks x components (mean, half of the 95 % interval), then the ranking."""
    names = [entry["component"] for entry in result["components"]]
    grid: dict[int, dict[str, Any]] = {}
    for row in result["rows"]:
        grid.setdefault(row["block"], {"block": str(row["block"])})[row["component"]] = _with_interval(row)
    overall = {"block": "all"} | {entry["component"]: _with_interval(entry) for entry in result["components"]}
    ranking = [
        {
            "rank": entry["rank"],
            "component": entry["component"],
            "plasticity": entry["mean"],
            "95 % low": entry["low"],
            "95 % high": entry["high"],
            "rank of bound": entry["bound_rank"],
            "in theory": PAPER_RANKS[entry["component"]],
            "largest ratio": max(row["max"] for row in result["rows"] if row["component"] == entry["component"]),
            "parameters": entry["parameters"],
        }
        for entry in sorted(result["components"], key=lambda entry: entry["rank"])
    ]
    return text_table([*grid.values(), overall], ["block", *names]) + "\n\n" + text_table(ranking)


def _with_interval(entry: Mapping) -> str:
    if entry["low"] is None or entry["high"] is None:
        return f"{entry['mean']:.3f}"
    return f"{entry['mean']:.3f} ±{(entry['high'] - entry['low']) / 2:.3f}"
