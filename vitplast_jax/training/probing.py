"""What do the features of a pretrained model already tell about the classes? Linear probing, block by block.

In: a checked config (weights, data), or a finished run. Out: accuracy of a linear classifier on pooled features after
each component of each block. The paper's probe (arXiv 2602.06883) is one of these places: the output of the last block,
before the final norm, averaged over all tokens.

Features stream through one compiled forward pass on the devices of the mesh; only their pooled values come back. The
classifier is scikit-learn's: features L2-normalised example by example, standardised over the training split, logistic
regression with C = 1. It is fitted on `train` alone, so that `validation` stays unseen, as when a run is finetuned.
"""

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from vitplast_jax import models, sharding
from vitplast_jax.data import pipeline, sources
from vitplast_jax.training import config as settings
from vitplast_jax.training import inputs, metrics
from vitplast_jax.training.run import load_run
from vitplast_jax.training.start import load_start, slots_of

# component -> its output among a block's activations, before that is added to the residual stream, which "block" is
ACTIVATIONS = {"ln1": "norm1", "mha": "mha", "ln2": "norm2", "fc1": "fc1", "fc2": "fc2", "block": "output"}
MOST_ITERATIONS = 1000
MOST_BYTES = 2**31  # of features that are held at once; more places take more passes over the data


class Place(NamedTuple):
    """Where features are taken, and how tokens become one: "mean" of the image's tokens, or "cls", the class token."""

    block: int
    component: str
    pooling: str


def places_of(spec, which: str) -> list[Place]:
    """All places of a model, or (``which="last"``) the paper's alone."""
    if which == "last":
        return [Place(spec.depth - 1, "block", "mean")]
    poolings = ("mean", "cls") if spec.class_token else ("mean",)
    return [Place(block, name, pool) for pool in poolings for block in range(spec.depth) for name in ACTIVATIONS]


def width_of(spec, place: Place) -> int:
    return spec.hidden if place.component == "fc1" else spec.width


def make_feature_step(spec, slots, prepare: Callable, places: Sequence[Place]) -> Callable:
    """Returns ``feature_step(params, uint8 images) -> [features [b, width] float32 of each place]``.

    ``slots``: as of :func:`models.build`. Prompts, which stand before the patches, are no part of a mean.
    """
    static = models.structure(spec, slots)

    def feature_step(params: Mapping, images):
        _, out = models.apply(static, params, {}, prepare(images), intermediates=True)
        features = []
        for place in places:
            tokens = out["blocks"][place.block][ACTIVATIONS[place.component]].astype(jnp.float32)
            prompts = np.arange(spec.prefix, spec.prefix + tokens.shape[1] - spec.tokens)
            features.append(tokens[:, 0] if place.pooling == "cls" else jnp.delete(tokens, prompts, axis=1).mean(1))
        return features

    return feature_step


def probe(config) -> dict[str, Any]:
    """Probes the weights that a config starts from.

    Args:
      config: a checked config; ``probe.places`` says whether every place or the paper's alone.
    Returns:
      {``model``, ``protocol``, ``place`` (the paper's), its ``test`` and ``validation`` {accuracy, balanced_accuracy,
      loss, count} or None, ``rows`` [{block, component, pooling, width, train, validation, test (accuracies),
      iterations, converged}], ``data_fingerprint``, ``seconds``, ``compilations``}.
    Raises:
      UserError: config, data or weights that do not fit.
    """
    data = inputs.load_data(config)
    start = load_start(config, data["train"].class_names)
    return _probe(config, data, start.spec, start.params) | {"base_weights": dict(start.identity)}


def probe_run(folder, overrides: Sequence[tuple[str, str]] = ()) -> dict[str, Any]:
    """Probes the best checkpoint of a run on that run's data.

    Args:
      folder: of the run.
      overrides: (key, text) of ``probe.*``; everything else is the run's.
    Returns:
      As :func:`probe`, with ``run`` and ``step``.
    """
    run = load_run(folder)
    values = run.config.to_dict()
    for key, value in overrides:
        values["probe"] = {**values["probe"], key.removeprefix("probe."): settings.read(key, value)}
    config = settings.validate(values)
    data = {
        split: None if source is None else inputs.with_labels_of(source, run.class_names)
        for split, source in inputs.load_data(config).items()
    }
    found = _probe(config, data, run.spec, models.parameters(run.model))
    identity = dict(run.description["base_weights"])
    return found | {"base_weights": identity, "run": os.fspath(folder), "step": run.best_step}


