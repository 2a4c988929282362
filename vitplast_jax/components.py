"""The vocabulary: which component of which block a parameter belongs to, and the selectors that name them.

In: parameter paths (``"blocks/3/attn/qkv/kernel"``) and selectors (``"mha"``, ``"fc1@0-5"``, ``"all@11"``).
Out: trees of bools (for optax), trees of component names, counts.

Components are those of arXiv 2602.06883 (LN1, MHA, LN2, FC1, FC2) and what surrounds them. Every parameter of every
family has exactly one.
"""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from vitplast_jax import trees
from vitplast_jax.errors import UserError

BLOCK_COMPONENTS = ("ln1", "mha", "ls1", "ln2", "fc1", "fc2", "ls2")
COMPONENTS = ("emb", *BLOCK_COMPONENTS, "final_norm", "head", "peft")

# The first rule whose pattern matches the whole path decides; (?P<block>) is the block's index.
_RULES = tuple(
    (re.compile(pattern), component)
    for pattern, component in (
        (r"(blocks/(?P<block>\d+)/)?(.+/)?(slot|adapter|prompt)s?(_\w+)?/.+", "peft"),
        (r"(patch_embed/.+|(cls|reg|dist)_token|pos_embed|wte|wpe|norm_pre/.+)", "emb"),
        (r"blocks/(?P<block>\d+)/norm1/.+", "ln1"),
        (r"blocks/(?P<block>\d+)/attn/.+", "mha"),
        (r"blocks/(?P<block>\d+)/ls1/.+", "ls1"),
        (r"blocks/(?P<block>\d+)/norm2/.+", "ln2"),
        (r"blocks/(?P<block>\d+)/mlp/(fc1|gate)/.+", "fc1"),
        (r"blocks/(?P<block>\d+)/mlp/fc2/.+", "fc2"),
        (r"blocks/(?P<block>\d+)/ls2/.+", "ls2"),
        (r"norm/.+", "final_norm"),
        (r"(head|head_dist|pre_logits)/.+", "head"),
    )
)


# The frozen start vectors of AO (peft/pairs.py): part of an adapter, but nothing that trains.
_FIXED = re.compile(r"(.+/)?start_\w+")


class Place(NamedTuple):
    """Where a parameter lives; ``block`` is None outside the blocks."""

    component: str
    block: int | None


class Selector(NamedTuple):
    """One parsed selector; ``blocks`` is None for every block (and for what lies outside the blocks)."""

    component: str
    blocks: range | None

    def __str__(self):
        if self.blocks is None:
            return self.component
        first, last = self.blocks[0], self.blocks[-1]
        return f"{self.component}@{first}" if first == last else f"{self.component}@{first}-{last}"

    def selects(self, place: Place) -> bool:
        if self.component not in ("all", place.component):
            return False
        return self.blocks is None or (place.block is not None and place.block in self.blocks)


def locate(path: str) -> Place:
    """Returns the component and the block of a parameter path; a path that no rule covers is a ValueError."""
    for pattern, component in _RULES:
        if match := pattern.fullmatch(path):
            block = match.groupdict().get("block")
            return Place(component, None if block is None else int(block))
    raise ValueError(f"parameter {path!r} belongs to no component: add a rule to components.py")


def is_fixed(path: str) -> bool:
    """Whether a parameter never trains, whatever is selected: the frozen start vectors in a slot."""
    return _FIXED.fullmatch(path) is not None and locate(path).component == "peft"


def parse(selectors: str | Iterable[str]) -> tuple[Selector, ...]:
    """Parses selectors, ``"mha,fc1@0-5"`` or a sequence of such strings, without looking at a model.

    Raises:
      UserError: a selector is malformed or names no known component.
    """
    parts = [selectors] if isinstance(selectors, str) else list(selectors)
    names = [name.strip() for part in parts for name in str(part).split(",") if name.strip()]
    return tuple(_parse_one(name) for name in names)


def _parse_one(text: str) -> Selector:
    match = re.fullmatch(r"(\w+)(?:@(\d+)(?:-(\d+))?)?", text)
    if not match:
        raise UserError(f"selector {text!r} is not COMPONENT, COMPONENT@BLOCK or COMPONENT@FIRST-LAST (mha, fc1@0-5)")
    component, first, last = match.groups()
    if component not in ("all", *COMPONENTS):
        raise UserError(f"selector {text!r} names no component; there are: all {' '.join(COMPONENTS)}")
    if first is None:
        return Selector(component, None)
    if component not in ("all", "peft", *BLOCK_COMPONENTS):
        raise UserError(f"selector {text!r}: {component} lies outside the blocks, write {component!r} alone")
    blocks = range(int(first), int(last or first) + 1)
    if not blocks:
        raise UserError(f"selector {text!r}: the last block comes before the first")
    return Selector(component, blocks)


def mask(params: Mapping, selectors: str | Iterable[str]) -> trees.Tree:
    """A tree of bools, True where a selector names the parameter; for ``optax`` and :func:`trees.partition`.

    Parameters that never train (:func:`is_fixed`) are not marked by any selector.

    Args:
      params: the tree of parameters (arrays or shapes).
      selectors: for example ``["mha", "fc1@0-5"]``; an empty list marks nothing.
    Raises:
      UserError: a selector matches nothing, or a block it names does not exist; the message lists what exists.
    """
    places = {path: locate(path) for path in trees.flatten(params)}
    parsed = parse(selectors)
    for selector in parsed:
        _check_matches(selector, places.values())
    return trees.unflatten(
        {path: any(s.selects(place) for s in parsed) and not is_fixed(path) for path, place in places.items()}
    )


def _check_matches(selector: Selector, places: Iterable[Place]):
    matched = [place for place in places if selector.selects(place)]
    there = {place.block for place in matched}
    missing = [] if selector.blocks is None else [block for block in selector.blocks if block not in there]
    if matched and not missing:
        return
    existing = {place.component for place in places}
    blocks = {place.block for place in places if place.block is not None}
    listing = " ".join(c for c in COMPONENTS if c in existing)
    what = f"has no block {missing[0]}" if matched or missing else "matches nothing"
    raise UserError(
        f"selector '{selector}' {what} in this model; it has: all {listing}"
        + (f"; blocks 0-{max(blocks)}" if blocks else "")
    )


def labels(params: Mapping) -> trees.Tree:
    """A tree of component names, one for each parameter."""
    return trees.map_paths(lambda path, _: locate(path).component, params)


def counts(params: Mapping) -> dict[str, int]:
    """The number of parameters of each component that the model has, in the order of :data:`COMPONENTS`."""
    flat = trees.flatten(params)
    groups: dict[str, dict] = {}
    for path, leaf in flat.items():
        groups.setdefault(locate(path).component, {})[path] = leaf
    return {name: trees.count(groups[name]) for name in COMPONENTS if name in groups}
