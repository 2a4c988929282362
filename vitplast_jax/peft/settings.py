"""What is attached, where and how: the settings of a method, checked and in one canonical form.

In: keyword arguments of `attach`, or a config's `peft` group. Out: a frozen, hashable :class:`Settings`.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from vitplast_jax.errors import UserError

PROJECTIONS = ("free", "ao")
STARTS = ("zero", "plain", "scale")
START_SCALE = 0.1  # of start="scale"
POSITIONS = ("after", "before", "parallel")
ACTIVATIONS = ("gelu", "none")

LINEAR = ("q", "k", "v", "qkv", "out", "fc1", "gate", "fc2")
NORMS = ("ln1", "ln2")
PLACES = ("mha", "ffn")
_ALIASES = {"proj": "out", "attn": "mha", "mlp": "ffn"}


@dataclasses.dataclass(frozen=True)
class _Method:
    targets: tuple[str, ...]  # what there is; the default first
    default: tuple[str, ...]
    uses: frozenset[str]  # the settings that it reads besides rank and targets


def _uses(*names: str) -> frozenset[str]:
    return frozenset(names)


_PAIR = ("projection", "scales", "start", "normalize", "dropout")
METHODS: dict[str, _Method] = {
    "lora": _Method(LINEAR, ("q", "v"), _uses(*_PAIR, "alpha", "rank")),
    "adapter": _Method(PLACES, ("ffn",), _uses(*_PAIR, "position", "tied", "bias", "activation", "rank")),
    "vpt-shallow": _Method(("prompt",), ("prompt",), _uses(*_PAIR, "rank")),
    "vpt-deep": _Method(("prompt",), ("prompt",), _uses(*_PAIR, "rank")),
    "oft": _Method(LINEAR, ("qkv",), _uses("rank")),
    "boft": _Method(LINEAR, ("qkv",), _uses("rank")),
    "hra": _Method(LINEAR, ("qkv",), _uses("rank")),
    "hta": _Method(LINEAR, ("q", "v"), _uses("dropout")),
    "ssf": _Method((*LINEAR, *NORMS), ("ln1", "qkv", "out", "ln2", "fc1", "fc2"), _uses()),
}

# The rows of the paper's tables that its counts of parameters allow (ORACLES B2), and the formula as it is printed.
PRESETS: dict[tuple[str, str], dict[str, Any]] = {
    ("lora", "formula"): {"projection": "ao", "targets": ("q", "v")},
    ("adapter", "formula"): {"projection": "ao", "targets": ("mha", "ffn"), "tied": False, "bias": False},
    ("adapter", "count-single"): {"projection": "ao", "targets": ("ffn",), "tied": False, "bias": False},
    ("adapter", "count-tied"): {"projection": "ao", "targets": ("mha", "ffn"), "tied": True, "bias": False},
    ("vpt-deep", "formula"): {"projection": "ao"},
    ("vpt-shallow", "formula"): {"projection": "ao"},
}
PRESET_NAMES = ("formula", "count-single", "count-tied")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What fills the slots of a model.

    Attributes:
      method: one of :data:`METHODS`.
      rank: LoRA's r, an adapter's hidden width, the number of prompts, OFT's and BOFT's block size, HRA's reflections.
      ranks: one rank for each block, if they differ; 0 leaves a block out.
      targets: where, as "q", "fc1@3" or "mha@0-5"; () is the method's default. "proj" is "out".
      projection: "free" matrices, or "ao": made from one vector each.
      scales: AOFT*'s lambda, a factor for each of the ``rank`` directions; 0 at the start with AO.
      start: of AO: "zero" (the difference to frozen start vectors), "plain" (the printed formula), "scale" (0.1 of it).
        Prompts cannot start as nothing: there "zero" is the printed formula.
      normalize: AO vectors are divided by their norm: strictly orthogonal.
      preset: "formula", "count-single" or "count-tied": sets what :data:`PRESETS` says.
      alpha: LoRA's delta is multiplied by alpha / rank; 0 stands for the rank itself.
      dropout: of what an adapter sees (LoRA, HTA), of its hidden units (Adapter), of prompts.
      position: of an Adapter: "after" its sublayer (on what that returns), "before" (on what it is given) or "parallel"
        (from what it is given to what it returns).
      tied: an Adapter's up projection is the transpose of its down projection.
      bias: an Adapter's two projections have biases.
      activation: "gelu" or "none" between them.
    """

    method: str = "lora"
    rank: int = 8
    ranks: tuple[int, ...] = ()
    targets: tuple[str, ...] = ()
    projection: str = "free"
    scales: bool = False
    start: str = "zero"
    normalize: bool = False
    preset: str = ""
    alpha: float = 0.0
    dropout: float = 0.0
    position: str = "after"
    tied: bool = False
    bias: bool = True
    activation: str = "gelu"

    def fill(self, model):
        """Fills the slots of a model in place; see :mod:`vitplast_jax.peft.attach`."""
        from vitplast_jax.peft.attach import fill

        fill(model, self)

    @property
    def ao(self) -> bool:
        return self.projection == "ao"

    @property
    def from_zero(self) -> bool:
        """Whether AO vectors are kept beside the frozen ones they started from."""
        return self.ao and self.start == "zero" and not self.scales and not self.method.startswith("vpt")

    @property
    def multiplier(self) -> float:
        """What multiplies an AO delta besides alpha."""
        return START_SCALE if self.ao and self.start == "scale" else 1.0

    def rank_of(self, block: int) -> int:
        return self.ranks[block] if self.ranks else self.rank

    def places(self, depth: int) -> dict[int, list[str]]:
        """{block: targets} for a model of ``depth`` blocks.

        Raises:
          UserError: a target names a block that is not there, or covers another one; ranks for other blocks.
        """
        if self.ranks and len(self.ranks) != depth:
            raise UserError(f"peft.ranks gives {len(self.ranks)} ranks, the model has {depth} blocks")
        places: dict[int, list[str]] = {}
        for name, first, last in map(_parse_target, self.targets):
            if last is not None and last >= depth:
                raise UserError(
                    f"peft.targets: '{name}@{first}-{last}' has no block {last}; the model has 0-{depth - 1}"
                )
            for block in range(depth) if first is None else range(first, last + 1):
                names = places.setdefault(block, [])
                if self.rank_of(block) and name not in names:
                    names.append(name)
        for block, names in places.items():
            if "qkv" in names and {"q", "k", "v"} & set(names):
                raise UserError(f"peft.targets: qkv covers q, k and v, but block {block} is to have both")
        return {block: names for block, names in sorted(places.items()) if names}


