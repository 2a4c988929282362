"""What do the archives hold that TFDS has not, or has in another order? One reader a kind.

In: the file or unpacked folder, and the part of it that a row of `data/protocols.py` names. Out: class names, and an
iterator over (split, encoded image, label) in the order in which the papers' code reads them.
"""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from vitplast_jax.data import decode
from vitplast_jax.errors import UserError

Examples = tuple[list[str], Iterator[tuple[str, bytes, int]]]
CIFAR10_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
A_SEVERITY = 10_000  # images of CIFAR-10-C at each of its five severities, one after the other


def read_cifar10_c(path: Path, part: str) -> Examples:
    """CIFAR-10-C (Hendrycks and Dietterich): CORRUPTION.npy and labels.npy in a folder or tar."""
    corruption, _, severity = part.rpartition("_")
    images, labels = _read_array(path, f"{corruption}.npy"), _read_array(path, "labels.npy")
    if images.shape[1:] != (32, 32, 3) or images.dtype != np.uint8 or not len(images) == len(labels) == 5 * A_SEVERITY:
        raise UserError(
            f"{path}: {corruption}.npy is {images.dtype}{list(images.shape)}, expected uint8[50000, 32, 32, 3]"
        )
    chosen = range((int(severity) - 1) * A_SEVERITY, int(severity) * A_SEVERITY)
    return CIFAR10_CLASSES, (("whole", _png(images[i]), int(labels[i])) for i in chosen)


def _read_array(path, name):
    if path.is_dir():
        return np.load(path / name, mmap_mode="r", allow_pickle=False)
    with tarfile.open(path) as tar:
        member = next((member for member in tar if member.name.rpartition("/")[2] == name), None)
        if member is None:
            raise UserError(f"{path}: has no {name}")
        return np.load(io.BytesIO(tar.extractfile(member).read()), allow_pickle=False)


def _png(pixels):
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG", compress_level=1)
    return stream.getvalue()


def read_domainnet(path: Path, part: str) -> Examples:
    """A domain of DomainNet: CLASS/IMAGE in a folder or zip, in the order of sorted classes and names."""
    if path.is_dir():
        names = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if decode.is_image(file.name))

        def read(name):
            return (path / name).read_bytes()
    else:
        archive = zipfile.ZipFile(path)  # stays open as long as the iterator lives
        names = sorted(name for name in archive.namelist() if decode.is_image(name.rpartition("/")[2]))
        read = archive.read
    classes = sorted({name.split("/")[-2] for name in names if "/" in name})
    label = {name: place for place, name in enumerate(classes)}
    names.sort(key=lambda name: name.split("/")[-2:])
    return classes, (("whole", read(name), label[name.split("/")[-2]]) for name in names)


def read_nabirds(path: Path, part: str) -> Examples:
    """NABirds: the lists of its folder; classes are those that have images, in the order of their numbers."""

    def lines(name):
        with open(path / name, encoding="utf-8") as file:
            return [line.split(maxsplit=1) for line in file.read().splitlines() if line.strip()]

    files, of_train = dict(lines("images.txt")), dict(lines("train_test_split.txt"))
    numbers = dict(lines("image_class_labels.txt"))
    named = {int(number): name for number, name in lines("classes.txt")}
    used = sorted({int(number) for number in numbers.values()})
    label = {number: place for place, number in enumerate(used)}
    # Several classes share a name (sexes and ages of one bird are told apart by number alone).
    names = [f"{named[number]} ({number})" for number in used]
    examples = (
        ("train" if of_train[key] == "1" else "test", (path / "images" / file).read_bytes(), label[int(numbers[key])])
        for key, file in files.items()
    )
    return names, examples


READERS: dict[str, Callable[[Path, str], Examples]] = {
    "cifar10_c": read_cifar10_c,
    "domainnet": read_domainnet,
    "nabirds": read_nabirds,
}