def _probe(config, data: Mapping, spec, params: Mapping) -> dict[str, Any]:
    """Probes these parameters, those in the slots included."""
    began = time.monotonic()
    mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp)
    present = {split: source for split, source in data.items() if source is not None}
    params = sharding.put(mesh, params, lambda _: "float32")
    labels = {split: np.asarray(source.labels) for split, source in present.items()}
    rows, compilations, main = [], 0, places_of(spec, "last")[0]
    summaries: dict[str, Any] = {}
    places = places_of(spec, config.probe.places)
    groups = _groups(spec, places, sum(map(len, labels.values())))
    with tqdm(total=len(places), unit="probe", desc="probe", dynamic_ncols=True, disable=None) as bar:
        for group in groups:
            found, compiled = _extract(config, spec, mesh, params, present, group)
            compilations += compiled
            for index, place in enumerate(group):
                features = {split: parts[index] for split, parts in found.items()}
                fitted = fit(features, labels, spec.num_classes)
                accuracies = {split: None for split in sources.SPLITS}
                accuracies |= {split: summary["accuracy"] for split, summary in fitted["summaries"].items()}
                row = {**place._asdict(), "width": width_of(spec, place), **accuracies}
                rows.append(row | {name: fitted[name] for name in ("iterations", "converged")})
                if place == main:
                    summaries = fitted["summaries"]
                bar.update()
    return {
        "model": spec.name,
        "protocol": _protocol(config, spec),
        "place": main._asdict(),
        "test": summaries.get("test"),
        "validation": summaries.get("validation"),
        "rows": rows,
        "data_fingerprint": {split: source.fingerprint for split, source in present.items()},
        "seconds": round(time.monotonic() - began, 2),
        "compilations": {"features": compilations},
    }


def _protocol(config, spec) -> dict[str, Any]:
    return {
        "data": config.data.name,
        "validation": config.data.validation,
        "split_seed": config.data.split_seed,
        "image_size": list(spec.img_size),
        "preprocessing": models.specs.to_dict(spec)["preprocessing"],
        "features": "no augmentation; L2-normalised, then standardised over the training split",
        "classifier": f"logistic regression, C = 1, at most {MOST_ITERATIONS} iterations, fitted on train",
    }


def _groups(spec, places: Sequence[Place], images: int) -> list[list[Place]]:
    """The places in order, as many together as MOST_BYTES lets be held."""
    groups, size = [[]], 0
    for place in places:
        needed = 4 * images * width_of(spec, place)
        if groups[-1] and size + needed > MOST_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(place)
        size += needed
    return groups


def _extract(config, spec, mesh, params, present: Mapping, places) -> tuple[dict[str, list[np.ndarray]], int]:
    """The features [n, width] of each place for each split, and how many programs that took."""
    steps = {}
    for ragged in (True, False):  # whether the host has resized
        step = make_feature_step(
            spec, slots_of(config), inputs.make_evaluation_preparation(spec, config.compute_dtype, ragged), places
        )
        steps[ragged] = jax.jit(step, out_shardings=sharding.replicated(mesh))
    wanted = min(config.eval_batch_size, max(map(len, present.values())))
    batch_size = -(-wanted // mesh.size) * mesh.size
    found, shapes = {}, set()
    for split, source in present.items():
        parts: list[list[np.ndarray]] = [[] for _ in places]
        batches = pipeline.evaluation_batches(
            source,
            batch_size,
            spec.img_size,
            spec.preprocessing,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
            threads=config.data.threads,
        )
        done = 0
        for batch in batches:
            images = inputs.to_devices({"image": batch["image"]}, mesh)["image"]
            shapes.add((source.images is None, images.shape))
            real = min(batch_size, len(source) - done)  # the last batch is filled up
            for part, features in zip(parts, steps[source.images is None](params, images), strict=True):
                part.append(np.asarray(features)[:real])
            done += real
        found[split] = [np.concatenate(part) for part in parts]
    return found, len(shapes)


def fit(features: Mapping[str, np.ndarray], labels: Mapping[str, np.ndarray], num_classes: int) -> dict[str, Any]:
    """Fits the classifier on ``train`` and tests it on every split.

    Args:
      features: split -> [n, d]; labels: split -> int [n].
    Returns:
      {``summaries``: split -> {accuracy, balanced_accuracy, loss, count}, ``iterations``, ``converged``}.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import Normalizer, StandardScaler

    classifier = LogisticRegression(C=1.0, max_iter=MOST_ITERATIONS)
    model = make_pipeline(Normalizer(), StandardScaler(), classifier)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # said in the result
        model.fit(features["train"].astype(np.float64), labels["train"])
    summaries = {}
    for split, x in features.items():
        probabilities = np.full((len(x), num_classes), np.finfo(np.float64).tiny)  # a class that train lacks
        probabilities[:, classifier.classes_] = model.predict_proba(x.astype(np.float64))
        chosen = np.maximum(probabilities[np.arange(len(x)), labels[split]], np.finfo(np.float64).tiny)
        evaluation = metrics.Evaluation(num_classes)
        evaluation.add(
            {
                "loss": -np.log(chosen),
                "prediction": probabilities.argmax(1),
                "label": labels[split],
                "mask": np.ones(len(x), bool),
            }
        )
        summaries[split] = evaluation.summary()
    iterations = int(np.max(classifier.n_iter_))
    return {"summaries": summaries, "iterations": iterations, "converged": iterations < MOST_ITERATIONS}
