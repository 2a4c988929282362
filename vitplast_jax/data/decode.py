"""How does an image file become pixels? One decoder for training, evaluation and prediction.

In: a path. Out: uint8 [h, w, 3]. What the file holds decides, never its suffix, and the policy is one for all:

* EXIF orientation is applied; colour profiles are not (as in torchvision).
* Grey, palette, CMYK and YCbCr become RGB; of animations the first frame counts.
* Transparency is laid on white. (Dropping alpha, as `convert("RGB")` does, shows what was hidden, often black.)
* 16-bit grey is scaled by 255/65535. 32-bit and float images are refused: their range is anybody's guess.
* Only raster formats are opened: EPS would start a program. Images above MAX_PIXELS are refused.
* Truncated, empty or damaged files raise a UserError that names the file.

`check` finds unreadable files before a run starts, without decoding everything.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import os

import numpy as np
from PIL import Image, ImageOps

from vitplast_jax.data import preprocess, records
from vitplast_jax.errors import UserError

SUFFIXES = (".jpg", ".jpeg", ".jfif", ".png", ".gif", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".jp2", ".avif")
FORMATS = ("JPEG", "MPO", "PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM", "JPEG2000", "AVIF")
MAX_PIXELS = 89_478_485  # where Pillow starts to warn of a decompression bomb
POLICIES = ("fail", "skip")
ORIENTATION = 0x0112  # EXIF
_RESAMPLE = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


@functools.cache
def _formats() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)  # a build of Pillow may lack some


def is_image(name: str) -> bool:
    """Whether a file is taken for an image when folders are searched: by its suffix, hidden files never."""
    return not name.startswith(".") and name.lower().endswith(SUFFIXES)


def find_images(path: str | os.PathLike) -> list[str]:
    """The image files below a folder, sorted, or the one file that `path` is, whatever its suffix."""
    if os.path.isfile(path):
        return [os.fspath(path)]
    if not os.path.isdir(path):
        raise UserError(f"{path}: no such file or folder")
    found = []
    for parent, below, names in os.walk(path):
        below[:] = sorted(name for name in below if not name.startswith("."))
        found += [os.path.join(parent, name) for name in sorted(names) if is_image(name)]
    if not found:
        raise UserError(f"{path}: no images in it; looked for {' '.join(SUFFIXES)}")
    return found


def decode_file(path: str | os.PathLike, index: int | None = None) -> np.ndarray:
    """Decodes an image file to uint8 [h, w, 3]; `index` is the example's, named in the error."""
    return np.asarray(open_image(path, index))


def shrinking(box, size) -> int:
    """How many times smaller (1, 2, 4, 8) a JPEG may be decoded so that `box` still has twice the pixels of `size`."""
    return max(k for k in (1, 2, 4, 8) if k == 1 or (box[2] >= 2 * k * size[0] and box[3] >= 2 * k * size[1]))


