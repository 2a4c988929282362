"""Specs: everything that decides a model's structure, numerics and preprocessing.

In: a name (``"vit_base_patch16_224"``, see :mod:`names`) and overrides. Out: a frozen, hashable :class:`ViTSpec` or
:class:`GPT2Spec`. Nothing here is a library default in disguise: GELU, LayerNorm epsilon and pixel statistics are
written out.
"""

import dataclasses
import difflib
import math
import typing
from collections.abc import Mapping
from typing import Any

from vitplast_jax.errors import UserError
from vitplast_jax.models import names
from vitplast_jax.models.names import HALF, IMAGENET

SIZES, _Size = names.VIT, names.Size

__all__ = [
    "GPT2Spec",
    "HALF",
    "IMAGENET",
    "Preprocessing",
    "Rope",
    "SIZES",
    "ViTSpec",
    "from_dict",
    "replace",
    "spec",
    "to_dict",
]


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
class Rope:
    """Rotary positions as DINOv3 has them (arXiv 2508.10104): of the patches alone, height and width apart.

    A patch's coordinates are the middle of its place, scaled to -1..1 along each side. Each of the ``k / 4``
    frequencies turns the pair (channel j, channel j + k / 2) of a head: the first k / 4 pairs by the height, the others
    by the width.

    Attributes:
      theta: the longest period is ``theta ** (1 - 4 / k)``.
      dtype: in which coordinates, angles, sine and cosine are computed: "float32" (transformers, timm) or "bfloat16"
        (the default of the original class).
      periods: to which dtype the periods are rounded before: the original files hold them in bfloat16.
    """

    theta: float = 100.0
    dtype: str = "float32"
    periods: str = "float32"

    def __post_init__(self):
        for field in ("dtype", "periods"):
            if getattr(self, field) not in ("float32", "bfloat16"):
                raise UserError(f"rope.{field} is {getattr(self, field)!r}, not 'float32' or 'bfloat16'")


