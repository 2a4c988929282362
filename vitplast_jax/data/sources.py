"""Which examples are there? `load(name, path, split)` -> a Source: images (or files), labels, class names, fingerprint.

In: the name of a kind of source (digits, fashion_mnist, idx, npz, folder, table, parquet, tar, tfds), or of a benchmark
(`data/protocols.py`), and where it lies. Out: one split of it.
Splits depend on `split_seed` alone, never on the seed of a run, so every run of a grid sees the same examples.

How a split is made where the data brings none: numpy's RandomState(split_seed) permutes the examples, the first part
stays, the last `share` is held out, and both lists of indices are sorted (ORACLES A3). Sets of fewer than
`STRATIFY_BELOW` examples, and image folders, are split class by class, so that no class gets lost.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from vitplast_jax import files
from vitplast_jax.data import records
from vitplast_jax.errors import UserError

SPLITS = ("train", "validation", "test")
TEST_SHARE = 0.2  # held out for the test where the data brings no test split
STRATIFY_BELOW = 2000


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """One split. Fixed-size sets have `images`, ragged ones `files`; the other is None."""

    name: str
    split: str
    labels: np.ndarray  # int32 [n]
    class_names: tuple[str, ...]
    ids: tuple[str, ...]  # stable names of the examples, independent of where the data lies
    images: Any = None  # uint8 [n, h, w, c], c 1 or 3: an array, or memory.Decoded
    files: tuple[Any, ...] | None = None  # paths, or records.Packed
    sizes: np.ndarray | None = None  # int32 [n, 3]: height, width, channels of each file; zeros where it is unreadable
    task: Mapping[str, Any] | None = None  # the benchmark's own words for results (protocols.Task.describe)
    kept: dict[int, np.ndarray] | None = None  # decoded images, by index, that stay in memory (memory.py)
    skipped: tuple[str, ...] = ()  # files left out because they cannot be read (policy "skip"), with the reason
    ignored: tuple[str, ...] = ()  # files that are no images by their suffix
    notes: tuple[str, ...] = ()  # what the user should know before a run
    fingerprint: str = dataclasses.field(
        init=False
    )  # sha256 over ids, labels, class names, and image bytes or file sizes

    def __post_init__(self):
        digest = hashlib.sha256()
        for part in (self.ids, self.class_names):
            digest.update(json.dumps(part).encode())
        digest.update(np.ascontiguousarray(self.labels, "<i4").tobytes())
        files = getattr(self.images, "files", self.files)
        if files is not None:  # sizes show that files were encoded anew; their bytes are not read for it
            digest.update(json.dumps([records.size_of(file) for file in files]).encode())
        else:
            digest.update(repr(self.images.shape).encode())
            digest.update(np.ascontiguousarray(self.images))
        object.__setattr__(self, "fingerprint", digest.hexdigest())

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    def read(self, indices, pool=None) -> np.ndarray:
        """The images at `indices`, uint8 [b, h, w, c]; for fixed-size sets only. Threads of `pool` may decode."""
        if self.images is None:
            raise TypeError(f"{self.name} has images of different sizes; read them through the pipeline")
        return self.images[indices] if isinstance(self.images, np.ndarray) else self.images.read(indices, pool)

    def take(self, indices) -> Source:
        """The same split restricted to `indices`, in their order."""
        return dataclasses.replace(
            self,
            labels=self.labels[indices],
            ids=tuple(self.ids[i] for i in indices),
            images=self.images.take(indices) if hasattr(self.images, "files") else _rows(self.images, indices),
            files=None if self.files is None else tuple(self.files[i] for i in indices),
            sizes=_rows(self.sizes, indices),
            kept=None if self.kept is None else {},
        )


def _rows(array, indices):
    return None if array is None else array[indices]


def load(
    name: str, path: str | None = None, split: str = "train", validation: float = 0.2, split_seed: int = 42
) -> Source | None:
    """Loads one split of a source.

    Args:
      name: digits, digits_cluttered, fashion_mnist, idx, npz, folder, table, parquet, tar, tfds, or a benchmark of
        `data/protocols.py`.
      path: where it lies; digits need none, fashion_mnist has a default.
      split: train, validation or test.
      validation: share of the training examples held out as validation where the data brings no such split; 0 for none.
      split_seed: of the permutation behind every split that the data does not bring.

    Returns:
      The split, or None where there is none (validation=0, or a set with its own splits that lacks this one).
    """
    from vitplast_jax.data import arrays, clutter, folder, prepared, protocols, tables  # which import this module

    loaders = {
        "digits": arrays.load_digits,
        "digits_cluttered": clutter.load,
        "fashion_mnist": arrays.load_idx,
        "folder": folder.load_folder,
        "idx": arrays.load_idx,
        "npz": arrays.load_npz,
        "parquet": tables.load_parquet,
        "table": tables.load_table,
        "tar": tables.load_tar,
        "tfds": prepared.load_prepared,
    }
    if name == "text":
        raise UserError("data.name is 'text': texts are only measured, with a language model (configs/gpt2.py)")
    if name not in loaders:
        if name not in protocols.TASKS and "/" not in name:
            near = difflib.get_close_matches(name, protocols.TASKS, 1)
            more = f", or a benchmark such as {near[0] if near else 'cifar10 or vtab/dtd'}"
            raise UserError(f"data.name is {name!r}, expected one of {', '.join(loaders)}{more}")
        loaders[protocols.task(name).name] = prepared.load_prepared
    if path is not None and files.in_bucket(path):
        raise UserError(f"{path}: data are read from a disk; copy them there, or mount the bucket (gcsfuse)")
    if split not in SPLITS:
        raise UserError(f"split is {split!r}, expected one of {', '.join(SPLITS)}")
    if not 0 <= validation < 1:
        raise UserError(f"data.validation is {validation}, expected a share from 0 to below 1")
    source = loaders[name](name, None if path is None else os.fspath(path), split, validation, split_seed)
    if source is not None and not len(source):
        raise UserError(f"the {split} split of {name} ({path or 'built in'}) has no examples")
    return source


def hold_out(labels: np.ndarray, share: float, seed: int, stratified: bool) -> tuple[np.ndarray, np.ndarray]:
    """Splits range(n) into (kept, held out), both sorted; `share` of the examples (of each class) is held out.

    Stratified: every class with at least 2 examples keeps one and gives one.
    """
    order = np.random.RandomState(seed).permutation(len(labels))
    if share == 0:
        return np.sort(order), order[:0]
    if not stratified:
        count = len(labels) - int((1 - share) * len(labels))
        return np.sort(order[: len(labels) - count]), np.sort(order[len(labels) - count :])
    kept, held = [], []
    for label in np.unique(labels):
        members = order[labels[order] == label]
        count = int(round(share * len(members)))
        if len(members) >= 2:
            count = min(max(count, 1), len(members) - 1)
        kept.append(members[: len(members) - count])
        held.append(members[len(members) - count :])
    return np.sort(np.concatenate(kept)), np.sort(np.concatenate(held))


def split_indices(
    labels: np.ndarray, split: str, validation: float, seed: int, test: float = 0.0, stratified: bool | None = None
) -> np.ndarray | None:
    """The sorted indices of one split of n examples: first `test` is held out, then `validation` of the rest."""
    if stratified is None:
        stratified = len(labels) < STRATIFY_BELOW
    rest, tested = hold_out(labels, test, seed, stratified)
    if split == "test":
        return tested if test else None
    kept, validated = hold_out(labels[rest], validation, seed, stratified)
    if split == "train":
        return rest[kept]
    return rest[validated] if validation else None
