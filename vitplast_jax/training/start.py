"""What a run starts from: the model's structure, its base weights, and a head for these classes.

In: a checked config and the data's class names. Out: a spec, the whole tree of parameters, and the identity of the base
weights, by which the same parameters are found again when a run is resumed or evaluated.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vitplast_jax import models, trees
from vitplast_jax.errors import UserError
from vitplast_jax.models import specs, vit
from vitplast_jax.peft.attach import initial_parameters
from vitplast_jax.peft.settings import Settings, from_config


@dataclasses.dataclass(frozen=True)
class Start:
    """The start of a run; ``identity`` is {"source", "sha256"}, the source empty for a random start; ``params`` are all
    parameters, those in the slots too."""

    spec: models.ViTSpec
    params: trees.Tree
    identity: Mapping[str, Any]
    notes: tuple[str, ...]
    slots: Settings | None = None


def slots_of(config) -> Settings | None:
    """What a config attaches to the model, None where it attaches nothing."""
    return from_config(config.peft.to_dict())


def load_start(config, class_names: Sequence[str]) -> Start:
    """Resolves model, weights, image size, classes and numerics of a config into a :class:`Start`.

    The head is a new one, drawn from (seed, classes, width), unless the weights were trained on exactly these classes.

    Raises:
      UserError: weights that cannot be read, names that do not exist, sizes that do not fit.
    """
    num_classes = config.num_classes or len(class_names)
    if num_classes < len(class_names):
        raise UserError(f"config.num_classes is {num_classes}, but the data have {len(class_names)} classes")
    size = tuple(config.image_size) or None
    if not config.weights:
        spec = _with_settings(_named_spec(config, num_classes=num_classes, img_size=size), config)
        return _with_slots(_random_start(spec, config.seed), config)

    from vitplast_jax.weights import convert

    keeps_head = num_classes == len(class_names) and convert.class_names(config.weights) == tuple(class_names)
    kept = num_classes if keeps_head else 0
    loaded = convert.load(config.weights, model=config.model or None, num_classes=kept, img_size=size)
    spec = specs.replace(loaded.spec, num_classes=num_classes)
    notes, flat = list(loaded.notes), trees.flatten(loaded.params)
    if not keeps_head:
        for path, leaf in trees.flatten(models.abstract_parameters(spec)).items():
            if path.startswith(("head/", "head_dist/")):
                flat[path] = vit.initial_value(path, leaf.shape, config.seed, spec)
        notes.append(f"new head for {num_classes} classes")
    start = Start(_with_settings(spec, config), trees.unflatten(flat), loaded.identity, tuple(notes))
    return _with_slots(start, config)


def load_language_start(config) -> Start:
    """The language model of a config whose data are texts; its head is its table of words.

    Raises:
      UserError: weights that cannot be read, or a model that takes images.
    """
    if config.weights:
        from vitplast_jax.weights import convert

        loaded = convert.load(config.weights, model=config.model or None)
        start = Start(loaded.spec, loaded.params, loaded.identity, tuple(loaded.notes))
    else:
        start = _random_start(_named_spec(config), config.seed)
    if not isinstance(start.spec, models.GPT2Spec):
        raise UserError(f"{start.spec.name} takes images; texts need a language model, as --config.model=gpt2")
    return start


def _named_spec(config, **sizes):
    """The spec of `config.model` where there are no weights."""
    if not config.model:
        raise UserError("config.model and config.weights are both empty: name a model, or weights, or both")
    return specs.spec(config.model, **sizes)


def _random_start(spec, seed: int) -> Start:
    params = models.initial_parameters(spec, seed)
    return Start(spec, params, _drawn(params), (f"random start: no weights given for {spec.name}",))


def _with_slots(start: Start, config) -> Start:
    slots = slots_of(config)
    if slots is None:
        return start
    added = initial_parameters(start.spec, slots, config.seed)
    return dataclasses.replace(start, params=trees.combine(start.params, added), slots=slots)


def base_parameters(config, spec: models.ViTSpec, class_names: Sequence[str], identity: Mapping) -> trees.Tree:
    """The parameters a run started from, found again by the identity that it recorded.

    Raises:
      UserError: the base weights are gone, or no longer the ones that the run started from.
    """
    if identity["source"]:
        from vitplast_jax.weights import convert

        found = convert.identity(identity["source"])
    else:
        found = _drawn(models.initial_parameters(spec, config.seed))
    if found["sha256"] != identity["sha256"]:
        what, remedy = f"base weights {identity['source']}", "put the original file back"
        if not identity["source"]:
            what, remedy = "the random start's values", "use the versions that environment.json names"
        raise UserError(
            f"{what} have changed since the run: sha256 {found['sha256'][:12]}..., expected "
            f"{identity['sha256'][:12]}...; {remedy}"
        )
    return load_start(config, class_names).params


def _drawn(params: Mapping) -> dict[str, str]:
    """The identity of drawn parameters: no source, and a hash of their values."""
    digest = hashlib.sha256()
    for path, leaf in sorted(trees.flatten(params).items()):
        digest.update(path.encode())
        digest.update(np.ascontiguousarray(leaf))
    return {"source": "", "sha256": digest.hexdigest()}


def _with_settings(spec: models.ViTSpec, config) -> models.ViTSpec:
    """Regularisation and pixel statistics that the config sets."""
    if isinstance(spec, models.GPT2Spec):
        raise UserError(f"{spec.name} is a language model; training takes images: name a ViT")
    preprocessing = spec.preprocessing
    if config.data.mean:
        known = preprocessing or models.Preprocessing()
        mean, std = (tuple(v) * 3 if len(v) == 1 else tuple(v) for v in (config.data.mean, config.data.std))
        preprocessing = dataclasses.replace(known, mean=mean, std=std)
    data = config.data
    own = {"resize": data.resize, "crop_pct": data.crop_pct, "interpolation": data.test_interpolation}
    if preprocessing is not None:
        preprocessing = dataclasses.replace(preprocessing, **{key: value for key, value in own.items() if value})
    if preprocessing is None:
        raise UserError(
            f"the pixel statistics of {spec.name} are not known: say --config.data.mean=... and --config.data.std=... "
            "(0.5 and 0.5 for augreg and in21k weights, 0.485,0.456,0.406 and 0.229,0.224,0.225 for ImageNet's)"
        )
    return specs.replace(spec, drop_rate=config.dropout, drop_path_rate=config.drop_path, preprocessing=preprocessing)
