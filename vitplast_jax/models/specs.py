"""Named sizes and families: everything that decides a model's structure, numerics and preprocessing.

In: a timm name (``"vit_base_patch16_224"``) and overrides. Out: a frozen, hashable :class:`ViTSpec`.
Nothing here is a library default in disguise: GELU, LayerNorm epsilon and pixel statistics are written out.
"""

import dataclasses
import difflib
import re
from collections.abc import Mapping
from typing import Any

from vitplast_jax.errors import UserError

HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """How the pixels must look that these weights were trained on.

    Attributes:
      mean, std: per channel, in units of the 0..1 range.
      interpolation: "bilinear" or "bicubic".
      crop_pct: evaluation resizes the shorter side to ``size / crop_pct`` and takes the central crop.
      resize: "shorter" (that rule) or "squash" (both sides straight to the size, no crop).
    """

    mean: tuple[float, ...] = HALF[0]
    std: tuple[float, ...] = HALF[1]
    interpolation: str = "bicubic"
    crop_pct: float = 0.9
    resize: str = "shorter"


@dataclasses.dataclass(frozen=True)
class ViTSpec:
    """The structure, numerics and preprocessing of a Vision Transformer; ``preprocessing=None`` means unknown."""

    name: str
    img_size: tuple[int, int]
    patch_size: tuple[int, int]
    width: int
    depth: int
    heads: int
    hidden: int
    in_chans: int = 3
    num_classes: int = 1000
    class_token: bool = True
    registers: int = 0
    pos_prefix: bool = True
    pool: str = "token"
    qkv_bias: bool = True
    gelu: str = "erf"
    eps: float = 1e-6
    layer_scale: float | None = None
    drop_rate: float = 0.0
    drop_path_rate: float = 0.0
    preprocessing: Preprocessing | None = Preprocessing()

    def __post_init__(self):
        problems = []
        for size, patch in zip(self.img_size, self.patch_size, strict=True):
            if size < patch or size % patch:
                problems.append(f"image size {size} is not a multiple of the patch size {patch}")
        if self.width % self.heads:
            problems.append(f"width {self.width} is not a multiple of {self.heads} heads")
        if self.pool not in ("token", "avg"):
            problems.append(f"pool is {self.pool!r}, not 'token' or 'avg'")
        if self.pool == "token" and not self.class_token:
            problems.append("pool='token' needs class_token=True")
        if self.gelu not in ("erf", "tanh"):
            problems.append(f"gelu is {self.gelu!r}, not 'erf' or 'tanh'")
        if problems:
            raise UserError(f"model {self.name}: " + "; ".join(problems))

    @property
    def grid(self) -> tuple[int, int]:
        """Patches along the height and the width."""
        return self.img_size[0] // self.patch_size[0], self.img_size[1] // self.patch_size[1]

    @property
    def prefix(self) -> int:
        """Tokens before the patches: the class token and the registers."""
        return int(self.class_token) + self.registers

    @property
    def tokens(self) -> int:
        return self.prefix + self.grid[0] * self.grid[1]

    @property
    def positions(self) -> int:
        """Rows of the position table; prefix tokens may or may not have one."""
        return self.grid[0] * self.grid[1] + (self.prefix if self.pos_prefix else 0)


@dataclasses.dataclass(frozen=True)
class _Size:
    width: int
    depth: int
    heads: int


SIZES = {
    "pico": _Size(96, 5, 3),  # our own: small enough to ship and to finetune on two CPU cores
    "tiny": _Size(192, 12, 3),
    "small": _Size(384, 12, 6),
    "base": _Size(768, 12, 12),
    "large": _Size(1024, 24, 16),
    "huge": _Size(1280, 32, 16),
}
PATCHES = (4, 8, 14, 16, 32)
_NAME = re.compile(r"vit_(?P<size>[a-z]+)_patch(?P<patch>\d+)_(?P<image>\d+)(?:_in21k)?(?:\.(?P<tag>.+))?")

