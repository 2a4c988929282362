"""What happens to a batch of uint8 images before the model sees them? Pure functions, jitted by the caller.

In: uint8 images [b, h, w, c] (c 1 or 3) and one random key an example. Out: float32 [b, H, W, 3], 0..255, then
normalised. Cropping, resizing, flipping and shifting are one linear map a side, applied as two products with small
weight matrices [b, H, h] and [b, W, w]: exact at the border of a crop, where `jax.image.scale_and_translate` would
read beyond it, and cheap where images are small.

Random draws (decision 7): an example's key is key(seed) folded with the step, then with its place in the global batch;
folded again with 0 it draws the crop, with 1 the flip, with 2 the shift, with 3 the colours, with 4 the mixture. The
model's own draws have numbers from `models.layers.FIRST_PLACE` on.

Resampling is that of Pillow and of torch's `antialias=True`: a triangle or a cubic (a = -0.5) widened by the scale
when shrinking, its weights renormalised inside the crop. (torch without antialias has a = -0.75 and is not offered.)
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

CROP_FOLD, FLIP_FOLD, SHIFT_FOLD, COLOUR_FOLD, MIX_FOLD = 0, 1, 2, 3, 4
CROP_TRIES = 10
INTERPOLATIONS = ("bilinear", "bicubic")


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """What training does at random; hashable, so that it can be a static argument.

    crop_scale: range of the share of the area that RandomResizedCrop keeps, or None for no crop.
    crop_ratio: range of width / height of that crop.
    shift: images move by up to this fraction of the side, in whole pixels of the output; black comes in. 0: no shift.
    flip: left and right change places for half of the images.
    interpolation: of the resize, "bilinear" or "bicubic".
    window: the shorter side becomes size / window, and a random window of the output's size is cut out (resize to 256,
      crop 224: 0.875). 0: none.
    jitter: largest relative change of brightness, contrast and saturation, in this order; () for none.
    """

    crop_scale: tuple[float, float] | None = None
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    shift: float = 0.0
    flip: bool = False
    interpolation: str = "bilinear"
    window: float = 0.0
    jitter: tuple[float, ...] = ()

    def after_host(self) -> Augmentation:
        """What the device has left to do when the host has cropped and resized (ragged sets)."""
        return dataclasses.replace(self, crop_scale=None, window=0.0)


def example_keys(seed, step, places) -> jax.Array:
    """Typed keys [b], one an example: key(seed) folded with `step`, then with its place in the global batch."""
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), step)
    return jax.vmap(lambda place: jax.random.fold_in(key, place))(jnp.asarray(places))


def _fold(keys, number):
    return jax.vmap(lambda key: jax.random.fold_in(key, number))(keys)


def crop_uniforms(keys) -> jax.Array:
    """The draws of RandomResizedCrop, float32 [b, 10, 4] in [0, 1): ten tries of (area, log ratio, row, column)."""
    return jax.vmap(lambda key: jax.random.uniform(key, (CROP_TRIES, 4), jnp.float32))(_fold(keys, CROP_FOLD))


def crop_boxes(uniforms, heights, widths, scale, ratio):
    """RandomResizedCrop's boxes as torchvision chooses them; numpy in, numpy out, JAX in, JAX out.

    A try draws the area uniformly and the ratio width / height log-uniformly; the first of ten that fits the image
    wins; if none does, the largest central crop within the range of ratios is taken.

    Args:
      uniforms: float32 [b, tries, 4] in [0, 1), of `crop_uniforms`.
      heights, widths: int, scalars or [b].
      scale, ratio: pairs (low, high).

    Returns:
      int32 [b, 4]: top, left, height, width.
    """
    xp = np if isinstance(uniforms, np.ndarray) else jnp
    f32 = xp.float32
    heights = xp.broadcast_to(xp.asarray(heights, xp.int32), uniforms.shape[:1])[:, None]
    widths = xp.broadcast_to(xp.asarray(widths, xp.int32), uniforms.shape[:1])[:, None]
    low, high = math.log(ratio[0]), math.log(ratio[1])
    area = heights.astype(f32) * widths.astype(f32) * (f32(scale[0]) + uniforms[..., 0] * f32(scale[1] - scale[0]))
    aspect = xp.exp(f32(low) + uniforms[..., 1] * f32(high - low))
    crop_w = xp.round(xp.sqrt(area * aspect)).astype(xp.int32)
    crop_h = xp.round(xp.sqrt(area / aspect)).astype(xp.int32)
    fits = (crop_w > 0) & (crop_w <= widths) & (crop_h > 0) & (crop_h <= heights)
    first = xp.argmax(fits, axis=1)[:, None]

    def chosen(values):
        return xp.take_along_axis(values, first, axis=1)

    crop_h, crop_w, fits = chosen(crop_h), chosen(crop_w), chosen(fits)
    room_h, room_w = heights - crop_h, widths - crop_w
    # a float32 product may round up to room + 1, hence the minimum
    top = xp.minimum((chosen(uniforms[..., 2]) * (room_h + 1).astype(f32)).astype(xp.int32), room_h)
    left = xp.minimum((chosen(uniforms[..., 3]) * (room_w + 1).astype(f32)).astype(xp.int32), room_w)
    image_ratio = widths.astype(f32) / heights.astype(f32)
    whole_h = xp.where(image_ratio < f32(ratio[0]), xp.round(widths.astype(f32) / f32(ratio[0])), heights)
    whole_w = xp.where(image_ratio > f32(ratio[1]), xp.round(heights.astype(f32) * f32(ratio[1])), widths)
    whole_h = xp.minimum(whole_h.astype(xp.int32), heights)
    whole_w = xp.minimum(whole_w.astype(xp.int32), widths)
    drawn = xp.concatenate([top, left, crop_h, crop_w], axis=1)
    central = xp.concatenate([(heights - whole_h) // 2, (widths - whole_w) // 2, whole_h, whole_w], axis=1)
    return xp.where(fits, drawn, central).astype(xp.int32)


def window_offsets(uniforms, resized, size):
    """Where random windows start: int32 [b, 2] rows and columns, of draws [b, tries, 4] of `crop_uniforms`.

    The first try's row and column are used; numpy in, numpy out, JAX in, JAX out.
    """
    xp = np if isinstance(uniforms, np.ndarray) else jnp
    room = xp.asarray([max(have - want, 0) for have, want in zip(resized, size, strict=True)], xp.int32)
    return xp.minimum((uniforms[:, 0, 2:] * (room + 1).astype(xp.float32)).astype(xp.int32), room)


def _kernel(x, interpolation):
    x = jnp.abs(x)
    if interpolation == "bilinear":
        return jnp.maximum(1 - x, 0)
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return jnp.where(x < 1, near, jnp.where(x < 2, far, 0))


def _weights(start, length, resized, places, inputs, interpolation):
    """Rows of the resampling matrix of one side, float32 [b, outputs, inputs].

    The crop [start, start + length) is resized to `resized` pixels, of which those at `places` [b, outputs] are wanted;
    places outside of 0..resized-1 get weights of zero, i.e. black.
    """
    start, length = start.astype(jnp.float32)[:, None], length.astype(jnp.float32)[:, None]
    scale = length / resized
    centre = start + (places.astype(jnp.float32) + 0.5) * scale
    pixel = jnp.arange(inputs, dtype=jnp.float32)
    distance = (pixel + 0.5 - centre[..., None]) / jnp.maximum(scale, 1)[..., None]
    inside = (pixel >= start) & (pixel < start + length)
    weights = jnp.where(inside[:, None, :], _kernel(distance, interpolation), 0)
    wanted = (places >= 0) & (places < resized)
    total = jnp.where(wanted, weights.sum(-1), 1)
    return jnp.where(wanted[..., None], weights / total[..., None], 0)


def crop_resize(images, boxes, size, interpolation, *, resized=None, offset=None, mirror=None) -> jax.Array:
    """Crops `boxes`, resizes them and cuts the output out of that, in one linear map.

    Args:
      images: [b, h, w, c], any real dtype.
      boxes: int [b, 4] or [1, 4]: top, left, height, width, inside the image.
      size: (H, W) of the output.
      interpolation: "bilinear" or "bicubic", antialiased.
      resized: (height, width) that the crop is resized to; default `size`.
      offset: int [b, 2] or [1, 2], rows and columns of the resized crop at which the output starts; what lies outside
        is black. Default 0.
      mirror: bool [b]: exchange left and right of the resized crop first.

    Returns:
      float32 [b, H, W, c]; equals torchvision's resized_crop(antialias=True) on floats, not rounded.
    """
    resized = resized or size
    boxes = jnp.asarray(boxes)
    offset = jnp.zeros((1, 2), jnp.int32) if offset is None else jnp.asarray(offset)
    rows = jnp.arange(size[0]) + offset[:, :1]
    columns = jnp.arange(size[1]) + offset[:, 1:]
    if mirror is not None:
        columns = jnp.where(mirror[:, None], resized[1] - 1 - columns, columns)
    down = _weights(boxes[:, 0], boxes[:, 2], resized[0], rows, images.shape[1], interpolation)
    across = _weights(boxes[:, 1], boxes[:, 3], resized[1], columns, images.shape[2], interpolation)
    batch = images.shape[0]
    down = jnp.broadcast_to(down, (batch, *down.shape[1:]))
    across = jnp.broadcast_to(across, (batch, *across.shape[1:]))
    highest = jax.lax.Precision.HIGHEST  # the default would round pixels to bf16 products on TPU
    x = jnp.einsum("bHh,bhwc->bHwc", down, images.astype(jnp.float32), precision=highest)
    return jnp.einsum("bWw,bHwc->bHWc", across, x, precision=highest)


def augment(images, keys, size, augmentation: Augmentation) -> jax.Array:
    """Random crop or window, flip, shift and colours of training images.

    Args:
      images: uint8 [b, h, w, c], c 1 or 3; of ragged sets already cropped and resized by the host (then pass
        `augmentation.after_host()`).
      keys: typed keys [b] of `example_keys`.
      size: (H, W) of the output.

    Returns:
      float32 [b, H, W, 3], 0..255, not rounded.
    """
    batch, height, width, _ = images.shape
    mirror = offset = None
    if augmentation.flip:
        mirror = jax.vmap(jax.random.bernoulli)(_fold(keys, FLIP_FOLD))
    still = augmentation.crop_scale is None and not augmentation.shift and not augmentation.window
    if still and (height, width) == tuple(size):
        x = images.astype(jnp.float32)
        x = _pixels(x if mirror is None else jnp.where(mirror[:, None, None, None], x[:, :, ::-1], x))
        return _jitter(x, keys, augmentation.jitter)
    resized = None
    if augmentation.window:
        resized = covering(height, width, size, augmentation.window)
        offset = window_offsets(crop_uniforms(keys), resized, size)
        if mirror is not None:  # the window is cut out first, then mirrored, as the host's is
            offset = offset.at[:, 1].set(jnp.where(mirror, resized[1] - size[1] - offset[:, 1], offset[:, 1]))
    if augmentation.shift:
        draws = jax.vmap(lambda key: jax.random.uniform(key, (2,), minval=-1.0))(_fold(keys, SHIFT_FOLD))
        shift = jnp.round(draws * augmentation.shift * jnp.asarray(size)).astype(jnp.int32)
        offset = shift if offset is None else offset + shift
    if augmentation.crop_scale is None:
        boxes = jnp.asarray([[0, 0, height, width]], jnp.int32)
    else:
        boxes = crop_boxes(crop_uniforms(keys), height, width, augmentation.crop_scale, augmentation.crop_ratio)
    x = crop_resize(
        images, boxes, tuple(size), augmentation.interpolation, resized=resized, offset=offset, mirror=mirror
    )
    return _jitter(_pixels(x), keys, augmentation.jitter)


def _jitter(images, keys, strengths) -> jax.Array:
    """Brightness, contrast and saturation by factors uniform in [1 - s, 1 + s]: float [b, H, W, 3], 0..255.

    Each step is torchvision's on floats (blend, then clip); torchvision draws their order as well, here it is fixed.
    """
    if not any(strengths):
        return images
    draws = jax.vmap(lambda key: jax.random.uniform(key, (3,), minval=-1.0))(_fold(keys, COLOUR_FOLD))
    factors = jnp.maximum(1 + draws * jnp.asarray(strengths), 0)
    return adjust_colours(images, factors)


def adjust_colours(images, factors) -> jax.Array:
    """Brightness, contrast, saturation of float images [b, H, W, 3], 0..255, by factors [b, 3]; 1 changes nothing."""

    def blend(images, other, factor):
        factor = factor[:, None, None, None]
        return jnp.clip(factor * images + (1 - factor) * other, 0, 255)

    def grey(images):
        return (images * jnp.asarray([0.2989, 0.587, 0.114])).sum(-1, keepdims=True)

    images = blend(images, 0.0, factors[:, 0])
    images = blend(images, grey(images).mean((1, 2, 3), keepdims=True), factors[:, 1])
    return blend(images, grey(images), factors[:, 2])


def mix(images, others, keys, mixup: float, cutmix: float) -> tuple[jax.Array, jax.Array]:
    """Mixup (Zhang et al. 2018) or CutMix (Yun et al. 2019) of each image with another, drawn by its own key.

    Args:
      images, others: float [b, H, W, c].
      keys: of the images.
      mixup, cutmix: alpha of Beta(alpha, alpha) for the share; 0: never. Where both are set, half of the images get
        either.

    Returns:
      The mixed images, and the share [b] of each that is the first image's; the loss is mixed alike.
    """
    height, width = images.shape[1:3]

    def draw(key):
        kind, share, place = jax.random.split(key, 3)
        cuts = jax.random.bernoulli(kind) if mixup and cutmix else jnp.asarray(bool(cutmix))
        alpha = jnp.where(cuts, cutmix or 1.0, mixup or 1.0)
        return cuts, jax.random.beta(share, alpha, alpha), jax.random.uniform(place, (2,))

    cuts, share, place = jax.vmap(draw)(_fold(keys, MIX_FOLD))
    half = jnp.sqrt(1 - share)[:, None] / 2 * jnp.asarray([height, width])
    centre = place * jnp.asarray([height, width])
    low = jnp.clip(jnp.round(centre - half), 0)[:, :, None]
    high = jnp.round(centre + half)[:, :, None]
    rows, columns = jnp.arange(height), jnp.arange(width)
    inside = ((rows >= low[:, 0]) & (rows < high[:, 0]))[:, :, None] & (
        (columns >= low[:, 1]) & (columns < high[:, 1])
    )[:, None, :]
    share = jnp.where(cuts, 1 - inside.mean((1, 2)), share)
    kept = jnp.where(cuts[:, None, None], ~inside, share[:, None, None]).astype(images.dtype)[..., None]
    return kept * images + (1 - kept) * others, share


def evaluation_geometry(height: int, width: int, size, preprocessing) -> tuple[tuple[int, int], tuple[int, int]]:
    """((height, width) to resize an image to, (top, left) of the centre crop) of timm's and torchvision's evaluation.

    "shorter": the shorter side becomes floor(size / crop_pct), the longer one is cut down to a whole pixel
    (torchvision's Resize); for outputs that are not square the image covers the enlarged size (timm's ResizeKeepRatio).
    Then the centre is cut out; where it is larger than the image (crop_pct above 1), the rest is black.
    "squash": both sides go straight to the output's; nothing is cut off.
    """
    if preprocessing.resize == "squash":
        resized = tuple(size)
    else:
        resized = covering(height, width, size, preprocessing.crop_pct)
    return resized, tuple(round((have - want) / 2) for have, want in zip(resized, size, strict=True))


def covering(height: int, width: int, size, crop_pct: float) -> tuple[int, int]:
    """(height, width) of the image whose shorter side has become floor(size / crop_pct), see `evaluation_geometry`."""
    enlarged = [math.floor(side / crop_pct) for side in size]
    if enlarged[0] == enlarged[1]:
        short = min(height, width)
        return tuple(enlarged[0] if side == short else int(enlarged[0] * side / short) for side in (height, width))
    ratio = min(height / enlarged[0], width / enlarged[1])
    return round(height / ratio), round(width / ratio)


def resize_for_evaluation(images, size, preprocessing) -> jax.Array:
    """Resize and centre crop of whole batches: uint8 [b, h, w, c] -> float32 [b, H, W, 3], 0..255."""
    height, width = images.shape[1:3]
    resized, offset = evaluation_geometry(height, width, size, preprocessing)
    if resized == (height, width) == tuple(size):
        return _pixels(images.astype(jnp.float32))
    boxes, offset = jnp.asarray([[0, 0, height, width]]), jnp.asarray([offset])
    x = crop_resize(images, boxes, tuple(size), preprocessing.interpolation, resized=resized, offset=offset)
    return _pixels(x)


def _pixels(images):
    """[b, h, w, c] -> [b, h, w, 3]: grey becomes three channels (last, so that the resize worked on one); 0..255.

    Bicubic overshoots; the clip makes the device agree with pipelines of 8 bits, the host's for ragged sets included.
    """
    return jnp.broadcast_to(jnp.clip(images, 0, 255), (*images.shape[:-1], 3))


def normalise(images, preprocessing) -> jax.Array:
    """0..255 -> (x / 255 - mean) / std, float32, channel by channel."""
    mean, std = (np.asarray(value, np.float32) for value in (preprocessing.mean, preprocessing.std))
    return (images.astype(jnp.float32) / 255 - mean) / std