@dataclasses.dataclass(frozen=True)
class ViTSpec:
    """The structure, numerics and preprocessing of a Vision Transformer.

    Attributes:
      class_token, distilled, registers: the tokens before the patches, in this order.
      pos_embed: there is a table of positions; ``pos_prefix`` says which of the tokens before the patches have a row in
        it: "all", "class" (DINOv2 with registers) or "none". True and False mean "all" and "none".
      antialias, pos_offset: how the source resizes that table (see weights/resize.py).
      rope: rotary positions of the patches, None for none.
      pool: what the head reads: "token" (the class token), "avg" (the mean of the patches), "token+avg" (both, one
        after the other: DINOv2's linear head) or "distilled" (class and distillation token, a head each, averaged).
      fc_norm: with pool="avg": the final norm acts on the mean (timm's fc_norm), else on the tokens (big_vision).
      qkv_bias, key_bias: without ``key_bias`` the keys' third of the bias is not used (DINOv3's bias mask).
      gated: SwiGLU, ``fc2(silu(gate(x)) * fc1(x))``; ``gelu`` is then not used.
      preprocessing: None where it is unknown.
    """

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
    distilled: bool = False
    registers: int = 0
    pos_embed: bool = True
    pos_prefix: str = "all"
    antialias: bool = True
    pos_offset: float = 0.0
    rope: Rope | None = None
    pool: str = "token"
    fc_norm: bool = True
    qkv_bias: bool = True
    key_bias: bool = True
    gelu: str = "erf"
    gated: bool = False
    eps: float = 1e-6
    layer_scale: float | None = None
    drop_rate: float = 0.0
    drop_path_rate: float = 0.0
    preprocessing: Preprocessing | None = Preprocessing()

    def __post_init__(self):
        if isinstance(self.pos_prefix, bool):
            object.__setattr__(self, "pos_prefix", "all" if self.pos_prefix else "none")
        problems = []
        for size, patch in zip(self.img_size, self.patch_size, strict=True):
            if size < patch or size % patch:
                problems.append(f"image size {size} is not a multiple of the patch size {patch}")
        if self.width % self.heads:
            problems.append(f"width {self.width} is not a multiple of {self.heads} heads")
        elif self.rope and (self.width // self.heads) % 4:
            problems.append(f"rotary positions need heads of a multiple of 4, not {self.width // self.heads}")
        if self.pool not in ("token", "avg", "token+avg", "distilled"):
            problems.append(f"pool is {self.pool!r}, not 'token', 'avg', 'token+avg' or 'distilled'")
        elif self.pool != "avg" and not self.class_token:
            problems.append(f"pool={self.pool!r} needs class_token=True")
        elif self.pool == "distilled" and not self.distilled:
            problems.append("pool='distilled' needs distilled=True")
        if self.distilled and not self.class_token:
            problems.append("distilled=True needs class_token=True")
        if self.pos_prefix not in ("all", "class", "none"):
            problems.append(f"pos_prefix is {self.pos_prefix!r}, not 'all', 'class' or 'none'")
        if self.gelu not in ("erf", "tanh"):
            problems.append(f"gelu is {self.gelu!r}, not 'erf' or 'tanh'")
        if problems:
            raise UserError(f"model {self.name}: " + "; ".join(problems))

    @property
    def grid(self) -> tuple[int, int]:
        """Patches along the height and the width."""
        return self.img_size[0] // self.patch_size[0], self.img_size[1] // self.patch_size[1]

    @property
    def patches(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def prefix(self) -> int:
        """Tokens before the patches: class token, distillation token and registers."""
        return int(self.class_token) + int(self.distilled) + self.registers

    @property
    def tokens(self) -> int:
        return self.prefix + self.patches

    @property
    def prefix_rows(self) -> int:
        """Rows of the position table before the patches': prefix tokens may or may not have one."""
        return {"all": self.prefix, "class": int(self.class_token), "none": 0}[self.pos_prefix]

    @property
    def positions(self) -> int:
        """Rows of the position table."""
        return self.patches + self.prefix_rows if self.pos_embed else 0

    @property
    def features(self) -> int:
        """Width of what the head reads."""
        return self.width * (2 if self.pool == "token+avg" else 1)

    @property
    def norm_on(self) -> str:
        """What the final norm is applied to: "pooled" (the mean of the patches) or "tokens"."""
        return "pooled" if self.pool == "avg" and self.fc_norm else "tokens"


@dataclasses.dataclass(frozen=True)
class GPT2Spec:
    """The structure and numerics of GPT-2; ``vocabulary`` words, at most ``context`` of them in a sequence.

    ``num_classes`` is the vocabulary (the head is the tied table of words), or 0 for no head.
    """

    name: str
    width: int
    depth: int
    heads: int
    hidden: int
    vocabulary: int = 50257
    context: int = 1024
    num_classes: int = -1
    gelu: str = "tanh"
    eps: float = 1e-5
    drop_rate: float = 0.0
    drop_path_rate: float = 0.0
    preprocessing: None = None

    def __post_init__(self):
        if self.num_classes == -1:
            object.__setattr__(self, "num_classes", self.vocabulary)
        problems = []
        if self.width % self.heads:
            problems.append(f"width {self.width} is not a multiple of {self.heads} heads")
        if self.num_classes not in (0, self.vocabulary):
            problems.append(
                f"num_classes is {self.num_classes}; its head is its vocabulary ({self.vocabulary}) or none (0)"
            )
        if self.gelu not in ("erf", "tanh"):
            problems.append(f"gelu is {self.gelu!r}, not 'erf' or 'tanh'")
        if problems:
            raise UserError(f"model {self.name}: " + "; ".join(problems))

    @property
    def tokens(self) -> int:
        """The longest sequence."""
        return self.context

    @property
    def prefix(self) -> int:
        """Tokens that stand for nothing in the input."""
        return 0


Spec = ViTSpec | GPT2Spec


def spec(name: str, **overrides) -> Spec:
    """Returns the spec of a name such as ``"vit_small_patch16_224.augreg_in21k"`` or ``"facebook/dinov2-base"``.

    Args:
      name: see :mod:`names`; timm's optional ``.tag`` decides the pixel statistics alone.
      **overrides: fields of the spec; ``img_size`` may be an int or (height, width).
    Raises:
      UserError: no such name, or sizes that do not fit each other.
    """
    fields = names.fields_of(name)
    if fields is None:
        near = difflib.get_close_matches(name, names.examples(), n=1)
        raise UserError(
            f"no model is called {name!r}: names are vit_{{{','.join(names.VIT)}}}_"
            f"patch{{{','.join(map(str, names.PATCHES))}}}_SIZE and those of timm and transformers for DeiT, DINOv2, "
            "DINOv3, MAE and GPT-2" + (f"; did you mean {near[0]}?" if near else "")
        )
    overrides = {key: value for key, value in overrides.items() if value is not None}
    if "vocabulary" in fields:
        fields.pop("gated")
        overrides.pop("img_size", None)
        return _checked(GPT2Spec, fields, overrides)
    if fields.get("preprocessing"):
        fields["preprocessing"] = Preprocessing(**fields["preprocessing"])
    if "rope" in fields:
        fields["rope"] = Rope(**fields["rope"])
    return _checked(ViTSpec, fields, overrides)


def _checked(kind, fields, overrides):
    unknown = overrides.keys() - {field.name for field in dataclasses.fields(kind)}
    if unknown:
        raise UserError(f"model {fields['name']}: no such field: {', '.join(sorted(unknown))}")
    fields = fields | overrides
    for key in fields.keys() & {"img_size", "patch_size"}:
        fields[key] = pair(fields[key])
    return kind(**fields)


def replace(model_spec: Spec, **changes) -> Spec:
    """A copy with other fields; ``img_size`` may be one side."""
    if "img_size" in changes:
        changes["img_size"] = pair(changes["img_size"])
    return dataclasses.replace(model_spec, **changes)


def pair(size: int | tuple[int, int]) -> tuple[int, int]:
    """Returns (height, width) of a side or of a pair."""
    sides = (size, size) if isinstance(size, int) else tuple(int(side) for side in size)
    if len(sides) == 1:
        sides *= 2
    if len(sides) != 2 or min(sides) < 1:
        raise UserError(f"a size is one side or (height, width), both positive, not {size!r}")
    return sides


def to_dict(model_spec: Spec) -> dict[str, Any]:
    """A plain dict for JSON; :func:`from_dict` reads it back."""
    return dataclasses.asdict(model_spec)


def from_dict(fields: Mapping[str, Any]) -> Spec:
    """The inverse of :func:`to_dict`, for dicts that came through JSON."""
    kind = GPT2Spec if "vocabulary" in fields else ViTSpec
    known = {field.name for field in dataclasses.fields(kind)}
    if unknown := fields.keys() - known:
        raise UserError(f"model description has unknown fields: {', '.join(sorted(unknown))}")
    values = dict(fields)
    _check_types(kind, values)
    if kind is GPT2Spec:
        return GPT2Spec(**values)
    for key in ("img_size", "patch_size"):
        values[key] = pair(tuple(values[key]))
    if values.get("rope") is not None:
        values["rope"] = Rope(**values["rope"])
    if values.get("preprocessing") is not None:
        told = dict(values["preprocessing"])
        told["mean"], told["std"] = tuple(map(float, told["mean"])), tuple(map(float, told["std"]))
        _check_types(Preprocessing, told)
        values["preprocessing"] = Preprocessing(**told)
    return ViTSpec(**values)


_ABOVE_ZERO = ("width", "depth", "heads", "hidden", "in_chans", "vocabulary", "context")


def _check_types(kind, values: Mapping):
    """Numbers, words and truth values of a description must be such; anything may stand in a file."""
    wrong = []
    for field, hint in typing.get_type_hints(kind).items():
        allowed = set(typing.get_args(hint) or (hint,))
        if (
            field not in values
            or not allowed <= {int, bool, float, str, type(None)}
            or typing.get_origin(hint) is tuple
        ):
            continue
        value, allowed = values[field], allowed | ({int} if float in allowed else set())
        odd = type(value) not in allowed and not (field == "pos_prefix" and type(value) is bool)
        odd = odd or (type(value) is int and (value < (field in _ABOVE_ZERO) or value >= 2**31))
        if odd or (type(value) is float and not math.isfinite(value)):
            wrong.append(f"{field} is {str(value)[:40]!r}")
    if wrong:
        raise UserError(f"model description: {', '.join(wrong)}")
