"""Parameter trees: nested dicts of arrays, and the paths that everything else speaks in.

In: nested dicts whose keys are names, or ints for the members of a list of blocks.
Out: flat dicts keyed by paths such as ``"blocks/3/attn/qkv/kernel"``, or nested dicts again.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Tree = dict[Any, Any]


def flatten(tree: Mapping, prefix: str = "") -> dict[str, Any]:
    """Returns ``{path: leaf}`` in the order of the tree; empty sub-trees vanish."""
    flat = {}
    for key, value in tree.items():
        path = f"{prefix}/{key}" if prefix else str(key)
        if isinstance(value, Mapping):
            flat.update(flatten(value, path))
        else:
            flat[path] = value
    return flat


def unflatten(flat: Mapping[str, Any]) -> Tree:
    """The inverse of :func:`flatten`: segments made of digits become int keys, as in a list of blocks."""
    tree: Tree = {}
    for path, leaf in flat.items():
        *parents, last = [int(part) if part.isdigit() else part for part in path.split("/")]
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree


def map_paths(fn: Callable[[str, Any], Any], tree: Mapping) -> Tree:
    """Replaces every leaf by ``fn(path, leaf)``."""
    return unflatten({path: fn(path, leaf) for path, leaf in flatten(tree).items()})


def partition(tree: Mapping, mask: Mapping) -> tuple[Tree, Tree]:
    """Splits a tree by a tree of bools of the same structure into (selected, rest), both pruned."""
    flat, chosen = flatten(tree), flatten(mask)
    if flat.keys() != chosen.keys():
        odd = sorted(flat.keys() ^ chosen.keys())
        raise ValueError(f"mask and tree differ in {len(odd)} paths, e.g. {odd[:5]}")
    selected = {path: leaf for path, leaf in flat.items() if chosen[path]}
    rest = {path: leaf for path, leaf in flat.items() if not chosen[path]}
    return unflatten(selected), unflatten(rest)


def combine(*trees: Mapping) -> Tree:
    """Joins pruned trees that have no path in common; the inverse of :func:`partition`."""
    flat: dict[str, Any] = {}
    for tree in trees:
        part = flatten(tree)
        if twice := flat.keys() & part.keys():
            raise ValueError(f"trees share {len(twice)} paths, e.g. {sorted(twice)[:5]}")
        flat.update(part)
    return unflatten(flat)


def count(tree: Mapping) -> int:
    """The number of parameters: array elements, an array that stands at several paths counted once.

    This is the one counter of the project; the global shape of a sharded array counts, not its shards.
    """
    leaves = {id(leaf): leaf for leaf in flatten(tree).values()}
    return sum(int(np.prod(leaf.shape, dtype=np.int64)) for leaf in leaves.values())
