"""Which images lie in a folder, and what are their classes? The reader behind `sources.load("folder", path)`.

In: PATH/train/CLASS/*.jpg with PATH/validation (or val, valid) and PATH/test beside it where they exist, or
PATH/CLASS/*.jpg, which is split by seed. Out: a ragged Source: class names sorted by name, files sorted by name.

Classes of validation and test are matched by name with those of train, never by position. Hidden files are passed
over; files without an image's suffix are listed in `source.ignored`. Images may lie in folders below their class.
Links to files and to class folders are followed, wherever they lead (sets are often built of links); links to
folders further down are not, so that no circle is walked.
"""

from __future__ import annotations

import os

import numpy as np

from vitplast_jax.data import sources
from vitplast_jax.data.decode import is_image
from vitplast_jax.errors import UserError

ALIASES = {
    "train": ("train", "training"),
    "validation": ("validation", "val", "valid"),
    "test": ("test", "testing"),
}


def load_folder(name, path, split, validation, seed):
    if not path:
        raise UserError("data.name=folder needs data.path: a folder with train/CLASS/*.jpg or CLASS/*.jpg")
    if not os.path.isdir(path):
        raise UserError(f"{path}: no such folder (data.path)")
    places = {wanted: _place(path, wanted) for wanted in sources.SPLITS}
    if places["train"] is None:
        if places["validation"] or places["test"]:
            raise UserError(f"{path}: has {places['validation'] or places['test']} but no folder 'train' beside it")
        return _by_seed(name, path, split, validation, seed)
    class_names, files, labels, ignored = _scan(path, places["train"])
    if split == "train" or (split == "validation" and places["validation"] is None):
        share = 0.0 if places["validation"] else validation
        indices = sources.split_indices(labels, split, share, seed, stratified=True)
    elif places[split] is None:
        indices = None
    else:
        names, files, local, ignored = _scan(path, places[split])
        unknown = [other for other in names if other not in class_names]
        if unknown:
            raise UserError(
                f"{os.path.join(path, places[split])}: unknown class {_some(unknown)}; train has {_some(class_names)}"
            )
        labels = np.asarray([class_names.index(other) for other in names], np.int32)[local]
        indices = np.arange(len(files))
    return _source(name, path, split, class_names, files, labels, ignored, indices)


def _by_seed(name, path, split, validation, seed):
    class_names, files, labels, ignored = _scan(path, "")
    indices = sources.split_indices(labels, split, validation, seed, sources.TEST_SHARE, stratified=True)
    return _source(name, path, split, class_names, files, labels, ignored, indices)


def _source(name, path, split, class_names, files, labels, ignored, indices):
    if indices is None:
        return None
    return sources.Source(
        name=name,
        split=split,
        labels=labels[indices],
        class_names=class_names,
        ids=tuple(files[i] for i in indices),
        files=tuple(os.path.join(path, *files[i].split("/")) for i in indices),
        ignored=ignored,
        notes=_notes(labels, class_names, indices),
    )


def _notes(labels, class_names, indices):
    absent = sorted(set(range(len(class_names))) - set(labels[indices].tolist()))
    if not absent:
        return ()
    return (f"no example of class {_some([class_names[i] for i in absent])}: too few images to be in every split",)


def _place(path, split):
    """The name of the folder that holds a split, whatever its case, or None."""
    folders = sorted(entry.name for entry in os.scandir(path) if entry.is_dir())
    found = [name for name in folders if name.lower() in ALIASES[split]]
    if len(found) > 1:
        raise UserError(f"{path}: both {found[0]} and {found[1]} exist; keep one as the {split} split")
    return found[0] if found else None


def _scan(path, place):
    """(class names, files relative to `path` with slashes, labels int32, ignored files) of the classes in a folder."""
    root = os.path.join(path, place) if place else path
    folders, loose, ignored = [], [], []
    for entry in sorted(os.scandir(root), key=lambda entry: entry.name):
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            folders.append(entry.name)
        else:
            (loose if is_image(entry.name) else ignored).append("/".join(filter(None, (place, entry.name))))
    if loose:
        raise UserError(
            f"{root}: {len(loose)} images ({loose[0]}, ...) lie beside the class folders; expected CLASS/IMAGE, one "
            "folder a class"
        )
    if not folders:
        raise UserError(f"{root}: no class folders; expected one folder of images a class")
    files, labels = [], []
    for label, folder in enumerate(folders):
        found = []
        for parent, below, names in os.walk(os.path.join(root, folder)):
            below[:] = sorted(name for name in below if not name.startswith("."))
            relative = os.path.relpath(parent, path).replace(os.sep, "/")
            for name in sorted(names):
                if not name.startswith("."):
                    (found if is_image(name) else ignored).append(f"{relative}/{name}")
        if not found:
            raise UserError(
                f"{os.path.join(root, folder)}: class {folder!r} has no images; add some or remove the folder"
            )
        files += found
        labels += [label] * len(found)
    if len(folders) == 1:
        raise UserError(f"{root}: only one class folder, {folders[0]!r}; expected one folder a class, two at least")
    return tuple(folders), files, np.asarray(labels, np.int32), tuple(ignored)


def _some(names):
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
