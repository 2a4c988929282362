"""Which runs does a grid consist of, and how does each end? The cells of `config.sweep`, run one after another.

In: a checked config whose `sweep` names axes, and a folder. Out: `cells/NAME`, an ordinary run folder each, and
`sweep.json`: axes and the state of every cell, written anew whenever one ends.

A finished cell is not run again, an interrupted one continues, and one that fails does not end the others. Axes keep
their order but for the values that one compiled step serves (shared.RUN_TIME_KEYS), which go through innermost: a
program is compiled once for all of them.
"""

import dataclasses
import hashlib
import itertools
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from vitplast_jax.errors import Stopped, UserError
from vitplast_jax.files import as_path, write_json
from vitplast_jax.training import config as settings
from vitplast_jax.training import inputs, run
from vitplast_jax.training.loop import train_and_evaluate
from vitplast_jax.training.shared import RUN_TIME_KEYS, Shared
from vitplast_jax.training.start import load_start

LONGEST_NAME = 120


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run of a grid: its folder's name, its place on every axis, and the config of an ordinary run."""

    name: str
    values: Mapping[str, Any]
    config: Any


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a cell ended: its results, or the error in one line; ``before``: an earlier sweep had finished it."""

    cell: Cell
    results: Mapping[str, Any] | None
    error: str | None = None
    before: bool = False
    seconds: float = 0.0


def axes_of(config) -> dict[str, list[Any]]:
    """The axes of a grid, slowest first: key -> canonical values.

    Raises:
      UserError: no axis, or a value twice on one.
    """
    if not config.sweep:
        raise UserError(
            "config.sweep is empty: name the axes of the grid, for example "
            '--config.sweep="trainable=mha|fc1|ln1,learning_rate=1e-3|3e-3,seed=0|1"'
        )
    axes = {}
    for key, texts in map(settings.split_axis, config.sweep):
        axes[key] = [settings.read(key, given) for given in texts]
        if len(set(axes[key])) < len(axes[key]):
            raise UserError(f"config.sweep: {key} has the same value twice: {', '.join(map(str, axes[key]))}")
    return {key: axes[key] for key in sorted(axes, key=lambda key: key in RUN_TIME_KEYS)}


def make_cells(config) -> list[Cell]:
    """The cells of a grid, neighbours sharing what they can.

    Raises:
      UserError: a combination of values that no run can have; the cell is named.
    """
    axes = axes_of(config)
    cells, taken = [], set()
    for values in itertools.product(*axes.values()):
        values = dict(zip(axes, values, strict=True))
        name = _name(values)
        if name in taken:
            name = _with_hash(name, values)
        taken.add(name)
        try:
            cells.append(Cell(name, values, _config_with(config, values)))
        except UserError as error:
            raise UserError(f"config.sweep, cell {name}: {error}") from None
    return cells


def _config_with(config, values: Mapping[str, Any]):
    flat = {**config.to_dict(), "sweep": ()}
    for key, value in values.items():
        *groups, last = key.split(".")
        node = flat
        for group in groups:
            node[group] = dict(node[group])
            node = node[group]
        node[last] = value
    return settings.validate(flat)


def text_of(value: Any) -> str:
    """A value as folders and tables name it: ("ln1", "ln2") is ln1+ln2."""
    return "+".join(map(text_of, value)) if isinstance(value, tuple) else str(value)


def _name(values: Mapping[str, Any]) -> str:
    name = ",".join(f"{key}={text_of(value)}" for key, value in values.items())
    safe = re.sub(r"[^A-Za-z0-9._=,+@-]", "_", name)
    return safe if len(safe) <= LONGEST_NAME else _with_hash(safe, values)


def _with_hash(name: str, values: Mapping[str, Any]) -> str:
    return f"{name[:LONGEST_NAME]}-{hashlib.sha256(repr(values).encode()).hexdigest()[:8]}"


def check_starts(cells: list[Cell], shared: Shared):
    """Finds before the first step what would fail every cell: data, weights, selectors.

    Raises:
      UserError: the first problem, with the cell that has it.
    """
    seen = []
    for cell in cells:
        key = {k: v for k, v in cell.config.to_dict().items() if k not in RUN_TIME_KEYS}
        if key in seen:
            continue
        seen.append(key)
        try:
            data, _ = shared.once("data", cell.config.data.to_dict(), lambda cell=cell: inputs.load_data(cell.config))
            run.trainable_mask(cell.config, load_start(cell.config, data["train"].class_names).params)
        except UserError as error:
            raise UserError(f"cell {cell.name}: {error}") from None


def run_cells(cells: list[Cell], workdir: str | Path, shared: Shared) -> Iterator[Outcome]:
    """Runs the cells one after another and yields how each ended; ``sweep.json`` is up to date at every moment."""
    folder = as_path(workdir)
    states = [{"cell": cell.name, **_plain(cell.values), "state": "waiting", "error": None} for cell in cells]

    def record():
        if jax.process_index() == 0:
            write_json(folder / "sweep.json", {"axes": list(cells[0].values) if cells else [], "cells": states})

    record()
    for cell, state in zip(cells, states, strict=True):
        outcome = _run_cell(cell, folder / "cells" / cell.name, shared)
        state |= {"state": "failed" if outcome.error else "finished", "error": outcome.error}
        record()
        yield outcome


def _run_cell(cell: Cell, folder: Path, shared: Shared) -> Outcome:
    began = time.monotonic()
    try:
        if run.is_finished(folder, cell.config):
            return Outcome(cell, run.read_results(folder), before=True)
        results = train_and_evaluate(cell.config, folder, shared=shared)
    except Stopped:
        raise
    except Exception as error:  # whatever it is, the other cells are not to be lost
        line = " ".join(str(error).split())
        line = line if isinstance(error, UserError) else f"{type(error).__name__}: {line[:300]}"
        return Outcome(cell, None, error=line, seconds=time.monotonic() - began)
    return Outcome(cell, results, seconds=time.monotonic() - began)


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: text_of(value) if isinstance(value, tuple) else value for key, value in values.items()}
