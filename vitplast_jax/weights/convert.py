"""From any source of weights to our model: one path for files, folders, shipped names and the hub.

In: where the weights are and, where they do not say it themselves, which model they are. Out: (spec, tree, report), or
a model. Strict: every tensor of the source is used or on a named list, every parameter of the model is filled, and all
that does not fit is said in one error. Only the head may be drawn anew, and only when another number of classes is
asked for.
"""

import dataclasses
import logging
import math
import os

import ml_dtypes
import numpy as np

from vitplast_jax import models, trees
from vitplast_jax.errors import UserError
from vitplast_jax.models import specs, vit
from vitplast_jax.weights import places, readers, resize, structure, view
from vitplast_jax.weights.places import identity, resolve
from vitplast_jax.weights.report import Problems, Report

__all__ = ["Loaded", "Report", "class_names", "identity", "load", "load_model", "load_tree", "resolve"]

logger = logging.getLogger(__name__)
CHECKPOINT = "checkpoint"  # the Orbax checkpoint in a folder of ours, beside model.json


def load_tree(source, spec=None, num_classes=None, img_size=None, seed=0, ema=False):
    """The parameters of a source of weights as our tree.

    Args:
        source: file, folder, "hf-hub:ID" or a shipped name.
        spec: a `ViTSpec` or a timm name, where the source does not say by itself which model it is.
        num_classes: None keeps the source's head; 0 drops it; another number than the source's draws a new one.
        img_size: side or (height, width); the position table is resized for it. None: what the source was made for,
            or the size that `spec` says.
        seed: of a new head, whose values depend on (seed, num_classes, width) alone.
        ema: take the averaged weights of a training checkpoint.
    Returns: (ViTSpec, tree of numpy arrays in the source's dtype, `Report`).
    Raises: UserError: one line with everything that does not fit.
    """
    path = resolve(source)
    tensors = _read(path, ema)
    seen = view.View(tensors, source)
    notes = list(tensors.notes)
    told, description = _told(path, tensors, spec, seen.dialect, notes)
    asked = None if img_size is None else specs.pair(img_size)
    file_spec, positions = structure.infer(seen, told, source, asked)
    target = _target(file_spec, told, num_classes, asked)

    filled, problems, used = {}, Problems(), set()
    new_head = _new_head(seen, target, num_classes)
    expected = trees.flatten(models.abstract_parameters(target))
    for where, leaf in expected.items():
        if where in new_head:
            continue
        rule = seen.rule(where)
        if rule is None:
            names = [rule.names for rule in seen.dialect.rules_for(where, target.pool)]
            wanted = (
                " or ".join(str(next(name for name in group if name)) for group in names) or "no name in this dialect"
            )
            problems.missing.append(f"{where} ({wanted})")
            continue
        used.update(name for name in rule.names if name)
        try:
            array = seen.read(where)
        except view.ShapeError as error:
            problems.shapes.append(str(error))
            continue
        if where == "cls_token" and positions.prefix == 1 < target.prefix:
            array = array + seen.read("pos_embed")[:, :1]
            notes.append("the class token's position was added to the token, as timm does where registers have none")
        if where == "pos_embed":
            array = _fitted_positions(array, positions, file_spec, target, notes)
        _check(where, rule, array, leaf.shape, problems)
        heads = seen.heads(where)
        if heads not in (None, target.heads):
            problems.shapes.append(f"{where} ({rule.names[0]}) is for {heads} heads, the model has {target.heads}")
        filled[where] = array
    if new_head or not target.num_classes:
        used.update(name for name in seen.tensors if _is_head(seen, name))
    problems.unused = [seen.original[name] for name in seen.tensors if name not in used]
    problems.raise_if_any(f"{source}: its {seen.dialect.name} weights do not fit {target.name}")
    _check_pre_logits(seen, target, new_head, filled, source, notes)
    if new_head:
        filled.update({w: np.asarray(vit.initial_value(w, expected[w].shape, seed, target)) for w in new_head})
        old = f"{file_spec.num_classes} classes" if file_spec.num_classes else "no head"
        logger.warning("%s has %s: head drawn anew for %d (seed %d)", source, old, target.num_classes, seed)
    tree = trees.unflatten({where: filled[where] for where in expected})
    report = Report(
        source=os.fspath(source),
        container=tensors.container,
        dialect=seen.dialect.name,
        spec=target,
        parameters=trees.count(tree),
        wrapper=tensors.wrapper,
        prefix=seen.prefix,
        ignored=tuple(seen.ignored),
        reinitialised=tuple(new_head),
        notes=tuple(notes),
        class_names=description.class_names if target.num_classes == file_spec.num_classes else None,
    )
    return target, tree, report


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What a run needs of its base weights. `identity`: {"source", "sha256"}."""

    spec: specs.ViTSpec
    params: trees.Tree
    class_names: tuple[str, ...]
    notes: tuple[str, ...]
    identity: dict[str, str]


def load(source, model=None, num_classes=None, img_size=None, seed=0, ema=False):
    """`load_tree` together with the identity of the source's bytes, as `Loaded`."""
    spec, params, report = load_tree(source, model, num_classes, img_size, seed, ema)
    return Loaded(spec, params, report.class_names or (), report.notes, identity(source))


def class_names(source):
    """The class names that a source of weights carries, () where it carries none."""
    path = resolve(source)
    metadata = {} if os.path.isdir(path) else readers.read_tensors(path).metadata
    return places.describe(path, metadata).class_names or ()


