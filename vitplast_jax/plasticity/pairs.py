"""Which images are compared with which, and how do they reach the model?

In: the two sides' data (Sources or arrays) and the protocol. Out: indices of the pairs, and batches for the embedding.

  ours       images drawn without replacement in an order of `seed`, normalised as the weights expect
  reference  as the paper's code: in the order of the files, used again when too few, ImageNet statistics
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from vitplast_jax.data import pipeline, preprocess, sources
from vitplast_jax.errors import UserError
from vitplast_jax.models.specs import IMAGENET, Preprocessing

PROTOCOLS = ("ours", "reference")
PAIRINGS = ("matched", "all")

REFERENCE_PREPROCESSING = Preprocessing(*IMAGENET, interpolation="bilinear", crop_pct=1.0, resize="shorter")


def choose_pairs(
    n_x: int, n_y: int, *, protocol: str, pairing: str, pairs: int, images: int, batch_size: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the images of both sides that are compared, (x, y); at most `images` of each side (0: all).

    matched: x[i] with y[i], as many as the smaller set has, at most `pairs` (0: no limit). Under `reference` a larger
    number of pairs uses images again, as the paper's loader does (which drops the incomplete last batch).
    all: every x with every y; the numbers of images are as equal as the sets allow, their product at most `pairs`.
    """
    most_x, most_y = (min(n, images or n) for n in (n_x, n_y))
    if pairing == "all":
        limit = pairs or most_x * most_y
        take_x = min(most_x, max(math.isqrt(limit), limit // most_y))
        take_y = min(most_y, limit // max(take_x, 1))
    else:
        take_x = take_y = min(most_x, most_y, pairs or most_x)
        if protocol == "reference" and pairs > take_x:
            whole = ((n - n % batch_size) or n for n in (most_x, most_y))
            return tuple(np.arange(pairs) % n for n in whole)
    if min(take_x, take_y) < 2:
        asked = f" with {pairs} pairs" if pairs else ""
        raise UserError(f"plasticity needs at least 2 images of each side, not {n_x} and {n_y}{asked}")
    if protocol == "reference":
        return np.arange(take_x), np.arange(take_y)
    # one stream for each side: the same set given twice must not pair every image with itself
    orders = (np.random.default_rng([seed, side]).permutation(n) for side, n in enumerate((n_x, n_y)))
    return tuple(np.sort(o[:k]) if pairing == "all" else o[:k] for o, k in zip(orders, (take_x, take_y), strict=True))


@dataclasses.dataclass(frozen=True)
class Prepare:
    """What the device does to a batch before the embedding; hashable, so that equal ones share a compiled function.

    resize: uint8 of the data's size is resized first. normalise: 0..255 is normalised. Neither: fed as it is.
    """

    resize: bool
    normalise: bool
    size: tuple[int, int]
    channels: int
    preprocessing: Preprocessing | None

    def __call__(self, images: jax.Array) -> jax.Array:
        if self.resize:
            images = preprocess.resize_for_evaluation(images, self.size, self.preprocessing)
        if self.normalise:
            return preprocess.normalise(images, self.preprocessing)
        return jnp.broadcast_to(images.astype(jnp.float32), (*images.shape[:-1], self.channels))


@dataclasses.dataclass(frozen=True)
class Images:
    """One side's images: `read(places)` gives a batch on the host, `prepare(batch)` what the model is fed."""

    count: int
    read: Callable[[np.ndarray], np.ndarray]
    prepare: Prepare


def open_images(data, spec, preprocessing: Preprocessing | None, side: str) -> Images:
    """Images of a Source, of uint8 [n, h, w(, c)] (resized and normalised here) or of floats (fed as they are)."""
    size = spec.img_size
    prepare = Prepare(True, True, size, spec.in_chans, preprocessing)
    if isinstance(data, sources.Source):
        if data.images is None:
            _need_statistics(preprocessing, spec)

            def read(places):
                chosen = data.take(places)
                batches = pipeline.evaluation_batches(chosen, len(places), size=size, preprocessing=preprocessing)
                return next(iter(batches))["image"]

            return Images(len(data), read, dataclasses.replace(prepare, resize=False))
        data = data.images
    data = np.asarray(data)
    if data.ndim == 3:
        data = data[..., None]
    if data.ndim != 4 or data.shape[-1] not in (1, spec.in_chans):
        raise UserError(f"images of side {side} have shape {data.shape}, expected [n, h, w, 1 or {spec.in_chans}]")
    if data.dtype == np.uint8:
        _need_statistics(preprocessing, spec)
    elif not np.issubdtype(data.dtype, np.floating):
        raise UserError(f"images of side {side} are {data.dtype}; give uint8 (0..255) or normalised floats")
    elif data.shape[1:3] != size:
        raise UserError(f"float images of side {side} are fed as they are and must be {size}, not {data.shape[1:3]}")
    else:
        prepare = Prepare(False, False, size, spec.in_chans, None)
    return Images(len(data), lambda places: data[places], prepare)


def _need_statistics(preprocessing, spec):
    if preprocessing is None:
        raise UserError(
            f"the pixel statistics of {spec.name} are not known; give preprocessing=Preprocessing(mean, std)"
        )
