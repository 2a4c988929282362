"""Adapter files: everything that was trained, and nothing else.

In: a model with something in its slots. Out: a folder with ``adapter.safetensors`` (what fills the slots, frozen start
vectors included, and every base leaf that has changed: head, biases, norms) and ``adapter.json`` (settings, spec, the
identity of the base weights that are needed beside it).
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from vitplast_jax import components, models, trees
from vitplast_jax.errors import UserError
from vitplast_jax.files import write_json
from vitplast_jax.models import specs
from vitplast_jax.peft.attach import Origin
from vitplast_jax.peft.settings import make_settings, to_dict
from vitplast_jax.weights import export, readers

FORMAT = 1
_WEIGHTS, _DESCRIPTION = "adapter.safetensors", "adapter.json"


def save(model: models.ViT, directory: str | os.PathLike, trained=("head",)):
    """Writes the adapter of a model.

    Args:
      model: with something in its slots; where it was attached here, or is that of a run, the base leaves that have
        changed since are found by comparison.
      directory: the folder.
      trained: selectors of base components that are saved whether they have changed or not.
    Raises:
      UserError: the model has nothing in its slots, or a selector matches nothing.
    """
    if model.slots is None:
        raise UserError("the model has nothing in its slots, so there is no adapter to save")
    saved = trained_leaves(model, trained)
    rest = {path: leaf for path, leaf in trees.flatten(models.parameters(model)).items() if path not in saved}
    description = {
        "format": FORMAT,
        "peft": to_dict(model.slots),
        "spec": specs.to_dict(model.spec),
        "base": {"parameters": len(rest), "dtype": _dtype(rest), "sha256": _digest(rest)},
    }
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {path: np.asarray(leaf) for path, leaf in saved.items()}
    export.write_safetensors(arrays, folder / _WEIGHTS, {"format": "vitplast_jax"})
    write_json(folder / _DESCRIPTION, description)


def load(base: models.ViT, directory: str | os.PathLike) -> models.ViT:
    """The base model with a saved adapter: the model that :func:`save` was given.

    A head in the adapter takes the place of the base's, whatever number of classes that has.

    Raises:
      UserError: no adapter there, or one of other base weights.
    """
    folder = Path(directory)
    try:
        description = json.loads((folder / _DESCRIPTION).read_text())
        settings, spec = make_settings(description["peft"]), specs.from_dict(description["spec"])
        expected = description["base"]
    except FileNotFoundError:
        raise UserError(f"{folder} holds no adapter: it has no {_DESCRIPTION}") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{folder / _DESCRIPTION} is damaged: it is not what peft.save wrote") from None
    if base.slots is not None:
        raise UserError(f"the model already has {base.slots.method} in its slots; load into the plain model")
    tensors = readers.read_tensors(folder / _WEIGHTS)
    saved = {name: jnp.asarray(np.asarray(tensors[name])) for name in tensors}
    kept = trees.flatten(models.parameters(base))
    rest = {path: leaf for path, leaf in kept.items() if path not in saved}
    if expected["dtype"] != "float32":  # a run may keep its frozen weights in 16 bits
        rest = {path: leaf.astype(expected["dtype"]) for path, leaf in rest.items()}
    if len(rest) != expected["parameters"] or _digest(rest) != expected["sha256"]:
        raise UserError(
            f"{folder} belongs to other base weights ({spec.name}, {expected['parameters']} arrays, sha256 "
            f"{expected['sha256'][:12]}...); load those that it was trained on"
        )
    order = trees.flatten(models.abstract_parameters(spec, settings))
    both = rest | saved
    model = models.build(spec, trees.unflatten({path: both[path] for path in order if path in both}), settings)
    model.origin = Origin(base=trees.unflatten(kept | rest))
    return model


def trained_leaves(model: models.ViT, trained=()) -> dict:
    """{path: leaf} of what fills the slots and of the base leaves that have changed or that ``trained`` names."""
    params = models.parameters(model)
    flat = trees.flatten(params)
    before = trees.flatten(model.origin.base) if model.origin is not None and model.origin.base is not None else {}
    there = components.counts(params)
    wanted = [name for name in map(str, components.parse(trained)) if name != "head" or "head" in there]
    named = trees.flatten(components.mask(params, wanted))
    return {
        path: leaf
        for path, leaf in flat.items()
        if components.locate(path).component == "peft" or named[path] or _changed(leaf, before.get(path, leaf))
    }


def _changed(leaf, before) -> bool:
    return leaf is not before and not (
        leaf.shape == before.shape and np.array_equal(np.asarray(leaf), np.asarray(before))
    )


def _dtype(leaves: Mapping) -> str:
    """The dtype of all leaves, "float32" where they have several."""
    found = {str(leaf.dtype) for leaf in leaves.values()}
    return found.pop() if len(found) == 1 else "float32"


def _digest(leaves: Mapping) -> str:
    """sha256 over values as float32, so that weights kept in another float type that holds them exactly agree."""
    digest = hashlib.sha256()
    for path in sorted(leaves):
        digest.update(path.encode())
        digest.update(np.ascontiguousarray(np.asarray(leaves[path]).astype(np.float32, copy=False)))
    return digest.hexdigest()
