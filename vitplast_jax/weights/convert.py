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
from vitplast_jax.weights import dialects, places, readers, resize, structure, view
from vitplast_jax.weights.places import identity, resolve
from vitplast_jax.weights.report import Problems, Report

__all__ = ["Loaded", "Report", "class_names", "identity", "load", "load_model", "load_tree", "resolve"]

logger = logging.getLogger(__name__)
CHECKPOINT = "checkpoint"  # the Orbax checkpoint in a folder of ours, beside model.json


def load_tree(source, spec=None, num_classes=None, img_size=None, seed=0, ema=False, in_chans=None):
    """The parameters of a source of weights as our tree.

    Args:
        source: file, folder, "hf-hub:ID" or a shipped name.
        spec: a spec or a name (models/names.py), where the source does not say by itself which model it is.
        num_classes: None keeps the source's head; 0 drops it; another number than the source's draws a new one.
        img_size: side or (height, width); the position table is resized for it. None: what the source was made for,
            or the size that `spec` says.
        seed: of a new head, whose values depend on (seed, num_classes, width) alone.
        ema: take the averaged weights of a training checkpoint.
        in_chans: channels of the images, to which the patch kernel is adapted; None: the source's.
    Returns: (spec, tree of numpy arrays in the source's dtype, `Report`).
    Raises: UserError: one line with everything that does not fit.
    """
    path = resolve(source)
    tensors = _read(path, ema)
    seen = view.View(tensors, source)
    notes = list(tensors.notes)
    told, description = _told(path, tensors, spec, seen.dialect, notes)
    asked = None if img_size is None else specs.pair(img_size)
    if seen.dialect.family == "gpt2":
        file_spec, positions = structure.infer_gpt2(seen, told, source), None
        _check_tied_head(seen, source)
    else:
        file_spec, positions = structure.infer(seen, told, source, asked)
        if file_spec.pos_embed is False and not (asked or told.get("img_size")):
            notes.append(f"the weights are for any image size; {file_spec.img_size[0]} pixels were taken")
    target = _with_channels(_target(file_spec, told, num_classes, asked), in_chans, notes)
    _check_norm(seen, target, source)

    filled, problems, used = {}, Problems(), set()
    new_head = _new_head(seen, target, num_classes)
    expected = trees.flatten(models.abstract_parameters(target))
    for where, leaf in expected.items():
        if where in new_head:
            continue
        rule = seen.rule(where)
        if rule is None:
            names = [rule.names for rule in seen.dialect.rules_for(where, seen.norm_on)]
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
        if where == "cls_token" and target.pos_embed and target.pos_prefix == "none" and positions.prefix == 1:
            array = array + seen.read("pos_embed")[:, :1]
            notes.append("the class token's position was added to the token, as timm does where registers have none")
        if where == "patch_embed/kernel" and in_chans and array.ndim == 4:
            array = resize.adapt_channels(array, in_chans)
        if where == "pos_embed":
            array = _fitted_positions(array, positions, file_spec, target, notes)
        _check(where, rule, array, leaf.shape, problems)
        heads = seen.heads(where)
        if heads not in (None, target.heads):
            problems.shapes.append(f"{where} ({rule.names[0]}) is for {heads} heads, the model has {target.heads}")
        filled[where] = array
    if new_head or not target.num_classes:
        used.update(name for name in seen.tensors if _is_head(seen, name, ("head", "head_dist")))
    elif getattr(target, "distilled", False) and target.pool != "distilled" and seen.has("head_dist/kernel"):
        used.update(name for name in seen.tensors if _is_head(seen, name, ("head_dist",)))
        notes.append(f"the head of the distillation token was left out: pool={target.pool!r} was told")
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


