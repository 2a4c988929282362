"""What lies in a folder that `tools/prepare_dataset.py` made? The reader behind `tfds` and every benchmark's name.

In: such a folder: `data/` (TFDS format, ArrayRecord), `index.npz` (labels by rule, byte and pixel sizes of every
record) and `manifest.json`, which is written last. Out: one split as `data/protocols.py` divides it. No TensorFlow is
needed; a folder that is half prepared, damaged or of another set is refused in one line.
"""

from __future__ import annotations

import json
import os

import numpy as np

from vitplast_jax.data import protocols, records, sources
from vitplast_jax.errors import UserError

MANIFEST, INDEX, DATA = "manifest.json", "index.npz", "data"
FORMAT = 1


def read_manifest(path: str) -> dict:
    """The checked manifest of a prepared folder.

    Raises:
      UserError: no such folder, no or a damaged manifest, or files that are not what the manifest says.
    """
    again = f"make it with: python tools/prepare_dataset.py NAME --output {path}"
    if not os.path.isdir(path):
        raise UserError(f"{path}: no such folder (data.path); {again}")
    file = os.path.join(path, MANIFEST)
    if not os.path.isfile(file):
        raise UserError(f"{path}: is no prepared data set, or preparing it was cut short (no {MANIFEST}); {again}")
    try:
        with open(file, encoding="utf-8") as stream:
            manifest = json.load(stream)
        sizes = manifest["files"]
        if manifest["format"] != FORMAT:
            raise UserError(f"{file}: has format {manifest['format']}, expected {FORMAT}; prepare the set again")
        _ = manifest["source"], manifest["splits"], manifest["class_names"]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{file}: is damaged; remove {path} and {again}") from None
    for name, size in sizes.items():
        found = records.size_of(os.path.join(path, name))
        if found != size:
            what = "is missing" if found is None else f"has {found} bytes"
            raise UserError(f"{os.path.join(path, name)}: {what}, expected {size} bytes; remove {path} and {again}")
    return manifest


def load_prepared(name, path, split, validation, seed):
    command = f"python tools/prepare_dataset.py {name if name != 'tfds' else 'NAME'} --output DIR"
    if not path:
        raise UserError(f"data.name={name} needs data.path, a prepared folder; make it with: {command}")
    manifest = read_manifest(path)
    row = protocols.task(manifest["name"] if name == "tfds" else name)
    if row.source != manifest["source"]:
        raise UserError(f"{path}: holds {manifest['source']}, but {name} is {row.source}; make it with: {command}")
    with np.load(os.path.join(path, INDEX), allow_pickle=False) as index:
        parts = {part: _Part(path, part, index, row) for part in manifest["splits"]}
    parts = {key: [(parts[part], first, last) for part, first, last in found] for key, found in row.parts.items()}
    class_names = tuple(manifest["class_names"][row.label])
    if "all" in parts:
        chosen = _join(parts["all"])
        indices = sources.split_indices(_labels(chosen), split, validation, seed, row.test, stratified=False)
    else:
        if row.few and validation == 0 and split != "test":
            # The choice has been made: all 1000 train, nothing is left to choose by.
            chosen = _join(parts["train"] + parts["validation"]) if split == "train" else None
            indices = None if chosen is None else np.arange(len(chosen))
        elif split in parts and (split != "train" or "validation" in parts):
            chosen = _join(parts[split])
            indices = np.arange(len(chosen))
        elif split == "test":
            return None
        else:
            chosen = _join(parts["train"])
            indices = sources.split_indices(_labels(chosen), split, validation, seed, stratified=False)
    if indices is None:
        return None
    chosen = [chosen[index] for index in indices]
    return sources.Source(
        name=name,
        split=split,
        labels=_labels(chosen),
        class_names=class_names,
        ids=tuple(f"{part.name}/{place}" for part, place in chosen),
        files=tuple(records.Packed(part.records, place) for part, place in chosen),
        sizes=np.stack([part.sizes[place] for part, place in chosen]) if chosen else np.zeros((0, 3), np.int32),
        task=row.describe(),
    )


class _Part:
    """One split of the source: its labels by the row's rule, its sizes, its records."""

    def __init__(self, path, name, index, row):
        self.name = name
        self.labels = index[f"{name}/labels/{row.label}"]
        self.sizes = index[f"{name}/sizes"]
        self.records = records.RecordSplit(os.path.join(path, DATA), name, index[f"{name}/bytes"], row.scale)


def _join(parts):
    """[(part, place), ...] of slices of parts."""
    return [(part, place) for part, first, last in parts for place in range(len(part.labels))[first:last]]


def _labels(chosen):
    return np.asarray([part.labels[place] for part, place in chosen], np.int32)
