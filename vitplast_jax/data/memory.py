"""Which decoded images stay in memory? Small images of one size as an array, others one by one, where they fit.

In: a Source of files that were looked at (`decode.check`) and a budget in bytes. Out: the same examples. Images of one
size of at most SMALL pixels become `Decoded`, which stands where an array of images stands: they travel as they are
and the device crops them, whatever the budget, so that the budget changes no number. It decides what is kept.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from PIL import Image

from vitplast_jax.data import decode

SMALL = 128 * 128


class Decoded:
    """Images uint8 [n, h, w, c] of files, decoded when first asked for; kept from then on if `keep`."""

    dtype = np.dtype(np.uint8)

    def __init__(self, files, shape: tuple[int, int, int], keep: bool):
        self.files, self.shape = tuple(files), (len(files), *map(int, shape))
        self._pixels = np.empty(self.shape, np.uint8) if keep else None  # pages are taken when written
        self._known = np.zeros(len(self.files), bool)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, indices) -> np.ndarray:
        return self.read(np.arange(len(self))[indices])

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.asarray(self.read(np.arange(len(self))), dtype)

    def read(self, indices, pool=None) -> np.ndarray:
        """The images at `indices`, decoded by the threads of `pool` where they are not kept."""
        chosen = np.atleast_1d(indices)
        wanted = chosen if self._pixels is None else np.unique(chosen[~self._known[chosen]])
        images = (pool.map if pool else map)(self._decode, wanted.tolist())
        if self._pixels is None:
            out = np.stack([*images]) if len(wanted) else np.empty((0, *self.shape[1:]), np.uint8)
        else:
            for index, image in zip(wanted, images, strict=True):
                self._pixels[index] = image
                self._known[index] = True
            out = self._pixels[chosen]
        return out if np.ndim(indices) else out[0]

    def take(self, indices) -> Decoded:
        """Some of the images, as a set of their own."""
        return Decoded([self.files[i] for i in indices], self.shape[1:], self._pixels is not None)

    def _decode(self, index: int) -> np.ndarray:
        image = decode.decode_file(self.files[index], index)
        if image.shape[:2] != self.shape[1:3]:
            raise ValueError(f"{self.files[index]} has changed since the start: {image.shape}, not {self.shape[1:]}")
        return image[..., : self.shape[3]]


def keep(source, budget: float):
    """The source with what it holds in memory decided; see the module.

    Args:
      source: a Source; one of arrays, or None, is returned as it is.
      budget: bytes of decoded images that one split may keep; 0 keeps none.
    """
    if source is None or source.files is None or source.sizes is None or not len(source):
        return source
    sizes = source.sizes.astype(np.int64)
    total = int(sizes.prod(1).sum())
    height, width, channels = sizes.max(0).tolist()
    if (sizes[:, :2] == (height, width)).all() and height * width <= SMALL:
        images = Decoded(source.files, (height, width, channels), total <= budget)
        return dataclasses.replace(source, images=images, files=None)
    total = int(sizes[:, :2].prod(1).sum()) * 3  # kept as RGB
    return dataclasses.replace(source, kept={}) if total <= budget else source


def open_example(source, index: int, shrink: int = 1) -> Image.Image:
    """An example of a ragged source as a Pillow image, from memory if it is kept there.

    One that may be decoded smaller always is, so that memory changes no number.
    """
    if shrink > 1:
        return decode.open_image(source.files[index], index, shrink)
    if source.kept is None:
        return decode.open_image(source.files[index], index)
    if index not in source.kept:
        source.kept[index] = decode.decode_file(source.files[index], index)
    return Image.fromarray(source.kept[index])
