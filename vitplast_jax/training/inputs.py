"""From sources to what a step is fed: which splits, which batches on which devices, which preprocessing in the step.

In: a checked config, a spec, a mesh. Out: sources, iterators of global arrays, and pure functions, to be compiled into
the step, that turn uint8 images into what the model takes.
"""

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vitplast_jax import models, sharding
from vitplast_jax.data import decode, memory, pipeline, preprocess, sources
from vitplast_jax.errors import UserError


def load_data(config) -> dict[str, Any]:
    """The sources of the three splits; validation and test are None where the data have none."""
    return {split: load_split(config, split) for split in sources.SPLITS}


def load_split(config, split: str):
    """One split of the config's data, or None where there is none."""
    if not config.data.name:
        raise UserError("config.data.name is empty: name the data (digits, folder, npz, vtab/dtd, ...)")
    source = sources.load(
        config.data.name,
        config.data.path or None,
        split,
        validation=config.data.validation,
        split_seed=config.data.split_seed,
    )
    source = decode.check(source, config.data.unreadable, config.data.threads)
    return memory.keep(source, config.data.cache_gb * 1e9)


def with_labels_of(source, class_names: Sequence[str]):
    """The source with its labels mapped, by class name, to the order of ``class_names``.

    Raises:
      UserError: the source has a class that is not among them.
    """
    if tuple(source.class_names) == tuple(class_names):
        return source
    places = {name: label for label, name in enumerate(class_names)}
    if unknown := [name for name in source.class_names if name not in places]:
        raise UserError(
            f"{source.name} ({source.split}) has classes that the model does not know: {', '.join(unknown[:5])}; "
            f"it knows {', '.join(class_names[:5])}{', ...' if len(class_names) > 5 else ''}"
        )
    to = np.asarray([places[name] for name in source.class_names], np.int32)
    return dataclasses.replace(source, labels=to[source.labels], class_names=tuple(class_names))


def augmentation_of(config) -> preprocess.Augmentation:
    """What the config does to training images at random."""
    data = config.data
    crop = tuple(data.crop_scale) or None
    return preprocess.Augmentation(
        crop, tuple(data.crop_ratio), data.shift, data.flip, data.interpolation, data.window, tuple(data.jitter)
    )


def mixing_of(config):
    """Returns ``(images, others, keys) -> (images, shares)`` of mixup and CutMix, or None where neither is asked."""
    if not (config.data.mixup or config.data.cutmix):
        return None
    return functools.partial(preprocess.mix, mixup=config.data.mixup, cutmix=config.data.cutmix)


def class_weights(config, source, num_classes: int):
    """Weights [c] of the loss whose mean over the training examples is 1, or None.

    Balanced: examples / (classes present * examples of the class), as in scikit-learn.
    """
    if config.data.class_weights == "none":
        return None
    counts = np.bincount(source.labels, minlength=num_classes)
    return (len(source) / np.maximum((counts > 0).sum() * counts, 1)).astype(np.float32)


def make_training_preparation(config, spec: models.ViTSpec, source):
    """Returns ``(uint8 images, keys) -> images``: augmentation and normalisation, inside the compiled step."""
    augmentation = augmentation_of(config)
    if source.images is None:
        augmentation = augmentation.after_host()

    def prepare(images, keys):
        images = preprocess.augment(images, keys, spec.img_size, augmentation)
        return preprocess.normalise(images, spec.preprocessing).astype(config.compute_dtype)

    return prepare


def make_evaluation_preparation(spec: models.ViTSpec, compute_dtype: str, ragged: bool):
    """Returns ``uint8 images -> images``: resize, central crop and normalisation, without chance."""

    def prepare(images):
        if not ragged:
            images = preprocess.resize_for_evaluation(images, spec.img_size, spec.preprocessing)
        return preprocess.normalise(images, spec.preprocessing).astype(compute_dtype)

    return prepare


def training_batches(config, source, size, mesh, first: int):
    """Batches on the devices, from step ``first`` on; the next one is on its way there while a step computes."""
    batches = pipeline.train_batches(
        source,
        config.batch_size,
        config.seed,
        start=first,
        size=size,
        augmentation=augmentation_of(config),
        process_index=jax.process_index(),
        process_count=jax.process_count(),
        threads=config.data.threads,
    )
    sent = collections.deque()
    with contextlib.closing(batches):
        for batch in batches:
            sent.append(to_devices({"image": batch["image"], "label": batch["label"]}, mesh))
            if len(sent) > 1:
                yield sent.popleft()


def to_devices(batch: Mapping, mesh) -> dict[str, jax.Array]:
    """One process's rows of a batch become a global array, divided over the mesh."""
    place = sharding.batch(mesh)
    return {name: jax.make_array_from_process_local_data(place, rows) for name, rows in batch.items()}


def run_values(config, mesh) -> dict[str, jax.Array]:
    """What runs may differ in without being compiled anew: ``seed`` uint32 [], ``learning_rate`` float32 []."""
    values = {"seed": np.uint32(config.seed), "learning_rate": np.float32(config.learning_rate)}
    return jax.device_put(values, sharding.replicated(mesh))


def run_value_shapes(mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of :func:`run_values`, for a mesh that may not be there."""
    dtypes = {"seed": jnp.uint32, "learning_rate": jnp.float32}
    return {name: jax.ShapeDtypeStruct((), dtype, sharding=sharding.replicated(mesh)) for name, dtype in dtypes.items()}


def example_batch(batch_size: int, source, size, mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a batch, for compiling before the first one is read."""
    shape = source.images.shape[1:] if source.images is not None else (*size, 3)
    place = sharding.batch(mesh)
    return {
        "image": jax.ShapeDtypeStruct((batch_size, *shape), jnp.uint8, sharding=place),
        "label": jax.ShapeDtypeStruct((batch_size,), jnp.int32, sharding=place),
    }
