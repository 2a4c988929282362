"""Which tensors of a file are which, once its naming is known?

In: a file's tensors by its own names. Out: a `View`, which finds the dialect, cuts prefixes and reads by our paths.
"""

import re

import numpy as np

from vitplast_jax.errors import UserError
from vitplast_jax.weights import dialects

PREFIXES = (
    *("module.", "_orig_mod.", "backbone.", "model.", "encoder.", "teacher.", "student.", "net.", "trunk.", "visual."),
    *("params/img/", "params/", "opt/target/"),
)
# What stands beside a backbone in training checkpoints and belongs to the training alone.
BESIDE = (r"(module\.)?(head|dino_head|ibot_head)\.(mlp|last_layer)\b.*", r"opt/state/.*")


class View:
    """A file's tensors through its dialect. `tensors`: by the table's names; `prefix`: what was cut off them all;
    `ignored`: the names that were left out; `original`: table name -> the file's name; `norm_on`: what the names say of
    the final norm (`ViTSpec.norm_on`), "tokens" where they say nothing."""

    def __init__(self, tensors, source):
        beside = [name for name in tensors if _matches(name, BESIDE)]
        kept = {name: name for name in tensors if name not in set(beside)} or {name: name for name in tensors}
        beside = [name for name in beside if name not in kept]
        self.prefix = ""
        while shared := next((p for p in PREFIXES if kept and all(name.startswith(p) for name in kept)), None):
            kept = {name.removeprefix(shared): original for name, original in kept.items()}
            self.prefix += shared
        kept, arrays = _unstack(kept, tensors)
        self.dialect, self.original = _detect(kept, source)
        self.tensors = {name: arrays[original] for name, original in self.original.items()}
        left_out = [name for name in self.tensors if _matches(name, self.dialect.ignored)]
        self.dropped = {name: self.tensors.pop(name) for name in left_out}
        self.ignored = beside + [self.original[name] for name in left_out]
        if self.dialect is dialects.TIMM and _packed(self.tensors):
            self.dialect = dialects.TIMM_GATED
        pooled = [rule for rule in self.dialect.rules if rule.path == "norm/scale" and rule.norm_on == "pooled"]
        self.norm_on = "pooled" if any(rule.names[0] in self.tensors for rule in pooled) else "tokens"

    def rule(self, path):
        """The rule that fills a path, or None."""
        for rule in self.dialect.rules_for(path, self.norm_on):
            if all(name is None or name in self.tensors for name in rule.names):
                return rule
        return None

    def has(self, path):
        return self.rule(path) is not None

    def has_name(self, name):
        return name in self.tensors

    def heads(self, path):
        """How many heads the path's array is for, where the source keeps them apart; else None."""
        rule = self.rule(path)
        axis = rule.layout.heads_axis
        return None if axis is None else self.tensors[rule.names[0]].shape[axis]

    def read(self, path):
        """The path's array in our layout, a view of the file where no parts had to be joined."""
        rule = self.rule(path)
        first = self.tensors[next(name for name in rule.names if name)]
        if rule.part:
            place, count = rule.part
            if first.ndim == 0 or first.shape[0] % count:
                raise ShapeError(f"{path}: {rule.names[0]} has shape {first.shape}, expected {count} equal parts")
            first = np.split(first, count)[place]
        arrays = [np.zeros_like(first) if name is None else self.tensors[name] for name in rule.names]
        if rule.part:
            arrays = [first]
        for name, array in zip(rule.names, arrays, strict=True):
            if rule.layout.rank is not None and array.ndim != rule.layout.rank:
                raise ShapeError(f"{path}: {name} has shape {array.shape}, expected {rule.layout.rank} axes")
        if len({array.shape for array in arrays}) > 1:
            shapes = ", ".join(f"{n} {a.shape}" for n, a in zip(rule.names, arrays, strict=True) if n)
            raise ShapeError(f"{path}: its parts do not fit each other: {shapes}")
        return rule.layout.read(*arrays)


class ShapeError(Exception):
    """A tensor whose shape cannot be brought to our layout; becomes part of the one error of a conversion."""


def _matches(name, patterns):
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def _packed(tensors):
    """Whether timm's fc1 holds a gate too: twice as many rows as fc2 has columns."""
    fc1, fc2 = (tensors.get(f"blocks.0.mlp.{name}.weight") for name in ("fc1", "fc2"))
    return fc1 is not None and fc2 is not None and fc1.ndim == fc2.ndim == 2 and fc1.shape[0] == 2 * fc2.shape[1] > 0


def _unstack(names, tensors):
    """Blocks that were scanned over stand in one array [depth, ...]: one name and view for each of them."""
    arrays, result = dict(tensors), {}
    for name, original in names.items():
        if not name.startswith("Transformer/encoderblock/") or tensors[original].ndim == 0:
            result[name] = original
            continue
        for index, part in enumerate(np.asarray(tensors[original])):
            arrays[f"{original}[{index}]"] = part
            result[name.replace("encoderblock/", f"encoderblock_{index}/", 1)] = f"{original}[{index}]"
    return result, arrays


def _detect(names, source):
    """(the dialect whose marks are all among the names, table name -> the file's name)."""
    for dialect in dialects.DIALECTS:
        renamed = {}
        for name, original in names.items():
            new = name
            for pattern, replacement in dialect.renames:
                new = re.sub(pattern, replacement, new)
            renamed[new] = original
        # Marks are looked for before and after: chunks show in the old names, prefixes are gone in the new.
        marked = all(any(re.fullmatch(mark, name) for name in (*renamed, *names)) for mark in dialect.marks)
        if marked and not any(name in renamed for name in dialect.absent):
            if len(renamed) != len(names):
                raise UserError(f"{source}: two tensors have the same name once brought to {dialect.name}'s naming")
            return dialect, renamed
    examples = ", ".join(list(names)[:5])
    known = ", ".join(dialect.name for dialect in dialects.DIALECTS)
    raise UserError(f"{source}: its names belong to no ViT naming that is known ({known}); e.g. {examples}")
