"""In which order do examples come, and in which batches? Iterators over a Source for training and evaluation.

In: a Source, the global batch size, the seed and the step to start from. Out: dicts of numpy arrays, one process's
contiguous rows of each global batch. The order is a function of (seed, step) alone (decision 7): Grain's shuffled,
repeated index data set is random access, so nothing has to be saved to resume, and neither threads nor processes change
a number. Batches run across the ends of epochs; every epoch has its own permutation.

Fixed-size sets leave as the uint8 images they are. Of ragged sets the host decodes a file, crops the box that the
example's key draws, and resizes it; the device does the rest with the same key.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import functools
import itertools

import jax
import numpy as np

from vitplast_jax.data import decode, memory, preprocess
from vitplast_jax.errors import UserError

PREFETCH = 2  # batches made ahead: one being copied, one being made


def example_order(count: int, seed: int):
    """The endless order of examples: `[i]` -> index of the i-th example that training sees."""
    import grain

    return grain.MapDataset.range(count).seed(seed).shuffle().repeat()


def train_batches(
    source,
    batch_size: int,
    seed: int,
    start: int = 0,
    size: tuple[int, int] | None = None,
    augmentation: preprocess.Augmentation | None = None,
    process_index: int = 0,
    process_count: int = 1,
    threads: int = 2,
):
    """Endless batches from step `start` on: {"image" uint8 [b, h, w, c], "label" int32 [b], "index" int32 [b]}.

    Args:
      source: a Source.
      batch_size: of the global batch; may exceed the number of examples.
      seed: of the order and of the crops.
      size: (h, w) that images of ragged sets get; unused for fixed-size sets.
      augmentation: its crop is made here for ragged sets (give the device `augmentation.after_host()`); without a crop
        they are squashed to `size`. Unused for fixed-size sets.
      process_index, process_count: this process yields rows [index * b, (index + 1) * b) of the global batch.
      threads: that decode at a time, for ragged sets.
    """
    places = _process_places(batch_size, process_index, process_count)
    order = example_order(len(source), seed)
    augmentation = augmentation or preprocess.Augmentation()

    def image(indices, step, pool):
        if source.images is not None:
            return source.read(indices, pool)
        draws = itertools.repeat(None)
        if augmentation.crop_scale is not None or augmentation.window:
            draws = _draw_crops(seed, step, places)
        crop = functools.partial(_decode_cropped, source, size=size, augmentation=augmentation)
        return np.stack(list(pool.map(crop, indices.tolist(), draws)))

    def make(step, pool):
        indices = np.fromiter((order[step * batch_size + place] for place in places.tolist()), np.int32, len(places))
        return {"image": image(indices, step, pool), "label": source.labels[indices], "index": indices}

    return _prefetch(make, itertools.count(start), threads)


def evaluation_batches(
    source,
    batch_size: int,
    size: tuple[int, int] | None = None,
    preprocessing=None,
    process_index: int = 0,
    process_count: int = 1,
    threads: int = 2,
):
    """Every example once, in order, in batches of one shape: {"image", "label", "mask" bool [b], "index"}.

    The last batch is filled up with copies of example 0 whose mask is False: whoever sums must divide by the sum of the
    mask. Of ragged sets the host does the whole resize (`size`, `preprocessing`), so that the device has nothing to.
    """
    places = _process_places(batch_size, process_index, process_count)

    def image(indices, mask, pool):
        if source.images is not None:
            return source.read(indices, pool)
        resize = functools.partial(_decode_for_evaluation, source, size=size, preprocessing=preprocessing)
        images = list(pool.map(resize, indices[mask].tolist()))
        images += [np.zeros((*size, 3), np.uint8)] * (len(indices) - len(images))
        return np.stack(images)

    def make(step, pool):
        indices = (step * batch_size + places).astype(np.int32)
        mask = indices < len(source)
        indices = np.where(mask, indices, 0).astype(np.int32)
        return {"image": image(indices, mask, pool), "label": source.labels[indices], "mask": mask, "index": indices}

    return _prefetch(make, range(-(-len(source) // batch_size)), threads)


def _decode_cropped(source, index, draws, size, augmentation):
    if source.sizes is not None and not augmentation.window:  # looked at before: the box is known before decoding
        height, width = source.sizes[index, :2].tolist()
        box = _box(draws, height, width, augmentation)
        image = memory.open_example(source, index, decode.shrinking(box, size))
        if (image.height, image.width) != (height, width):  # to whole pixels: at most a quarter of an output pixel
            scale = np.asarray([image.height / height, image.width / width] * 2)
            corners = np.round(np.asarray([box[0], box[1], box[0] + box[2], box[1] + box[3]]) * scale).astype(int)
            box = (*corners[:2], *(corners[2:] - corners[:2]))
        return decode.crop_and_resize(image, box, size, augmentation.interpolation)
    image = memory.open_example(source, index)
    if augmentation.window:
        resized = preprocess.covering(image.height, image.width, size, augmentation.window)
        place = preprocess.window_offsets(draws[None], resized, size)[0]
        return decode.resize_and_cut(image, resized, place, size, augmentation.interpolation)
    box = _box(draws, image.height, image.width, augmentation)
    return decode.crop_and_resize(image, box, size, augmentation.interpolation)


def _box(draws, height, width, augmentation):
    """(top, left, height, width) that an example's draws cut out of an image, all of it without a crop."""
    if augmentation.crop_scale is None:
        return 0, 0, height, width
    return preprocess.crop_boxes(draws[None], height, width, augmentation.crop_scale, augmentation.crop_ratio)[0]


def _decode_for_evaluation(source, index, size, preprocessing):
    return decode.host_resize_for_evaluation(memory.open_example(source, index), size, preprocessing)


def _draw_crops(seed, step, places):
    """The uniforms [b, 10, 4] that the device would draw for these examples, as numpy, without using the device."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(
            RuntimeError
        ):  # JAX_PLATFORMS may leave the CPU out; every backend draws the same bits
            stack.enter_context(jax.default_device(jax.local_devices(backend="cpu")[0]))
        return np.asarray(_crop_uniforms(np.uint32(seed), step, places))  # seeds go up to 2**32 - 1


@jax.jit
def _crop_uniforms(seed, step, places):
    return preprocess.crop_uniforms(preprocess.example_keys(seed, step, places))


def _process_places(batch_size, index, count):
    """The places in the global batch that are this process's, int32, contiguous."""
    if batch_size < 1:
        raise UserError(f"batch_size is {batch_size}, expected at least 1")
    if batch_size % count:
        raise UserError(f"batch_size {batch_size} cannot be shared equally by {count} processes; make it a multiple")
    share = batch_size // count
    return np.arange(index * share, (index + 1) * share, dtype=np.int32)


def _prefetch(make, steps, threads):
    """Yields make(step, pool) for each of `steps`, made ahead in one thread that may use `pool` of `threads`.

    An error is raised here, in its turn. Closing the generator (or dropping it) stops the threads.
    """
    with (
        concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="decode") as pool,
        concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="batches") as maker,
    ):
        ahead = collections.deque()
        try:
            for step in steps:
                ahead.append(maker.submit(make, step, pool))
                if len(ahead) > PREFETCH:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:  # the caller stopped, or an image failed: what has not begun must not begin
            for future in ahead:
                future.cancel()
