"""Which images are compared with which, and how do they reach the model?

In: the two sides' data (Sources or arrays) and the protocol. Out: indices of the pairs, and batches for the embedding.

  ours       images drawn without replacement in an order of `seed`, normalised as the weights expect
  reference  as the paper's code: in the order of the files, used again when too few, ImageNet statistics
Of a language model the images are sequences of words, [n, t] whole numbers.

Which pairs (`distribution`); the paper has the first and names it as a limit:
  tasks         an image of the pretraining data with one of the downstream data
  downstream    two images of the downstream data, from its two halves
  class         two images of one class of the downstream data; matched pairs only
  perturbation  an image of the downstream data with itself plus a perturbation of norm `radius`; matched pairs only
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from vitplast_jax.data import pipeline, preprocess, sources
from vitplast_jax.errors import UserError
from vitplast_jax.models.specs import IMAGENET, GPT2Spec, Preprocessing

PROTOCOLS = ("ours", "reference")
PAIRINGS = ("matched", "all")
DISTRIBUTIONS = ("tasks", "downstream", "class", "perturbation")

REFERENCE_PREPROCESSING = Preprocessing(*IMAGENET, interpolation="bilinear", crop_pct=1.0, resize="shorter")


def choose_pairs(
    n_x: int,
    n_y: int,
    *,
    protocol: str,
    pairing: str,
    pairs: int,
    images: int,
    batch_size: int,
    seed: int,
    distribution: str = "tasks",
    labels: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the images of both sides that are compared, (x, y); at most `images` of each side (0: all).

    matched: x[i] with y[i], as many as the smaller set has, at most `pairs` (0: no limit). Under `reference` a larger
    number of pairs uses images again, as the paper's loader does (which drops the incomplete last batch).
    all: every x with every y; the numbers of images are as equal as the sets allow, their product at most `pairs`.
    Where both sides are the downstream data (`distribution`), both results are indices of its `n_y` images, of which
    `labels` are the classes.
    """
    if distribution != "tasks":
        return _choose_downstream(n_y, distribution, labels, pairing, protocol, pairs, images, seed)
    if pairing == "all":
        take_x, take_y = _share(*(min(n, images or n) for n in (n_x, n_y)), pairs)
    else:
        most_x, most_y = (min(n, images or n) for n in (n_x, n_y))
        take_x = take_y = min(most_x, most_y, pairs or most_x)
        if protocol == "reference" and pairs > take_x:
            whole = ((n - n % batch_size) or n for n in (most_x, most_y))
            return tuple(np.arange(pairs) % n for n in whole)
    if min(take_x, take_y) < 2:
        raise _too_few(f"{n_x} and {n_y}", pairs)
    if protocol == "reference":
        return np.arange(take_x), np.arange(take_y)
    # one stream for each side: the same set given twice must not pair every image with itself
    orders = (np.random.default_rng([seed, side]).permutation(n) for side, n in enumerate((n_x, n_y)))
    return tuple(np.sort(o[:k]) if pairing == "all" else o[:k] for o, k in zip(orders, (take_x, take_y), strict=True))