def load_model(source, num_classes=None, img_size=None, seed=0, model=None, ema=False, in_chans=None):
    """A model with the weights of a source; arguments as of `load_tree`, `model` being its `spec`.

    Parameters are float32 whatever the source's dtype, which is exact for the 16-bit types.
    """
    import jax.numpy as jnp

    spec, tree, _ = load_tree(source, model, num_classes, img_size, seed, ema, in_chans)
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

    A spec is taken whole. What travels with the weights and what the source's code fixes are facts; a name's
    numerics and preprocessing only stand in where there are none.
    """
    description = places.describe(path, tensors.metadata)
    if description.origin:
        notes.append(f"model told by {description.origin}")
    told = specs.spec(spec) if isinstance(spec, str) and spec else spec or description.spec
    if told and isinstance(told, specs.GPT2Spec) != (dialect.family == "gpt2"):
        raise UserError(f"{path}: {told.name} is told, but these are {dialect.name} weights")
    if isinstance(spec, specs.Spec):
        for field, value in dialect.fields.items():
            if getattr(spec, field, value) != value:
                notes.append(f"{field} is {getattr(spec, field)} as told; {dialect.name} weights come with {value}")
        return _all_fields(spec), description
    found = _all_fields(description.spec) if description.spec else dict(description.fields)
    if not spec:
        return found, description
    named = places.named_fields(told)
    fixed = dialect.fields.keys() | dialect.without_registers.keys()
    facts = {field: value for field, value in found.items() if value is not None}
    for field in ("width", "depth", "heads", "hidden", "patch_size"):
        if field in found and found[field] is not None and field in named and facts[field] != named[field]:
            raise UserError(f"{description.origin} says {field} {facts[field]}, but {spec} has {named[field]}")
    size = {"img_size": named["img_size"]} if "img_size" in named else {}
    named = {field: value for field, value in named.items() if field not in fixed}
    return named | facts | size | {"name": spec}, description


def _all_fields(spec):
    return {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}


def _target(file_spec, told, num_classes, asked):
    """The spec of the model that is wanted."""
    classes = told.get("num_classes", file_spec.num_classes) if num_classes is None else num_classes
    if classes < 0:
        raise UserError(f"num_classes is {classes}; expected 0 (no head) or the number of classes")
    if isinstance(file_spec, specs.GPT2Spec):
        return specs.replace(file_spec, num_classes=classes)
    size = asked or (specs.pair(told["img_size"]) if told.get("img_size") else file_spec.img_size)
    return specs.replace(file_spec, num_classes=classes, img_size=size)


def _with_channels(target, channels, notes):
    """The spec for images of another number of channels; statistics that differ by channel are then unknown."""
    if not channels or channels == getattr(target, "in_chans", channels):
        return target
    told = target.preprocessing
    if told is not None:
        mean, std = ({*values} for values in (told.mean, told.std))
        same = len(mean) == len(std) == 1
        told = dataclasses.replace(told, mean=(*mean,) * channels, std=(*std,) * channels) if same else None
    notes.append(f"patch kernel adapted from {target.in_chans} to {channels} channels")
    return specs.replace(target, in_chans=channels, preprocessing=told)


def _is_head(seen, name, heads):
    paths = [f"{head}/{leaf}" for head in heads for leaf in ("kernel", "bias")]
    return any(name in rule.names for path in paths for rule in seen.dialect.rules_for(path, seen.norm_on))


def _new_head(seen, target, num_classes):
    """The paths of the head where it is to be drawn: asked for, and the source has none of that size."""
    if not num_classes or isinstance(target, specs.GPT2Spec):
        return []
    heads = ("head", "head_dist") if target.pool == "distilled" else ("head",)
    paths = [f"{head}/{leaf}" for head in heads for leaf in ("kernel", "bias")]
    if all(seen.has(path) for path in paths):
        biases = [seen.tensors[seen.rule(f"{head}/bias").names[0]] for head in heads]
        if all(bias.shape == (num_classes,) for bias in biases):
            return []
    return paths


def _check_norm(seen, target, source):
    """What a file's names say of the final norm cannot be told otherwise: the numbers would be others."""
    own = seen.dialect in (dialects.OURS, dialects.OURS_GPT2)
    if not own and isinstance(target, specs.ViTSpec) and target.norm_on != seen.norm_on:
        acts_on = {"pooled": "the mean of the patches", "tokens": "every token"}
        raise UserError(
            f"{source}: its final norm acts on {acts_on[seen.norm_on]}, that of pool={target.pool!r} with "
            f"fc_norm={target.fc_norm} on {acts_on[target.norm_on]}"
        )


def _check_tied_head(seen, source):
    head = seen.dropped.get("lm_head.weight")
    if head is not None and not np.array_equal(head, seen.read("wte")):
        raise UserError(f"{source}: lm_head.weight differs from wte.weight; only GPT-2 with a tied head is known here")


def _fitted_positions(table, positions, file_spec, target, notes):
    """The position table for the target's grid, with rows for those of its prefix tokens that have one."""
    if positions.prefix > target.prefix_rows:
        table = table[:, positions.prefix - target.prefix_rows :]
    elif positions.prefix < target.prefix_rows:
        # As timm writes these models: the row is in the token already.
        rows = np.zeros((1, target.prefix_rows - positions.prefix, table.shape[-1]), table.dtype)
        table = np.concatenate([rows, table], axis=1)
        notes.append("the class token's position is zero: the source has it in the token")
    if positions.grid != target.grid:
        table = resize.resize_positions(
            table, target.prefix_rows, positions.grid, target.grid, target.antialias, target.pos_offset
        )
        old, new = ("x".join(map(str, grid)) for grid in (positions.grid, target.grid))
        kind = "antialias" if target.antialias else f"plain, offset {target.pos_offset:g}"
        notes.append(f"position table resized from {old} to {new} patches (torch bicubic, {kind})")
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
