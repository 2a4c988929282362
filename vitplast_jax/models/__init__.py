"""Models, and the two functions through which everybody else uses them: :func:`split` and :func:`apply`.

Only this room and peft/ know that the models are Flax NNX modules; all others see plain nested dicts of arrays.
"""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from vitplast_jax import trees
from vitplast_jax.errors import UserError
from vitplast_jax.models import gpt2, specs, vit
from vitplast_jax.models.gpt2 import GPT2
from vitplast_jax.models.scan import loops
from vitplast_jax.models.specs import GPT2Spec, Preprocessing, Spec, ViTSpec
from vitplast_jax.models.vit import ViT

__all__ = [
    "GPT2",
    "GPT2Spec",
    "Preprocessing",
    "Spec",
    "ViT",
    "ViTSpec",
    "abstract_parameters",
    "apply",
    "build",
    "create_model",
    "parameters",
    "split",
    "structure",
    "with_parameters",
]


_CLASSES = {ViTSpec: vit.ViT, GPT2Spec: gpt2.GPT2}


@functools.lru_cache(maxsize=16)
def _abstract(spec: Spec, slots=None):
    def make():
        model = _CLASSES[type(spec)](spec)
        if slots is not None:
            slots.fill(model)
        return model

    graph, state = nnx.split(nnx.eval_shape(make))
    return graph, nnx.to_pure_dict(state)


def structure(spec: Spec, slots=None):
    """The static part of a model: hashable, holds no arrays. ``slots``: as of :func:`build`."""
    return _abstract(spec, slots)[0]


def abstract_parameters(spec: Spec, slots=None) -> trees.Tree:
    """The tree of parameters as ``jax.ShapeDtypeStruct``; takes no memory. ``slots``: as of :func:`build`."""
    return trees.map_paths(lambda _, leaf: leaf, _abstract(spec, slots)[1])


def build(spec: Spec, params: Mapping, slots=None) -> ViT | GPT2:
    """A model of this structure with these parameters.

    Args:
      spec: structure of the base model.
      params: all parameters, those in the slots too.
      slots: None, or hashable settings (``peft.Settings``) whose ``fill(model)`` fills a model's slots.
    Raises:
      UserError: paths or shapes differ from the structure's; up to five are listed.
    """
    expected, given = trees.flatten(_abstract(spec, slots)[1]), trees.flatten(params)
    problems = [f"{path} is missing" for path in expected if path not in given]
    problems += [f"{path} is not in the model" for path in given if path not in expected]
    problems += [
        f"{path} has shape {tuple(given[path].shape)}, the model {leaf.shape}"
        for path, leaf in expected.items()
        if path in given and tuple(given[path].shape) != leaf.shape
    ]
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise UserError(f"parameters do not fit {spec.name}: " + "; ".join(problems[:5]) + more)
    return nnx.merge(structure(spec, slots), params)


def create_model(name: str | Spec, num_classes=None, img_size=None, seed: int = 0, **overrides) -> ViT | GPT2:
    """A freshly initialised model.

    Args:
      name: a name such as "vit_base_patch16_224", "facebook/dinov2-base" or "gpt2" (see models/names.py), or a spec.
      num_classes: outputs of the head; 0 for no head (the model then returns pooled features).
      img_size: side or (height, width), if not the name's.
      seed: decides every parameter; the head's values depend on (seed, classes, width) alone.
      **overrides: further fields of the spec.
    Raises:
      UserError: no such name, or sizes that do not fit each other.
    """
    if isinstance(name, Spec):
        fields = {
            key: value for key, value in (("num_classes", num_classes), ("img_size", img_size)) if value is not None
        }
        spec = specs.replace(name, **fields, **overrides)
    else:
        spec = specs.spec(name, num_classes=num_classes, img_size=img_size, **overrides)
    return build(spec, jax.tree.map(jnp.asarray, initial_parameters(spec, seed)))


def initial_parameters(spec: Spec, seed: int) -> trees.Tree:
    """Freshly drawn parameters of every path of the model."""
    return vit.initial_parameters(spec, abstract_parameters(spec), seed)


def parameters(model: nnx.Module) -> trees.Tree:
    """The tree of parameters: nested dicts, int keys for the blocks, paths such as ``blocks/3/attn/qkv/kernel``."""
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def with_parameters(model: nnx.Module, params: Mapping) -> nnx.Module:
    """A new model of the same structure with other parameters; the given one stays as it is."""
    return nnx.merge(nnx.graphdef(model), params)


def split(model: nnx.Module, mask: Mapping):
    """Splits a model into (static, trainable, frozen): a hashable structure and two pruned trees of parameters."""
    trainable, frozen = trees.partition(parameters(model), mask)
    return nnx.graphdef(model), trainable, frozen


def apply(static, trainable: Mapping, frozen: Mapping, images: jax.Array, key=None, *, scan: bool = False, **options):
    """Runs a split model; what it returns is what the model returns. Pure, to be jitted and differentiated.

    Args:
      static, trainable, frozen: from :func:`split`; ``frozen`` may have another dtype (bfloat16) than ``trainable``.
      images: [b, height, width, c], normalised, in the dtype to compute in (of GPT-2 words [b, n]).
      key: None, one key, or a key for each example: dropout and drop-path.
      scan: whether equal blocks become a loop, which compiles faster (of a ViT, without intermediates).
      **options: of the model's ``__call__`` (``intermediates``, ``remat``).
    """
    model = nnx.merge(static, trees.combine(trainable, frozen))
    if scan:
        options["loops"] = loops(model.blocks, trainable.get("blocks", {}))
    return model(images, key, **options)