def _choose_downstream(n, distribution, labels, pairing, protocol, pairs, images, seed):
    """Pairs of images of one set that share no image, so that they are independent (class: given the class)."""
    if protocol != "ours":
        raise UserError(f"distribution {distribution!r} is not the paper's; set measure.protocol=ours")
    if distribution != "downstream" and pairing != "matched":
        raise UserError(f"distribution {distribution!r} has matched pairs only; set measure.pairing=matched")
    order = np.random.default_rng([seed, 2]).permutation(n)
    most = images or n
    if distribution == "perturbation":
        x = y = order[: min(most, pairs or n)]
    elif distribution == "class":
        if labels is None:
            raise UserError("distribution 'class' needs the labels of the downstream images; give a Source")
        members = [order[labels[order] == label] for label in np.unique(labels)]
        twos = np.concatenate([m[: len(m) // 2 * 2].reshape(-1, 2) for m in members])
        twos = np.random.default_rng([seed, 3]).permutation(twos)[: min(most, pairs or n)]
        x, y = twos[:, 0], twos[:, 1]
    else:
        x, y = order[: n // 2], order[n // 2 :]
        most_x, most_y = min(len(x), most), min(len(y), most)
        if pairing == "all":
            most_x, most_y = _share(most_x, most_y, pairs)
        else:
            most_x = most_y = min(most_x, most_y, pairs or n)
        x, y = x[:most_x], y[:most_y]
    if min(len(x), len(y)) < 2:
        raise _too_few(f"{len(x)} and {len(y)} of {n}", pairs)
    return x, y


def _share(most_x: int, most_y: int, pairs: int) -> tuple[int, int]:
    """How many images of each side give at most `pairs` (0: any number of) pairs, the numbers as equal as can be."""
    limit = pairs or most_x * most_y
    take_x = min(most_x, max(math.isqrt(limit), limit // most_y))
    return take_x, min(most_y, limit // max(take_x, 1))


def _too_few(found: str, pairs: int) -> UserError:
    asked = f" with {pairs} pairs" if pairs else ""
    return UserError(f"plasticity needs at least 2 images of each side, not {found}{asked}")


@dataclasses.dataclass(frozen=True)
class Prepare:
    """What the device does to a batch before the embedding; hashable, so that equal ones share a compiled function.

    resize: uint8 of the data's size is resized first. normalise: 0..255 is normalised. Neither: fed as it is.
    radius: Frobenius norm of a random perturbation of each image as it is fed, a function of (seed, place); 0: none.
    """

    resize: bool
    normalise: bool
    size: tuple[int, int]
    channels: int
    preprocessing: Preprocessing | None
    radius: float = 0.0
    seed: int = 0

    def __call__(self, images: jax.Array, places: jax.Array) -> jax.Array:
        """Images [b, h, w, c] and their places [b] in the data -> what the model is fed."""
        if self.resize:
            images = preprocess.resize_for_evaluation(images, self.size, self.preprocessing)
        if self.normalise:
            images = preprocess.normalise(images, self.preprocessing)
        else:
            images = jnp.broadcast_to(images.astype(jnp.float32), (*images.shape[:-1], self.channels))
        if not self.radius:
            return images
        key = jax.random.key(self.seed)
        noise = jax.vmap(lambda place: jax.random.normal(jax.random.fold_in(key, place), images.shape[1:]))(places)
        return images + noise * (self.radius / jnp.sqrt(jnp.square(noise).sum((1, 2, 3), keepdims=True)))


@dataclasses.dataclass(frozen=True)
class Words:
    """As :class:`Prepare`, for the words of a language model: nothing is done to them."""

    preprocessing: None = None

    def __call__(self, words: jax.Array, places: jax.Array) -> jax.Array:
        return words


@dataclasses.dataclass(frozen=True)
class Images:
    """One side's images: `read(places)` gives a batch on the host, `prepare(batch)` what the model is fed."""

    count: int
    read: Callable[[np.ndarray], np.ndarray]
    prepare: Prepare | Words
    labels: np.ndarray | None = None
    fingerprint: Callable[[], str] = lambda: ""
    words: int | None = None  # in a sequence, of a language model

    def perturbed(self, radius: float, seed: int) -> "Images":
        """The same images, each with a random perturbation of norm `radius`."""
        return dataclasses.replace(self, prepare=dataclasses.replace(self.prepare, radius=float(radius), seed=seed))


def open_words(data, spec, side: str) -> Images:
    """Sequences of words, whole numbers [n, t], of a language model."""
    data = np.asarray(data)
    if data.ndim != 2 or not np.issubdtype(data.dtype, np.integer) or not 1 < data.shape[1] <= spec.context:
        raise UserError(
            f"{spec.name} takes whole numbers [n, t], t from 2 to {spec.context}, on side {side}, "
            f"not {data.dtype} {data.shape}"
        )
    if data.min(initial=0) < 0 or data.max(initial=0) >= spec.vocabulary:
        raise UserError(f"side {side} has words from {data.min()} to {data.max()}; {spec.name} has {spec.vocabulary}")
    data = data.astype(np.int32)
    return Images(len(data), lambda places: data[places], Words(), None, lambda: _hash(data), data.shape[1])


def open_images(data, spec, preprocessing: Preprocessing | None, side: str) -> Images:
    """Images of a Source, of uint8 [n, h, w(, c)] (resized and normalised here) or of floats (fed as they are); of a
    language model sequences of words."""
    if isinstance(spec, GPT2Spec):
        return open_words(data, spec, side)
    size = spec.img_size
    prepare = Prepare(True, True, size, spec.in_chans, preprocessing)
    labels = None
    if isinstance(data, sources.Source):
        source, labels = data, data.labels
        if data.images is None:
            _need_statistics(preprocessing, spec)

            def read(places):
                chosen = source.take(places)
                batches = pipeline.evaluation_batches(chosen, len(places), size=size, preprocessing=preprocessing)
                return next(iter(batches))["image"]

            return Images(
                len(data), read, dataclasses.replace(prepare, resize=False), labels, lambda: source.fingerprint
            )
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
    return Images(len(data), lambda places: data[places], prepare, labels, lambda: _hash(data))


def _hash(images: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(images)).hexdigest()


def _need_statistics(preprocessing, spec):
    if preprocessing is None:
        raise UserError(
            f"the pixel statistics of {spec.name} are not known; give preprocessing=Preprocessing(mean, std)"
        )