def _parse_target(text: str) -> tuple[str, int | None, int | None]:
    match = re.fullmatch(r"(\w+)(?:@(\d+)(?:-(\d+))?)?", text)
    if not match:
        raise UserError(f"peft.targets: {text!r} is not TARGET, TARGET@BLOCK or TARGET@FIRST-LAST (q, fc1@0-5)")
    name, first, last = match.groups()
    if first is None:
        return _ALIASES.get(name, name), None, None
    first, last = int(first), int(last or first)
    if last < first:
        raise UserError(f"peft.targets: {text!r}: the last block comes before the first")
    return _ALIASES.get(name, name), first, last


def make_settings(fields: Mapping[str, Any]) -> Settings:
    """Checked settings, with the preset and the method's default targets written out.

    Raises:
      UserError: one line with everything that is wrong, also settings that the method would not read.
    """
    known = {field.name: field for field in dataclasses.fields(Settings)}
    if unknown := fields.keys() - known:
        raise UserError(f"peft has no setting {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    values = {name: field.default for name, field in known.items()} | dict(fields)
    values["method"] = str(values["method"]).replace("_", "-")
    if values["method"] == "vpt":
        values["method"] = "vpt-deep"
    values["targets"] = _names(values["targets"])
    values["ranks"] = tuple(int(rank) for rank in values["ranks"])
    method = METHODS.get(values["method"])
    if method is None:
        raise UserError(f"peft.method is {values['method']!r}; there are {', '.join(METHODS)}")
    if values["preset"]:
        key = (values["method"], values["preset"])
        if key not in PRESETS:
            there = [preset for name, preset in PRESETS if name == values["method"]]
            raise UserError(f"peft.preset is {key[1]!r}; {key[0]} has {', '.join(there) or 'none'}")
        values |= PRESETS[key]
    values["targets"] = values["targets"] or method.default
    settings = Settings(**values)
    if problems := _problems(settings, method):
        raise UserError("; ".join(problems))
    return settings


def _names(targets: str | Sequence[str]) -> tuple[str, ...]:
    parts = [targets] if isinstance(targets, str) else list(targets)
    return tuple(name.strip() for part in parts for name in str(part).split(",") if name.strip())


def _problems(settings: Settings, method: _Method) -> list[str]:
    found = []
    default = Settings()
    for field in dataclasses.fields(Settings):
        name, value = field.name, getattr(settings, field.name)
        if name in ("method", "rank", "ranks", "targets", "preset") or value == getattr(default, name):
            continue
        if name not in method.uses:
            found.append(f"peft.{name} is {value!r}, which {settings.method} does not read")
    for name, options in (
        ("projection", PROJECTIONS),
        ("start", STARTS),
        ("position", POSITIONS),
        ("activation", ACTIVATIONS),
    ):
        if getattr(settings, name) not in options:
            found.append(f"peft.{name} is {getattr(settings, name)!r}, not {' or '.join(options)}")
    if not settings.ao:
        for name in ("start", "normalize"):
            if getattr(settings, name) != getattr(default, name):
                found.append(f"peft.{name} belongs to peft.projection=ao")
        if settings.tied and not settings.scales:
            found.append("peft.tied: a tied pair of free matrices starts as nothing only with peft.scales=True")
    for target in settings.targets:
        if (name := _parse_target(target)[0]) not in method.targets:
            found.append(f"peft.targets: {settings.method} has no target {name!r}; it has {', '.join(method.targets)}")
    if settings.rank < 1 or any(rank < 0 for rank in settings.ranks):
        found.append("peft.rank is at least 1, and entries of peft.ranks at least 0")
    if not 0 <= settings.dropout < 1:
        found.append(f"peft.dropout is {settings.dropout}, not from 0, below 1")
    if settings.method == "vpt-deep" and len({rank for rank in settings.ranks if rank}) > 1:
        found.append("peft.ranks: deep prompts replace one another, so each block has as many")
    if settings.method == "vpt-shallow" and settings.targets != ("prompt",):
        found.append("peft.targets: shallow prompts enter before the first block")
    return found


def to_dict(settings: Settings) -> dict[str, Any]:
    """A plain dict for JSON; :func:`make_settings` reads it back."""
    return dataclasses.asdict(settings)


def from_config(group: Mapping[str, Any]) -> Settings | None:
    """The settings of a config's ``peft`` group, None without a method."""
    return make_settings(dict(group)) if group["method"] else None
