"""Sets of equally large images as arrays: the readers behind digits, fashion_mnist, idx and npz.

In: (name, path, split, validation share, split seed), as `sources.load` checked them. Out: a Source with `images`, or
None where the set has no such split. Every file is checked before it is believed; nothing in an npz is ever run.
"""

from __future__ import annotations

import gzip
import os
import zipfile
import zlib

import numpy as np

from vitplast_jax.data import sources
from vitplast_jax.errors import UserError

FASHION_MNIST_PATH = "/usr/share/datasets/fashion-mnist"
FASHION_MNIST_CLASSES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)


def _array_source(name, split, parts, class_names, validation, seed):
    """A Source of one split of `parts`: {"train" | "validation" | "test" | "all": (images, labels, where)}.

    A split the data brings is taken whole; else it is a part of train, or of all.
    """
    base = "all" if "all" in parts and "train" not in parts else "train"
    whole = split in parts and split != base
    part = split if whole else base
    images, labels, where = parts[part]
    if labels.size and not 0 <= labels.min() <= labels.max() < len(class_names):
        bad = labels.min() if labels.min() < 0 else labels.max()
        raise UserError(f"{where}: label {bad} is out of range, expected 0 to {len(class_names) - 1}")
    source = sources.Source(
        name=name,
        split=split,
        labels=labels.astype(np.int32),
        class_names=tuple(class_names),
        ids=tuple(f"{part}/{i}" for i in range(len(labels))),
        images=images,
    )
    if whole:
        return source
    test = sources.TEST_SHARE if base == "all" and "test" not in parts else 0.0
    validation = 0.0 if "validation" in parts else validation
    indices = sources.split_indices(source.labels, split, validation, seed, test)
    return None if indices is None else source.take(indices)


def load_digits(name, path, split, validation, seed):
    if path:
        raise UserError(f"data.path is {path!r}, but digits come with scikit-learn and need none; leave it empty")
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError("the digits need scikit-learn: pip install scikit-learn") from None
    bunch = load_digits()
    images = np.round(bunch.images * (255 / 16)).astype(np.uint8)[..., None]
    parts = {"all": (images, bunch.target, "scikit-learn's digits")}
    return _array_source(name, split, parts, [str(i) for i in range(10)], validation, seed)


def load_idx(name, path, split, validation, seed):
    fashion = name == "fashion_mnist"
    folder = path or (FASHION_MNIST_PATH if fashion else None)
    if folder is None:
        raise UserError("data.name=idx needs data.path: a folder with train-images-idx3-ubyte[.gz] and its three mates")
    hint = "data.path must be a folder with {train,t10k}-{images-idx3,labels-idx1}-ubyte[.gz]"
    if fashion:
        hint = f"install Debian's package dataset-fashion-mnist, or {hint}"
    if not os.path.isdir(folder):
        raise UserError(f"{folder}: no such folder; {hint}")

    def read(stem, kind, rank):
        plain = os.path.join(folder, f"{stem}-{kind}-ubyte")
        found = next((file for file in (plain, f"{plain}.gz") if os.path.isfile(file)), None)
        if found is None:
            raise UserError(f"{plain}[.gz]: no such file; {hint}")
        return read_idx(found, rank)

    stem = "t10k" if split == "test" else "train"
    images, labels = read(stem, "images-idx3", 3), read(stem, "labels-idx1", 1)
    where = os.path.join(folder, f"{stem}-labels-idx1-ubyte")
    if len(images) != len(labels):
        raise UserError(f"{where}: {len(labels)} labels for {len(images)} images")
    names = FASHION_MNIST_CLASSES
    if not fashion:  # the classes are those of the training labels, whatever the split
        known = labels if stem == "train" else read("train", "labels-idx1", 1)
        names = [str(i) for i in range(max(10, int(known.max(initial=0)) + 1))]
    parts = {"test" if split == "test" else "train": (images[..., None], labels, where)}
    return _array_source(name, split, parts, names, validation, seed)


def read_idx(path: str, rank: int) -> np.ndarray:
    """Reads an idx file of uint8 (plain or .gz) with `rank` axes; checks magic number and size."""
    try:
        with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
            data = file.read()
    except (OSError, EOFError, zlib.error) as error:  # gzip's truncated or damaged files are all of these
        raise UserError(f"{path}: cannot be read as {'gzip' if path.endswith('.gz') else 'a file'}: {error}") from None
    expected = bytes((0, 0, 8, rank))
    if data[:4] != expected:
        raise UserError(f"{path}: starts with {data[:4].hex()}, expected {expected.hex()}: an idx file of {rank} axes")
    start = 4 + 4 * rank
    if len(data) < start:
        raise UserError(f"{path}: ends inside its header ({len(data)} bytes)")
    shape = tuple(int(size) for size in np.frombuffer(data[4:start], ">u4"))
    size = int(np.prod(shape, dtype=np.int64))
    if len(data) - start != size:
        raise UserError(f"{path}: holds {len(data) - start} bytes, its header says {shape} = {size}; truncated?")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


# The names an npz may use for (images, labels) of each split; "all" is split by seed.
_NPZ_KEYS = {
    "train": (("x_train", "y_train"), ("train_images", "train_labels")),
    "validation": (("x_val", "y_val"), ("val_images", "val_labels"), ("validation_images", "validation_labels")),
    "test": (("x_test", "y_test"), ("test_images", "test_labels")),
    "all": (("images", "labels"), ("x", "y")),
}
_NPZ_HELP = "x_train, y_train, x_test, y_test (or train_images, train_labels, ..., or images, labels)"


