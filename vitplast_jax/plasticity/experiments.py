"""What do a config, or a finished run, give to be measured, and what should `trainable=auto` train?

In: a checked config or a run's folder. Out: plasticity results, with gradients, costs and the choice under the budget.
"""

import contextlib
import os
import zipfile
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from vitplast_jax import models, peft, sharding, trees
from vitplast_jax.data import decode, sources, text
from vitplast_jax.errors import UserError
from vitplast_jax.files import as_path, remove
from vitplast_jax.plasticity import rates, select, stream
from vitplast_jax.plasticity.bounds import COMPONENTS
from vitplast_jax.plasticity.costs import Costs
from vitplast_jax.plasticity.gradients import add_gradients, measure_gradients
from vitplast_jax.plasticity.protocol import measure
from vitplast_jax.training import config as settings
from vitplast_jax.training import inputs, processes
from vitplast_jax.training.run import load_run, read_description
from vitplast_jax.training.start import base_parameters, load_language_start, load_start, slots_of

AUTO = ("auto",)


def measure_config(config, folder=None) -> dict:
    """The plasticity of the weights that a config starts from, and what to train under its budget.

    Args:
      config: a checked config.
      folder: where the state of the measurement is kept, so that it can go on after a kill; None: nowhere.
    """
    config = _without_adapter(config)
    if config.data.name == text.NAME:
        start, pretraining, downstream = _read_texts(config)
        spec = models.specs.replace(start.spec, context=downstream.shape[1])  # what a step is counted for
    else:
        downstream = _downstream(config, config.measure.split)
        start, pretraining = load_start(config, downstream.class_names), _pretraining(config)
        spec = start.spec
    others = _at_other_sizes(config, start.spec)
    result = _measure(models.build(start.spec, start.params), config, pretraining, downstream, folder)
    if others:
        result["sizes"] = _compare_sizes(result, others, pretraining, downstream)
    costs = Costs(config, spec, start.params)
    return result | select.choose(result, costs, config.budget.params, config.budget.flops)


def _at_other_sizes(config, spec) -> list:
    """The config at each further size of `measure.sizes`; what cannot be measured there is said before anything is."""
    if config.measure.sizes and config.data.name == text.NAME:
        raise UserError("config.measure.sizes are those of images; for texts set config.data.length")
    plain = {**config.to_dict()["measure"], "sizes": (), "gradients": False, "ratios": False}
    others = []
    for side in sorted(set(config.measure.sizes)):
        try:
            size = models.specs.replace(spec, img_size=(side, side)).img_size
        except UserError as error:
            raise UserError(f"config.measure.sizes: {error}") from None
        if size != spec.img_size:
            others.append(settings.validate({**config.to_dict(), "image_size": (side,), "measure": plain}))
    return others


def _compare_sizes(result: dict, others: Sequence, pretraining, downstream) -> list[dict]:
    """Rates and bounds against the number of tokens: the same images at the size of each config."""
    found = [result]
    for other in others:
        start = load_start(other, downstream.class_names)
        found.append(_measure(models.build(start.spec, start.params), other, pretraining, downstream, None))
    rows = []
    for entry in sorted(found, key=lambda entry: entry["tokens"]):
        for component in entry["components"]:
            bounds = [row["bound"] for row in entry["rows"] if row["component"] == component["component"]]
            values = {name: component[name] for name in ("component", "mean", "low", "high")}
            bound = None if None in bounds else float(np.mean(bounds))
            rows.append({"tokens": entry["tokens"], **values, "bound": bound})
    return sorted(rows, key=lambda row: COMPONENTS.index(row["component"]))