def load_model(source, num_classes=None, img_size=None, seed=0, model=None, ema=False):
    """A model with the weights of a source; arguments as of `load_tree`, `model` being its `spec`.

    Parameters are float32 whatever the source's dtype, which is exact for the 16-bit types.
    """
    import jax.numpy as jnp

    spec, tree, _ = load_tree(source, spec=model, num_classes=num_classes, img_size=img_size, seed=seed, ema=ema)
    return models.build(spec, trees.map_paths(lambda _, leaf: jnp.asarray(leaf, jnp.float32), tree))


def _read(path, ema):
    """The tensors of a path; a folder of ours may hold an Orbax checkpoint."""
    folder = os.path.join(path, CHECKPOINT)
    if not os.path.isdir(folder):
        return readers.read_tensors(path, ema)
    import orbax.checkpoint as ocp

    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            structure_of = checkpointer.metadata(os.path.abspath(folder)).item_metadata.tree
            restore = _as_numpy(ocp, structure_of)
            tree = checkpointer.restore(os.path.abspath(folder), restore_args=restore)
    except Exception as error:  # Orbax and the storage below it raise errors of many kinds
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:160]
        raise UserError(
            f"{folder}: no Orbax checkpoint that can be read ({reason}); import the weights again"
        ) from error
    return readers.Tensors({name: np.asarray(leaf) for name, leaf in trees.flatten(tree).items()}, "Orbax")


def _as_numpy(ocp, tree):
    if isinstance(tree, dict):
        return {key: _as_numpy(ocp, value) for key, value in tree.items()}
    return ocp.RestoreArgs(restore_type=np.ndarray)


def _told(path, tensors, spec, dialect, notes):
    """(fields of the model known from outside the tensors, the `Description` found beside them).

    A `ViTSpec` is taken whole. What travels with the weights and what the source's code fixes are facts; a name's
    numerics and preprocessing only stand in where there are none.
    """
    description = places.describe(path, tensors.metadata)
    if description.origin:
        notes.append(f"model told by {description.origin}")
    if isinstance(spec, specs.ViTSpec):
        for field, value in dialect.fields.items():
            if getattr(spec, field) != value:
                notes.append(f"{field} is {getattr(spec, field)} as told; {dialect.name} weights come with {value}")
        return _all_fields(spec), description
    found = _all_fields(description.spec) if description.spec else dict(description.fields)
    if not spec:
        return found, description
    named = places.named_fields(specs.spec(spec))
    facts = {field: value for field, value in (dict(dialect.fields) | found).items() if value is not None}
    for field in ("width", "depth", "heads", "hidden", "patch_size"):
        if field in facts and facts[field] != named[field]:
            raise UserError(f"{description.origin} says {field} {facts[field]}, but {spec} has {named[field]}")
    return named | facts | {"img_size": named["img_size"], "name": spec}, description


def _all_fields(spec):
    return {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}


def _target(file_spec, told, num_classes, asked):
    """The spec of the model that is wanted."""
    classes = told.get("num_classes", file_spec.num_classes) if num_classes is None else num_classes
    if classes < 0:
        raise UserError(f"num_classes is {classes}; expected 0 (no head) or the number of classes")
    size = asked or (specs.pair(told["img_size"]) if told.get("img_size") else file_spec.img_size)
    return specs.replace(file_spec, num_classes=classes, img_size=size)


def _is_head(seen, name):
    return any(
        name in rule.names for path in ("head/kernel", "head/bias") for rule in seen.dialect.rules_for(path, seen.pool)
    )


def _new_head(seen, target, num_classes):
    """The paths of the head where it is to be drawn: asked for, and the source has none of that size."""
    if not num_classes:
        return []
    if seen.has("head/kernel") and seen.has("head/bias"):
        kernel = seen.tensors[seen.rule("head/bias").names[0]]
        if kernel.shape == (num_classes,):
            return []
    return ["head/kernel", "head/bias"]


def _fitted_positions(table, positions, file_spec, target, notes):
    """The position table for the target's grid, with rows for its prefix tokens or without."""
    keep = positions.prefix if target.pos_prefix else 0
    if positions.prefix and not target.pos_prefix:
        table = table[:, positions.prefix :]
    if positions.grid != target.grid:
        table = resize.resize_positions(table, keep, positions.grid, target.grid)
        old, new = ("x".join(map(str, grid)) for grid in (positions.grid, target.grid))
        notes.append(f"position table resized from {old} to {new} patches (torch bicubic, antialias)")
    return table


def _check(where, rule, array, shape, problems):
    named = f"{where} ({', '.join(name for name in rule.names if name)})"
    if tuple(array.shape) != tuple(shape):
        problems.shapes.append(f"{named} is {list(array.shape)}, the model's {list(shape)}")
    elif array.dtype.kind != "f" and array.dtype != ml_dtypes.bfloat16:
        problems.values.append(f"{named} has dtype {array.dtype}, expected a float type")
    elif not _finite(array):
        problems.values.append(f"{named} holds NaN or infinity")


def _finite(array):
    """One pass and no copy: a sum is finite unless a value is not (no sum of float32 leaves float64)."""
    with np.errstate(all="ignore"):
        return math.isfinite(float(np.sum(array, dtype=np.float64))) or bool(np.isfinite(array).all())


def _check_pre_logits(seen, target, new_head, filled, source, notes):
    """in21k files of the JAX code have one more layer before their head, which neither timm nor we have."""
    if not any(name.startswith("pre_logits") for name in seen.dropped) or not target.num_classes or new_head:
        return
    if np.any(filled["head/kernel"]):
        raise UserError(
            f"{source}: its head was trained on top of pre_logits, a layer that the model has not; "
            "ask for num_classes=0 or for a new head"
        )
    notes.append("the source's head is all zeros")