def load_npz(name, path, split, validation, seed):
    if not path:
        raise UserError(
            f"data.name=npz needs data.path: a file, or a folder of train.npz and test.npz, with {_NPZ_HELP}"
        )
    parts = _read_npz_folder(path) if os.path.isdir(path) else _npz_parts(_read_npz(path), path)
    class_names = parts.pop("class_names", None)
    if class_names is None:
        highest = max(int(labels.max(initial=0)) for _, labels, _ in parts.values())
        if highest >= max(1000, sum(len(labels) for _, labels, _ in parts.values())):
            raise UserError(
                f"{path}: the highest label is {highest}, more than there are images; expected 0, 1, 2, ..."
            )
        class_names = [str(i) for i in range(highest + 1)]
    if "train" not in parts and "all" not in parts:
        raise UserError(f"{path}: has no training examples; expected the arrays {_NPZ_HELP}")
    return _array_source(name, split, parts, class_names, validation, seed)


def _read_npz(path):
    if not os.path.isfile(path):
        raise UserError(f"{path}: no such file (data.path)")
    if not zipfile.is_zipfile(path):
        raise UserError(f"{path}: is no npz file, or a truncated one; expected the arrays {_NPZ_HELP}")
    try:
        with np.load(path, allow_pickle=False) as data:  # a pickle could run code
            return {key: data[key] for key in data.files}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        reason = "holds pickled objects, which are never run" if "allow_pickle" in str(error) else str(error)
        raise UserError(f"{path}: cannot be read as npz: {reason}") from None


def _read_npz_folder(path):
    parts = {}
    for split, stems in {"train": ["train"], "validation": ["validation", "val", "valid"], "test": ["test"]}.items():
        for file in (os.path.join(path, f"{stem}.npz") for stem in stems):
            if not os.path.isfile(file):
                continue
            found = _npz_parts(_read_npz(file), file)
            if split not in found and "all" not in found:
                raise UserError(f"{file}: has no arrays images and labels")
            images, labels, where = found.get(split) or found["all"]
            names = found.get("class_names")
            if split == "train":
                parts["class_names"] = names
            elif names != parts.get("class_names"):
                labels = _labels_by_name(labels, names, parts.get("class_names"), file)
            parts[split] = (images, labels, where)
    if "train" not in parts:
        raise UserError(f"{os.path.join(path, 'train.npz')}: no such file; data.path must hold it or be an npz file")
    return parts


def _labels_by_name(labels, names, known, file):
    """Labels that count in the order of `names`, in the order of `known`."""
    if names is None or known is None:
        raise UserError(f"{file}: train.npz and this file must both name their classes (class_names), or neither")
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"{file}: unknown class {', '.join(unknown[:5])}; train.npz has {', '.join(known[:5])}")
    if labels.max(initial=0) >= len(names):
        raise UserError(f"{file}: label {labels.max()} has no name among its {len(names)} class_names")
    return np.asarray([known.index(name) for name in names], labels.dtype)[labels]


def _npz_parts(arrays, path):
    """{split: (images, labels, where)} and maybe "class_names", all checked."""
    parts = {}
    for split, pairs in _NPZ_KEYS.items():
        for image_key, label_key in pairs:
            if image_key in arrays or label_key in arrays:
                missing = next((key for key in (image_key, label_key) if key not in arrays), None)
                if missing:
                    raise UserError(f"{path}: has no array {missing}, expected {image_key} and {label_key}")
                images = _check_images(arrays[image_key], f"{path}: {image_key}")
                labels = _check_labels(arrays[label_key], len(images), f"{path}: {label_key}")
                parts[split] = (images, labels, f"{path}: {label_key}")
                break
    if not parts:
        raise UserError(f"{path}: has the arrays {', '.join(sorted(arrays)) or 'none'}; expected {_NPZ_HELP}")
    if "class_names" in arrays:
        names = [name.decode() if isinstance(name, bytes) else str(name) for name in arrays["class_names"].ravel()]
        if len(set(names)) < len(names):
            raise UserError(f"{path}: class_names holds the same name twice")
        parts["class_names"] = names
    return parts


def _check_images(images, where):
    if images.dtype != np.uint8:
        raise UserError(f"{where} is {images.dtype}, expected uint8 with values 0 to 255")
    if images.ndim == 4 and images.shape[1] in (1, 3) and images.shape[3] not in (1, 3):
        raise UserError(
            f"{where} has shape {images.shape}, channels first; expected [n, h, w, c]: transpose(0, 2, 3, 1)"
        )
    if images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[3] not in (1, 3)) or 0 in images.shape[1:]:
        raise UserError(f"{where} has shape {images.shape}, expected [n, h, w] or [n, h, w, c] with c 1 or 3")
    return images if images.ndim == 4 else images[..., None]


def _check_labels(labels, count, where):
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise UserError(f"{where} is {labels.dtype} of shape {labels.shape}, expected integers of shape [n]")
    if len(labels) != count:
        raise UserError(f"{where} has {len(labels)} labels for {count} images")
    return labels