def measure_run(run_folder, overrides: Sequence[tuple[str, str]] = (), folder=None) -> dict:
    """The plasticity of a run's best checkpoint and of the weights it started from, on the same pairs.

    Args:
      run_folder: of the run.
      overrides: (key, text) of `measure.*` and `budget.*`; everything else is the run's.
      folder: as in :func:`measure_config`; needed, for the difference is taken pair by pair.
    Returns:
      The result of the best checkpoint, with `before` {rows, components} of the base weights and `difference` {rows,
      components}: before, after, difference and the 95 % interval of the mean difference of a pair.
    """
    if any(key == "measure.sizes" for key, _ in overrides):
        raise UserError("config.measure.sizes: a run is measured at its own size; other sizes go with --config alone")
    run = load_run(run_folder)
    try:  # the rates and bounds are those of plain components, so what can be merged is
        trained = peft.merge(run.model)
    except UserError as error:
        raise UserError(
            f"{run_folder}: measure --run compares plain components, and what this run attached "
            f"({run.model.slots.method}) stands beside them: {error}; measure what it started from with --config"
        ) from None
    config = run.config.to_dict()
    for key, value in overrides:
        group, _, name = key.partition(".")
        config[group] = {**config[group], name: settings.read(key, value)}
    config = settings.validate(config)
    downstream = _downstream(config, config.measure.split)
    base = base_parameters(config, run.spec, run.class_names, run.description["base_weights"])
    folder, kept = as_path(folder), config.measure.ratios
    with_ratios = settings.validate({**config.to_dict(), "measure.ratios": True})
    start = peft.merge(models.build(run.spec, base, slots_of(config)))
    pretraining = _pretraining(config)
    before = _measure(start, with_ratios, pretraining, downstream, folder / "before")
    after = _measure(trained, with_ratios, pretraining, downstream, folder)
    difference = _difference(before, after, folder)
    processes.gather(0)  # nobody reads them any more
    if not kept and jax.process_index() == 0:
        (folder / stream.RATIOS).unlink()
        remove(folder / "before")
    costs = Costs(_without_adapter(config), run.spec, models.parameters(trained))
    after |= select.choose(after, costs, config.budget.params, config.budget.flops)
    short = {"rows": before["rows"], "components": before["components"]}
    return after | {"run": os.fspath(run_folder), "step": run.best_step, "before": short, "difference": difference}


def resolve_auto(config, workdir, overwrite: bool):
    """Replaces `trainable=("auto",)` by what a measurement recommends, or by what this run chose when it began.

    The images compared are those of the training split: the test split stays unseen until the run is tested.

    Returns:
      (config, record of the choice for the run's `config.json`, result or None where nothing was measured now).
    """
    if tuple(config.trainable) != AUTO:
        raise UserError(f"config.trainable is {','.join(config.trainable)}: auto stands alone")
    if config.data.name == text.NAME:
        raise UserError("texts can be measured, not trained on; use the measure command")
    description = None
    if not overwrite and (as_path(workdir) / "config.json").exists():
        description = read_description(workdir)
    result = None
    if description is None:
        values = config.to_dict()
        values["measure"] = {**values["measure"], "split": "train"}
        result = measure_config(settings.validate(values), workdir)
        measured = ("protocol", "inputs", "pairing", "distribution", "pairs")
        chosen = {**result["recommendation"], "measured": {name: result[name] for name in measured}}
    else:
        chosen = description.get("chosen")
        if chosen is None:
            raise UserError(
                f"{workdir} holds a run whose components were named ({','.join(description['trainable'])}), not "
                "chosen; continue it with that --config.trainable, or take another --workdir"
            )
    values = config.to_dict() | {"trainable": tuple(chosen["trainable"])}
    return settings.validate(values), chosen, result


def _without_adapter(config):
    """The config of the base weights alone: an adapter starts from what they give."""
    if not config.peft.method:
        return config
    return settings.validate({**config.to_dict(), "trainable": ("all",), "peft": {}})


def _measure(model, config, pretraining, downstream, folder) -> dict:
    chosen = config.measure
    params = trees.map_paths(lambda _, leaf: jnp.asarray(leaf, jnp.float32), models.parameters(model))
    model = models.with_parameters(model, params)
    mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp)
    result = measure(
        model,
        pretraining,
        downstream,
        protocol=chosen.protocol,
        inputs=chosen.inputs,
        pairing=chosen.pairing,
        distribution=chosen.distribution,
        radius=chosen.radius,
        pairs=chosen.pairs,
        images=chosen.images,
        batch_size=chosen.batch_size,
        seed=config.seed,
        mesh=mesh,
        folder=folder,
        ratios=chosen.ratios,
        progress=True,
    )
    result["split"] = chosen.split
    if not chosen.gradients:
        return result
    labelled = downstream if chosen.split == "train" else _downstream(config, "train")
    gradients = measure_gradients(
        model, labelled, images=chosen.images, batch_size=chosen.batch_size, seed=config.seed, mesh=mesh
    )
    return add_gradients(result, gradients, "train")


def _difference(before: dict, after: dict, folder) -> dict:
    """The change of every ratio, pair by pair, summed up: what two separate intervals could not show."""
    with contextlib.ExitStack() as stack:
        raw = [stack.enter_context((place / stream.RATIOS).open("rb")) for place in (folder, folder / "before")]
        new, old = (stack.enter_context(np.load(file)) for file in raw)
        if any((new[name] != old[name]).any() for name in ("images_x", "images_y")):
            raise UserError(f"{folder}: the two measurements compared different images; delete it and measure anew")
        change = new["ratios"].astype(np.float64) - old["ratios"]
    rows = [
        _changed(old, new, change[new["block"], COMPONENTS.index(new["component"])], after)
        for old, new in zip(before["rows"], after["rows"], strict=True)
    ]
    entries = [
        _changed(old, new, change[:, k].mean(0), after)
        for k, (old, new) in enumerate(zip(before["components"], after["components"], strict=True))
    ]
    return {"rows": rows, "components": entries}


