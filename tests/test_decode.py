"""Image files: decoded by what they hold, upright, in three colours; refused with their name (PITFALLS R30, R31)."""

import io
import pathlib
import struct
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image

from vitplast_jax.data import decode, sources
from vitplast_jax.errors import UserError


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    """Files as real sets have them: {name: path}, and the colour (or None: unreadable) that each must show."""
    root = tmp_path_factory.mktemp("zoo")
    red = Image.new("RGB", (24, 16), (200, 40, 40))
    noise = Image.fromarray(np.random.RandomState(0).randint(0, 256, (64, 64, 3), np.uint8))
    clear = Image.new("RGBA", (24, 16), (200, 40, 40, 0))
    half = Image.new("RGBA", (24, 16), (200, 40, 40, 128))
    colours = {}

    def add(name, colour, image=None, data=None, **options):
        colours[str(root / name)] = colour
        if image is None:
            (root / name).write_bytes(data)
        else:
            image.save(root / name, **options)

    add("rgb.png", (200, 40, 40), red)
    add("png_inside.jpg", (200, 40, 40), red, format="PNG")
    add("gif_inside.jpg", (200, 40, 40), red, format="GIF", save_all=True, append_images=[Image.new("RGB", (24, 16))])
    add("bmp_inside.jpeg", (200, 40, 40), red, format="BMP")
    add("colour.jpg", (200, 40, 40), red, quality=95)
    add("grey.jpg", (90, 90, 90), Image.new("L", (24, 16), 90))
    add("cmyk.jpg", (200, 40, 40), red.convert("CMYK"), quality=95)
    add("palette.png", (200, 40, 40), red.quantize(4))
    add("clear.png", (255, 255, 255), clear)
    add("half.png", (227, 147, 147), half)
    add("grey_alpha.png", (255, 255, 255), Image.new("LA", (24, 16), (90, 0)))
    add("deep.png", (128, 128, 128), Image.fromarray(np.full((16, 24), 32896, np.uint16)))
    add("deep_white.tif", (255, 255, 255), Image.fromarray(np.full((16, 24), 65535, np.uint16)))
    add("float.tif", None, Image.fromarray(np.ones((16, 24), np.float32)))
    add("deeper.tif", None, Image.fromarray(np.full((16, 24), 70_000, np.int32)))
    for kind in ("jpeg", "png"):
        stream = io.BytesIO()
        noise.save(stream, kind)
        add(f"cut.{kind}", None, data=stream.getvalue()[: len(stream.getvalue()) // 2])
        if kind == "png":
            data = bytearray(stream.getvalue())
            data[len(data) // 2] ^= 255
            add("damaged.png", None, data=bytes(data))
    add("empty.jpg", None, data=b"")
    add("page.jpg", None, data=b"<html>404</html>")
    add("program.jpg", None, data=b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n")
    return colours


def test_files_are_decoded_by_what_they_hold(zoo):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns about some files itself
        for path, colour in zoo.items():
            if colour is None:
                with pytest.raises(UserError) as error:
                    decode.decode_file(path, 7)
                assert str(error.value).startswith(f"{path} (example 7): ") and "\n" not in str(error.value)
            else:
                pixels = decode.decode_file(path)
                assert pixels.shape == (16, 24, 3) and pixels.dtype == np.uint8, path
                np.testing.assert_allclose(pixels.reshape(-1, 3), [colour] * 384, atol=3, err_msg=path)


def zoo_source(zoo, name="zoo"):
    paths = tuple(zoo)
    labels = np.arange(len(paths), dtype=np.int32) % 2
    return sources.Source(
        name, "train", labels, ("a", "b"), tuple(path.rsplit("/", 1)[1] for path in paths), files=paths
    )


def test_check_finds_every_unreadable_file_before_the_run(zoo):
    source = zoo_source(zoo)
    bad = [path for path, colour in zoo.items() if colour is None]
    with pytest.raises(UserError, match=f"{len(bad)} of {len(zoo)} images .* data.unreadable=skip") as error:
        decode.check(source)
    assert bad[0] in str(error.value)
    kept = decode.check(source, "skip")
    assert set(kept.files) == set(zoo) - set(bad) and len(kept) == len(kept.labels) == len(kept.ids)
    assert len(kept.skipped) == len(bad) and all(any(path in line for line in kept.skipped) for path in bad)
    assert kept.fingerprint != source.fingerprint
    assert decode.check(kept) is kept and decode.check(None) is None
    assert decode.check(sources.load("digits", split="test")).skipped == ()
    with pytest.raises(UserError, match="data.unreadable is 'ignore', expected one of fail, skip"):
        decode.check(source, "ignore")
    with pytest.raises(UserError, match="none of the 1 images of zoo's train split can be read"):
        decode.check(source.take([list(zoo).index(bad[0])]), "skip")


def test_orientation_is_applied_everywhere(tmp_path):
    """PITFALLS R31: a JPEG of 24 x 16 whose EXIF says 6 (rotate by 90) is 16 wide and 24 high."""
    image = Image.new("RGB", (24, 16))
    image.paste((255, 255, 255), (0, 0, 12, 16))  # left half white: the top half, once it is upright
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(tmp_path / "phone.jpg", exif=exif, quality=95)
    pixels = decode.decode_file(tmp_path / "phone.jpg")
    assert pixels.shape == (24, 16, 3) and pixels[:10].min() > 245 and pixels[14:].max() < 10


def test_too_many_pixels_are_refused_before_they_are_decoded(zoo, tmp_path, monkeypatch):
    path = next(iter(zoo))
    monkeypatch.setattr(decode, "MAX_PIXELS", 100)
    with pytest.raises(UserError, match="rgb.png: has more than 100 pixels"):
        decode.decode_file(path)
    with pytest.raises(UserError, match="has more than 100 pixels"):
        decode.check(zoo_source({path: None}))
    monkeypatch.undo()
    for side in (10_000, 30_000):  # Pillow itself warns of the one and refuses the other
        data = bytearray(pathlib.Path(path).read_bytes())
        data[16:24] = struct.pack(">II", side, side)
        data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
        (tmp_path / "bomb.png").write_bytes(data)
        with pytest.raises(UserError, match="bomb.png: has more than 89478485 pixels"):
            decode.decode_file(tmp_path / "bomb.png")


def test_missing_files_and_folders_are_named(tmp_path):
    with pytest.raises(UserError, match="gone.png: no such file"):
        decode.decode_file(tmp_path / "gone.png")
    with pytest.raises(UserError, match="is a folder"):
        decode.decode_file(tmp_path)


def test_images_below_a_folder(tmp_path):
    for name in ("b/1.png", "b/0.JPG", "a/deep/0.png", ".git/0.png", "b/.hidden.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "a" / "notes.txt").write_text("none")
    found = decode.find_images(tmp_path)
    assert [path.removeprefix(f"{tmp_path}/") for path in found] == ["a/deep/0.png", "b/0.JPG", "b/1.png"]
    assert decode.find_images(tmp_path / "a" / "notes.txt") == [str(tmp_path / "a" / "notes.txt")]  # decoding will tell
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match="none: no images in it"):
        decode.find_images(tmp_path / "none")
    with pytest.raises(UserError, match="gone: no such file or folder"):
        decode.find_images(tmp_path / "gone")
