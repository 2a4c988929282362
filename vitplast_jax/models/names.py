"""What does a model's name say? One row a family of names: timm's, transformers' and the hubs of Meta.

In: a name. Out: the fields of its spec (`specs` makes one of them), or None. Nothing is a library default in disguise:
GELU, LayerNorm epsilon, gates, registers, rotary positions and pixel statistics stand in the rows.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
SATELLITE = ((0.430, 0.411, 0.296), (0.213, 0.156, 0.143))  # DINOv3's models of satellite images


@dataclasses.dataclass(frozen=True)
class Size:
    """`hidden`: 4 * width where 0. `gated`: SwiGLU."""

    width: int
    depth: int
    heads: int
    hidden: int = 0
    gated: bool = False

    def fields(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"hidden": self.hidden or 4 * self.width}


VIT = {
    "pico": Size(96, 5, 3),  # our own: small enough to ship and to finetune on two CPU cores
    "tiny": Size(192, 12, 3),
    "small": Size(384, 12, 6),
    "base": Size(768, 12, 12),
    "large": Size(1024, 24, 16),
    "huge": Size(1280, 32, 16),
    "giant": Size(1408, 40, 16, 6144),
    "gigantic": Size(1664, 48, 16, 8192),
}
DINOV2 = {size: VIT[size] for size in ("small", "base", "large")} | {"giant": Size(1536, 40, 24, 4096, gated=True)}
DINOV3 = {size: VIT[size] for size in ("small", "base", "large")} | {
    "small_plus": Size(384, 12, 6, 1536, gated=True),
    "huge_plus": Size(1280, 32, 20, 5120, gated=True),
    "7b": Size(4096, 40, 32, 8192, gated=True),
}
GPT2 = {
    "": Size(768, 12, 12),
    "-medium": Size(1024, 24, 16),
    "-large": Size(1280, 36, 20),
    "-xl": Size(1600, 48, 25),
}
FAMILIES = {"vit": VIT, "dinov2": DINOV2, "dinov3": DINOV3, "gpt2": GPT2}
PATCHES = (4, 8, 14, 16, 32)

# Pixel statistics by the pretraining that timm's tag names. An unknown tag leaves them unknown: they must be told.
_STATISTICS = (
    (r"|augreg.*|orig.*|in21k.*|sam.*|fashion_mnist", HALF),
    (r"dino.*|mae.*", IMAGENET),
)
_SIZE_LETTERS = {"s": "small", "splus": "small_plus", "b": "base", "l": "large", "g": "giant", "7b": "7b"}


def heads_of(family: str, width: int) -> int | None:
    """The number of heads of a family's models of this width, None where there is none or more than one answer."""
    found = {size.heads for size in FAMILIES[family].values() if size.width == width}
    return found.pop() if len(found) == 1 else None


def fields_of(name: str) -> dict[str, Any] | None:
    """The fields that a name decides, None where no row has such a name.

    `preprocessing` is a dict of the fields of `specs.Preprocessing`, or None where the statistics are unknown;
    `vocabulary` is there for language models alone.
    """
    for pattern, make in _ROWS:
        match = re.fullmatch(pattern, name)
        if match and (fields := make(match)):
            return {"name": name, **fields}
    return None


def examples() -> list[str]:
    """Names to suggest where one is misspelt."""
    names = [f"vit_{size}_patch{patch}_224" for size in VIT for patch in PATCHES]
    names += [f"vit_{size}_patch14{reg}_dinov2" for size in DINOV2 for reg in ("", "_reg4")]
    names += [f"vit_{size}_patch16_dinov3" for size in DINOV3] + [f"gpt2{size}" for size in GPT2]
    names += [f"deit_{size}{kind}_patch16_224" for size in ("tiny", "small", "base") for kind in ("", "_distilled")]
    return names + [f"facebook/dinov2-{size}" for size in DINOV2] + ["facebook/dinov3-vits16-pretrain-lvd1689m"]


def _pixels(statistics, crop_pct=0.9, interpolation="bicubic"):
    mean, std = statistics
    return {"mean": mean, "std": std, "interpolation": interpolation, "crop_pct": crop_pct}


def _vit(match):
    size, tag = match["size"], match["tag"] or ""
    if size not in VIT or int(match["patch"]) not in PATCHES:
        return None
    preprocessing = None
    for pattern, statistics in _STATISTICS:
        if re.fullmatch(pattern, tag):
            # The images of pico are as small as its input: nothing to crop away.
            small = size == "pico"
            preprocessing = _pixels(statistics, 1.0, "bilinear") if small else _pixels(statistics)
            break
    fields = VIT[size].fields() | {"img_size": int(match["image"]), "patch_size": int(match["patch"])}
    return fields | {"preprocessing": preprocessing}


def _google(match):
    """transformers' ViTs: another epsilon than timm's for the same weights."""
    fields = VIT[match["size"]].fields() | {"img_size": int(match["image"]), "patch_size": int(match["patch"])}
    return fields | {"eps": 1e-12, "antialias": False, "preprocessing": _pixels(HALF, 1.0, "bilinear")}