def _changed(old: Mapping, new: Mapping, change: np.ndarray, result: Mapping) -> dict:
    """`change` is [pairs], or [x, y] of all pairs; NaN for pairs of equal images."""
    valid = np.isfinite(change)
    mean = change[valid].mean()
    if result["pairing"] == "all":
        squares = np.square(change[valid] - mean).sum()
        counts = [np.maximum(valid.sum(axis), 1) for axis in (1, 0)]
        sides = [
            np.where(valid.any(axis), np.where(valid, change, 0).sum(axis) / count, np.nan)
            for axis, count in zip((1, 0), counts, strict=True)
        ]
        low, high = rates.all_pairs_interval(*sides, squares)
    else:
        reference = result["protocol"] == "reference"
        std = change[valid].std(ddof=0 if reference else 1) if valid.sum() > 1 else np.nan
        low, high = rates.matched_interval(mean, std, valid.sum(), reference=reference)
    ends = {"low": float(low), "high": float(high)} if np.isfinite(low) else {"low": None, "high": None}
    named = {name: new[name] for name in ("block", "component") if name in new}
    return {**named, "before": old["mean"], "after": new["mean"], "difference": float(mean), **ends}


# --- data ------------------------------------------------------------------------------------------------------------


def _downstream(config, split: str):
    data = config.data
    source = inputs.load_split(config, split)
    if source is None:
        raise UserError(f"config.data: {data.name} {data.path} has no {split} split, whose images are compared")
    return source


def _pretraining(config):
    """Images of the pretraining data: a source, or the sample that ships beside the weights (NAME.sample.npz); None
    where only downstream images are compared."""
    chosen = config.measure
    if chosen.distribution != "tasks":
        return None
    if chosen.x_name:
        try:
            source = sources.load(chosen.x_name, chosen.x_path or None, "train", validation=0)
        except UserError as error:
            told = str(error).replace("data.name", "measure.x_name").replace("data.path", "measure.x_path")
            raise UserError(told) from None
        return decode.check(source, config.data.unreadable, config.data.threads)
    hint = (
        "name images like those it was pretrained on, as in --config.measure.x_name=folder "
        "--config.measure.x_path=DIR (any data.name does)"
    )
    if not config.weights:
        raise UserError(f"config.weights is empty, so no sample of pretraining images comes with them; {hint}")
    from vitplast_jax.weights.convert import resolve

    path = os.fspath(resolve(config.weights))
    sample = os.path.splitext(path)[0] + ".sample.npz"
    if not os.path.isfile(sample):
        raise UserError(f"{config.weights} ships no sample of its pretraining images ({sample}); {hint}")
    try:
        with np.load(sample, allow_pickle=False) as arrays:
            return arrays["images"]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(
            f"{sample} is not an npz with an array 'images' ({error}); install vitplast_jax again"
        ) from None


def _read_texts(config):
    """(language model, sequences of words of the pretraining data, None where unused, and of the downstream data)."""
    start, data, chosen = load_language_start(config), config.data, config.measure
    if chosen.gradients:
        raise UserError("config.measure.gradients: loss gradients are those of images with labels, not of texts")
    if data.length > start.spec.context:
        raise UserError(f"config.data.length is {data.length}; {start.spec.name} takes {start.spec.context} words")
    if chosen.distribution == "class":
        raise UserError("texts have no classes; take measure.distribution=tasks or downstream")
    if chosen.distribution == "tasks" and chosen.x_name not in ("", text.NAME):
        raise UserError(
            f"config.measure.x_name is {chosen.x_name!r}: texts are compared with texts; name a file in measure.x_path"
        )
    place = data.tokenizer
    if not place and config.weights:
        from vitplast_jax.weights.convert import resolve

        place = os.fspath(resolve(config.weights))
        place = place if os.path.isdir(place) else os.path.dirname(place) or os.curdir
    if not place:
        raise UserError("say where tokenizer.json, or vocab.json and merges.txt, lie: --config.data.tokenizer=FOLDER")
    tokenizer, padded = text.load_tokenizer(place), chosen.protocol == "reference"

    def read(path, key):
        if not path:
            raise UserError(f"config.{key} is empty: name a text file, one text a line")
        return text.load(path, tokenizer, data.length, start.spec.vocabulary, padded)

    downstream = read(data.path, "data.path")
    return start, read(chosen.x_path, "measure.x_path") if chosen.distribution == "tasks" else None, downstream