def open_image(path: str | os.PathLike, index: int | None = None, shrink: int = 1) -> Image.Image:
    """Decodes an image file (a path, or records.Packed) to a Pillow image of mode RGB, upright.

    With `shrink` 2, 4 or 8 a JPEG (one that lies upright in its file) is decoded that many times smaller, which is
    faster: libjpeg then computes fewer coefficients back. Other formats come in full.
    """
    try:
        with records.open_binary(path) as file, Image.open(file, formats=_formats()) as image:
            _refuse_too_large(image)
            if shrink > 1 and image.format == "JPEG" and image.getexif().get(ORIENTATION, 1) == 1:
                image.draft(None, (-(-image.width // shrink), -(-image.height // shrink)))
            image.load()
            upright = _to_rgb(ImageOps.exif_transpose(image))
        scale = getattr(path, "scale", 1)
        return upright if scale == 1 else upright.point(lambda value: value * scale)
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error and more
        raise UserError(f"{path}{'' if index is None else f' (example {index})'}: {_reason(path, error)}") from None


def _reason(path, error):
    if isinstance(error, FileNotFoundError):
        return "no such file"
    if isinstance(error, IsADirectoryError):
        return "is a folder, expected an image file"
    if isinstance(error, PermissionError):
        return "may not be read (permissions)"
    if records.size_of(path) == 0:
        return "is empty (0 bytes)"
    if isinstance(error, (Image.DecompressionBombError, Image.DecompressionBombWarning)):
        return f"has more than {MAX_PIXELS} pixels"
    if isinstance(error, Image.UnidentifiedImageError):
        return "is not an image of a known format"
    text = " ".join(str(error).split())
    return f"cannot be decoded: {text or type(error).__name__}"


def _refuse_too_large(image):
    if image.width * image.height > MAX_PIXELS:
        raise Image.DecompressionBombError


def _to_rgb(image):
    if image.mode.startswith("I"):
        values = np.asarray(image)
        if values.min(initial=0) < 0 or values.max(initial=0) > 65535:
            raise ValueError(f"32-bit values from {values.min()} to {values.max()}; convert the file to 8 bits")
        grey = np.round(values.astype(np.float32) * np.float32(255 / 65535)).astype(np.uint8)
        return Image.fromarray(grey).convert("RGB")
    if image.mode == "F":
        raise ValueError("float pixels have no known range; convert the file to 8 bits")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def crop_and_resize(image: Image.Image, box, size, interpolation: str) -> np.ndarray:
    """Crops (top, left, height, width) and resizes to uint8 [H, W, 3].

    Cut first: Pillow's own `resize(box=...)` reads pixels outside of the box.
    """
    top, left, height, width = (int(value) for value in box)
    if (top, left, height, width) != (0, 0, image.height, image.width):
        image = image.crop((left, top, left + width, top + height))
    return np.asarray(image.resize((size[1], size[0]), _RESAMPLE[interpolation]))


def host_resize_for_evaluation(image: np.ndarray | Image.Image, size, preprocessing) -> np.ndarray:
    """Resize and centre crop of one image (uint8 [h, w, 3] or a Pillow image) -> uint8 [H, W, 3].

    The geometry is that of `preprocess.resize_for_evaluation`; the resampling is Pillow's, rounded to whole levels.
    """
    if not isinstance(image, Image.Image):
        image = Image.fromarray(image)
    resized, (top, left) = preprocess.evaluation_geometry(image.height, image.width, size, preprocessing)
    return resize_and_cut(image, resized, (top, left), size, preprocessing.interpolation)


def resize_and_cut(image: Image.Image, resized, place, size, interpolation: str) -> np.ndarray:
    """Resizes to (height, width) `resized` and cuts `size` out of it at `place`; beyond the image it is black."""
    top, left = (int(value) for value in place)
    if tuple(resized) != (image.height, image.width):
        image = image.resize((resized[1], resized[0]), _RESAMPLE[interpolation])
    return np.asarray(image.crop((left, top, left + size[1], top + size[0])))


def check(source, unreadable: str = "fail", threads: int = 8):
    """Looks at every file of a ragged source before a run depends on it; returns the source, maybe shortened.

    Headers and ends of all files are read, and PNG checksums; a file whose end is unusual is decoded in full.
    Damage in the middle of, say, a JPEG shows only when it is decoded.

    Args:
      source: a Source; one without files is returned as it is.
      unreadable: "fail" raises a UserError that counts and names unreadable files; "skip" leaves them out and lists
        them in `source.skipped`. (Splits were made before: skipping a file moves no other from split to split.)
      threads: that read at a time.
    """
    if unreadable not in POLICIES:
        raise UserError(f"data.unreadable is {unreadable!r}, expected one of {', '.join(POLICIES)}")
    if source is None or source.files is None:
        return source
    if source.sizes is None:
        unseen = np.arange(len(source))
        sizes = np.zeros((len(source), 3), np.int32)
    else:  # looked at when it was prepared
        sizes = source.sizes
        unseen = np.flatnonzero(sizes[:, 0] == 0)
        if not len(unseen):
            return source
    faults: list[str | None] = [None] * len(source)
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        looked = pool.map(look, (source.files[index] for index in unseen), unseen.tolist())
        for index, found in zip(unseen, looked, strict=True):
            if isinstance(found, str):
                faults[index] = found
            else:
                sizes[index] = found
    source = dataclasses.replace(source, sizes=sizes)
    bad = [fault for fault in faults if fault]
    if not bad:
        return source
    if unreadable == "fail":
        more = f"; and {len(bad) - 3} more" if len(bad) > 3 else ""
        raise UserError(
            f"{len(bad)} of {len(source)} images of {source.name}'s {source.split} split cannot be read: "
            f"{'; '.join(bad[:3])}{more}. Repair or remove them, or leave them out with data.unreadable=skip"
        )
    kept = [index for index, fault in enumerate(faults) if not fault]
    if not kept:
        raise UserError(
            f"none of the {len(source)} images of {source.name}'s {source.split} split can be read: {bad[0]}"
        )
    return dataclasses.replace(source.take(kept), skipped=(*source.skipped, *bad))


def look(path, index: int) -> tuple[int, int, int] | str:
    """(height, width, channels) of an upright image, or the one line that says what is wrong with the file.

    Channels are 1 for 8-bit grey without transparency, else 3.
    """
    try:
        with records.open_binary(path) as file, Image.open(file, formats=_formats()) as image:
            _refuse_too_large(image)
            kind, mode, size = image.format, image.mode, image.size
            grey = mode in ("L", "1") and not image.has_transparency_data
            if (kind != "PNG" or "exif" in image.info) and image.getexif().get(ORIENTATION, 1) in (5, 6, 7, 8):
                size = size[::-1]  # (a PNG without it would be decoded to look for it)
            file.seek(max(file.seek(0, os.SEEK_END) - 32, 0))
            end = file.read()
            if kind == "PNG":
                file.seek(0)
                image.verify()  # every chunk's checksum
    except Exception as error:  # as in open_image
        return f"{path} (example {index}): {_reason(path, error)}"
    whole = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND"}.get(kind)
    if not (whole and whole in end and not mode.startswith(("I", "F"))):
        try:
            open_image(path, index)
        except UserError as error:
            return str(error)
    return size[1], size[0], 1 if grey else 3