def _mae(match):
    fields = VIT[match["size"]].fields() | {"img_size": 224, "patch_size": 14 if match["size"] == "huge" else 16}
    return fields | {"eps": 1e-12, "antialias": False, "preprocessing": _pixels(IMAGENET)}


def _deit(match):
    distilled = bool(match["distilled"])
    return VIT[match["size"]].fields() | {
        "img_size": int(match["image"]),
        "patch_size": 16,
        "distilled": distilled,
        "pool": "distilled" if distilled else "token",
        "preprocessing": _pixels(IMAGENET, 1.0 if match["image"] == "384" else 0.9),
    }


def _deit3(match):
    return VIT[match["size"]].fields() | {
        "img_size": int(match["image"]),
        "patch_size": int(match["patch"]),
        "layer_scale": 1e-6,
        "pos_prefix": "none",
        "preprocessing": _pixels(IMAGENET, 1.0),
    }


def _dinov2(size, registers, **fields):
    """arXiv 2304.07193, registers of arXiv 2309.16588."""
    return DINOV2[size].fields() | {
        "img_size": 518,
        "patch_size": 14,
        "num_classes": 0,
        "layer_scale": 1e-5,
        "registers": 4 if registers else 0,
        "preprocessing": _pixels(IMAGENET, 1.0),
        **fields,
    }


def _dinov2_of_meta(size, registers):
    """The hub and transformers: only the class token has a row of positions; another resizing without registers."""
    return _dinov2(size, registers, pos_prefix="class" if registers else "all", antialias=bool(registers))


def _dinov3(size, biases, tag, **fields):
    """arXiv 2508.10104. Rotary positions, four registers, no bias for the keys."""
    return DINOV3[size].fields() | {
        "img_size": 256,
        "patch_size": 16,
        "num_classes": 0,
        "eps": 1e-5,
        "layer_scale": 1e-5,
        "registers": 4,
        "pos_embed": False,
        "pos_prefix": "none",
        "rope": {},
        "qkv_bias": biases and size != "7b",
        "key_bias": False,
        "preprocessing": _pixels(SATELLITE if "sat" in (tag or "") else IMAGENET, 1.0),
        **fields,
    }


def _dinov3_of_meta(match):
    letters = match["size"].replace("16plus", "plus").replace("16", "")
    size = {"hplus": "huge_plus"}.get(letters) or _SIZE_LETTERS[letters]
    return _dinov3(size, True, match["tag"])


def _gpt2(match):
    return GPT2[match["size"]].fields() | {"vocabulary": 50257, "context": 1024}


_TAG = r"(?:\.(?P<tag>.+))?"
_IMAGE = r"(?P<image>\d+)"
_ROWS: tuple[tuple[str, Callable], ...] = (
    (rf"vit_(?P<size>[a-z]+)_patch(?P<patch>\d+)_{_IMAGE}(?:_in21k)?{_TAG}", _vit),
    (rf"google/vit-(?P<size>base|large|huge)-patch(?P<patch>14|16|32)-{_IMAGE}(?:-in21k)?", _google),
    (r"facebook/vit-mae-(?P<size>base|large|huge)", _mae),
    (rf"deit_(?P<size>tiny|small|base)(?P<distilled>_distilled)?_patch16_{_IMAGE}{_TAG}", _deit),
    (rf"facebook/deit-(?P<size>tiny|small|base)(?P<distilled>-distilled)?-patch16-{_IMAGE}", _deit),
    (rf"deit3_(?P<size>small|base|large|huge)_patch(?P<patch>14|16)_{_IMAGE}{_TAG}", _deit3),
    (
        rf"vit_(?P<size>small|base|large|giant)_patch14(?P<reg>_reg4)?_dinov2{_TAG}",
        lambda m: _dinov2(m["size"], m["reg"], pos_prefix="none" if m["reg"] else "all"),
    ),
    (r"dinov2_vit(?P<size>[sblg])14(?P<reg>_reg)?", lambda m: _dinov2_of_meta(_SIZE_LETTERS[m["size"]], m["reg"])),
    (
        r"facebook/dinov2(?P<reg>-with-registers)?-(?P<size>small|base|large|giant)",
        lambda m: _dinov2_of_meta(m["size"], m["reg"]),
    ),
    (
        rf"vit_(?P<size>{'|'.join(DINOV3)})_patch16_dinov3(?P<biases>_qkvb)?{_TAG}",
        lambda m: _dinov3(m["size"], bool(m["biases"]), m["tag"]),
    ),
    (r"dinov3_vit(?P<size>s16|s16plus|b16|l16|h16plus|7b16)(?P<tag>)", _dinov3_of_meta),
    (r"facebook/dinov3-vit(?P<size>s16|s16plus|b16|l16|h16plus|7b16)-pretrain-(?P<tag>\w+)", _dinov3_of_meta),
    (r"(?:openai-community/)?gpt2(?P<size>|-medium|-large|-xl)", _gpt2),
)
