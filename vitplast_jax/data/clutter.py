"""A harder task from real images that every installation has: scikit-learn's digits, turned, among fragments of others.

In: (name, path, split, validation share, split seed), as `sources.load` checked them. Out: a Source of 28 x 28 images
with the examples, labels and splits of `digits`.

Each digit is enlarged about threefold, turned by up to 25 degrees and put near the centre of the canvas; then fragments
of other digits of the same split (so nothing of a test image is seen in training) cover two random places. All draws
are functions of an example's number in the data set and of the split: every run of a grid sees the same images.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from vitplast_jax.data import arrays

SIDE, FRAGMENT, FRAGMENTS = 28, 6, 2
LARGEST_ANGLE, SCALES, LARGEST_SHIFT = np.deg2rad(25), (2.8, 3.4), 2
_SEED = 20260206  # of the draws; another would be another data set


def load(name, path, split, validation, seed):
    source = arrays.load_digits("digits", path, split, validation, seed)
    if source is None:
        return None
    numbers = [int(text.rpartition("/")[2]) for text in source.ids]
    placed = [_place(source.images[i, :, :, 0], number) for i, number in enumerate(numbers)]
    images = np.stack([_clutter(image, placed, number) for image, number in zip(placed, numbers, strict=True)])
    return dataclasses.replace(source, name=name, images=images[..., None])


def _place(digit: np.ndarray, number: int) -> np.ndarray:
    """A digit uint8 [8, 8], turned, enlarged and moved on an empty canvas, uint8 [28, 28]."""
    from scipy import ndimage

    draw = np.random.RandomState([_SEED, number, 0])
    angle, scale = draw.uniform(-LARGEST_ANGLE, LARGEST_ANGLE), draw.uniform(*SCALES)
    shift = draw.uniform(-LARGEST_SHIFT, LARGEST_SHIFT, 2)
    turn = np.asarray([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]) / scale
    centre = (np.asarray(digit.shape) - 1) / 2
    offset = centre - turn @ ((SIDE - 1) / 2 + shift)
    canvas = ndimage.affine_transform(digit.astype(np.float64), turn, offset, (SIDE, SIDE), order=1)
    return np.round(canvas).astype(np.uint8)


def _clutter(image: np.ndarray, others: list[np.ndarray], number: int) -> np.ndarray:
    """The image with fragments of others; where they overlap, the brighter pixel shows."""
    draw, image = np.random.RandomState([_SEED, number, 1]), image.copy()
    for _ in range(FRAGMENTS):
        other = others[draw.randint(len(others))]
        # From the middle of the canvas, where there is something to see, to anywhere.
        row, column = draw.randint(7, SIDE - 7 - FRAGMENT + 1, 2)
        fragment = other[row : row + FRAGMENT, column : column + FRAGMENT]
        row, column = draw.randint(0, SIDE - FRAGMENT + 1, 2)
        place = image[row : row + FRAGMENT, column : column + FRAGMENT]
        np.maximum(place, fragment, out=place)
    return image