# Pixel statistics by the pretraining that timm's tag names. An unknown tag leaves them unknown: they must be told.
_STATISTICS = (
    (r"|augreg.*|orig.*|in21k.*|sam.*|fashion_mnist", HALF),
    (r"dino.*|mae.*", IMAGENET),
)


def spec(name: str, **overrides) -> ViTSpec:
    """Returns the spec of a timm name such as ``"vit_small_patch16_224.augreg_in21k"``.

    Args:
      name: ``vit_{pico,tiny,small,base,large,huge}_patch{4,8,14,16,32}_{image size}``, with an optional ``.tag`` that
        decides the pixel statistics alone.
      **overrides: fields of :class:`ViTSpec`; ``img_size`` may be an int or (height, width).
    Raises:
      UserError: no such name, or sizes that do not fit each other.
    """
    match = _NAME.fullmatch(name)
    if not match or match["size"] not in SIZES or int(match["patch"]) not in PATCHES:
        known = [f"vit_{size}_patch{patch}_224" for size in SIZES for patch in PATCHES]
        near = difflib.get_close_matches(name, known, n=1)
        raise UserError(
            f"no model is called {name!r}: names are "
            f"vit_{{{','.join(SIZES)}}}_patch{{{','.join(map(str, PATCHES))}}}_SIZE"
            + (f"; did you mean {near[0]}?" if near else "")
        )
    size = SIZES[match["size"]]
    fields: dict[str, Any] = {
        "name": name,
        "img_size": int(match["image"]),
        "patch_size": int(match["patch"]),
        "width": size.width,
        "depth": size.depth,
        "heads": size.heads,
        "hidden": 4 * size.width,
        "preprocessing": _preprocessing(match["tag"] or "", match["size"]),
    }
    unknown = overrides.keys() - {field.name for field in dataclasses.fields(ViTSpec)}
    if unknown:
        raise UserError(f"model {name}: no such field: {', '.join(sorted(unknown))}")
    fields.update({key: value for key, value in overrides.items() if value is not None})
    fields["img_size"] = pair(fields["img_size"])
    fields["patch_size"] = pair(fields["patch_size"])
    return ViTSpec(**fields)


def replace(model_spec: ViTSpec, **changes) -> ViTSpec:
    """A copy with other fields; ``img_size`` may be one side."""
    if "img_size" in changes:
        changes["img_size"] = pair(changes["img_size"])
    return dataclasses.replace(model_spec, **changes)


def _preprocessing(tag: str, size: str) -> Preprocessing | None:
    for pattern, (mean, std) in _STATISTICS:
        if re.fullmatch(pattern, tag):
            if size == "pico":  # its images are as small as its input: nothing to crop away
                return Preprocessing(mean, std, interpolation="bilinear", crop_pct=1.0)
            return Preprocessing(mean, std)
    return None


def pair(size: int | tuple[int, int]) -> tuple[int, int]:
    """Returns (height, width) of a side or of a pair."""
    sides = (size, size) if isinstance(size, int) else tuple(int(side) for side in size)
    if len(sides) == 1:
        sides *= 2
    if len(sides) != 2 or min(sides) < 1:
        raise UserError(f"a size is one side or (height, width), both positive, not {size!r}")
    return sides


def to_dict(model_spec: ViTSpec) -> dict[str, Any]:
    """A plain dict for JSON; :func:`from_dict` reads it back."""
    return dataclasses.asdict(model_spec)


def from_dict(fields: Mapping[str, Any]) -> ViTSpec:
    """The inverse of :func:`to_dict`, for dicts that came through JSON."""
    known = {field.name for field in dataclasses.fields(ViTSpec)}
    if unknown := fields.keys() - known:
        raise UserError(f"model description has unknown fields: {', '.join(sorted(unknown))}")
    values = dict(fields)
    for key in ("img_size", "patch_size"):
        values[key] = pair(tuple(values[key]))
    if values.get("preprocessing") is not None:
        told = dict(values["preprocessing"])
        told["mean"], told["std"] = tuple(told["mean"]), tuple(told["std"])
        values["preprocessing"] = Preprocessing(**told)
    return ViTSpec(**values)
