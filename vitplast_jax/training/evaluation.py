"""Evaluation: parameters on a split, every example once, and a finished run on a split of its data.

In: parameters and a split, or a run's folder. Out: the summary of ``results.json``, per-class figures, a confusion
matrix.
"""

import concurrent.futures
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from vitplast_jax import models, sharding
from vitplast_jax.data import decode, pipeline
from vitplast_jax.errors import UserError
from vitplast_jax.training import config as settings
from vitplast_jax.training import cost, inputs, metrics, run
from vitplast_jax.training.start import slots_of
from vitplast_jax.training.step import make_evaluation_step

MOST_IMAGES_AT_ONCE = 64


class Evaluator:
    """Evaluates parameters on a split, every example once; compiles one program for every split and batch."""

    def __init__(self, spec: models.ViTSpec, mesh, data: Mapping, config):
        self._spec, self._mesh, self._data = spec, mesh, data
        self._threads = config.data.threads
        sizes = [len(source) for split, source in data.items() if source is not None and split != "train"]
        sizes = sizes or [len(source) for source in data.values() if source is not None]
        wanted = min(config.eval_batch_size, max(sizes))
        self._batch_size = -(-wanted // mesh.size) * mesh.size
        self._steps = {}
        for ragged in (True, False):  # whether the host has resized
            prepare = inputs.make_evaluation_preparation(spec, config.compute_dtype, ragged)
            step = make_evaluation_step(models.structure(spec, slots_of(config)), prepare, config.scan)
            self._steps[ragged] = jax.jit(step, out_shardings=sharding.replicated(mesh))
        self._programs: dict[tuple, jax.stages.Compiled] = {}
        self.evaluation = None

    @property
    def compilations(self) -> int:
        return len(self._programs)

    def compile(self, trainable, frozen):
        """Compiles for the splits that a run evaluates, so that what does not fit is said at its start."""
        for split, source in self._data.items():
            if split != "train" and source is not None:
                self._program(trainable, frozen, source)

    def _program(self, trainable, frozen, source):
        """The compiled program for the image size of a source; one serves all splits of one size."""
        shapes = inputs.example_batch(self._batch_size, source, self._spec.img_size, self._mesh)
        place = sharding.batch(self._mesh)
        shapes["mask"] = jax.ShapeDtypeStruct((self._batch_size,), bool, sharding=place)
        ragged = source.images is None
        key = (ragged, *shapes["image"].shape)
        if key not in self._programs:
            program = self._steps[ragged].lower(trainable, frozen, shapes).compile()
            cost.check_fits(program, "an evaluation step", "lower --config.eval_batch_size")
            self._programs[key] = program
        return self._programs[key]

    def __call__(self, trainable, frozen, split: str) -> dict[str, Any] | None:
        """The summary of a split, or None where the data have no such split; details stay in ``self.evaluation``."""
        source = self._data[split]
        if source is None:
            return None
        batches = pipeline.evaluation_batches(
            source,
            self._batch_size,
            self._spec.img_size,
            self._spec.preprocessing,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
            threads=self._threads,
        )
        program = self._program(trainable, frozen, source)

        def run_batch(batch):
            fed = {name: batch[name] for name in ("image", "label", "mask")}
            return program(trainable, frozen, inputs.to_devices(fed, self._mesh))

        self.evaluation = metrics.evaluate(batches, run_batch, self._spec.num_classes)
        return self.evaluation.summary()


def evaluate_run(workdir, split: str = "test", batch_size: int = 0) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Evaluates a run's best checkpoint on a split of its data.

    Args:
      workdir: the run's folder.
      split: "train", "validation" or "test".
      batch_size: images at once; 0 for the run's own. It changes no number.
    Returns:
      ``{split, accuracy, balanced_accuracy, loss, count, per_class, confusion, ...}`` and the class names; rows of the
      confusion matrix are true classes, columns predictions.
    Raises:
      UserError: no such run, split or data, or data whose classes are not the run's.
    """
    config = run.config_of(run.read_description(workdir))
    mesh = sharding.make_mesh(-1, math.gcd(config.mesh.fsdp, jax.device_count()))  # the devices that are here now
    finished = run.load_run(workdir, mesh)
    if batch_size:
        config = settings.validate({**config.to_dict(), "eval_batch_size": batch_size})
    source = inputs.load_split(config, split)
    if source is None:
        raise UserError(f"the data of {workdir} have no {split} split; there may be train, validation or test")
    trained_on = finished.description.get("data_fingerprint", {}).get(split)
    if trained_on not in (None, source.fingerprint):
        raise UserError(
            f"the {split} split of {config.data.path or config.data.name} is no longer the run's (sha256 "
            f"{source.fingerprint[:12]}..., expected {trained_on[:12]}...): images it was trained on may be among them"
        )
    source = inputs.with_labels_of(source, finished.class_names)
    evaluator = Evaluator(finished.spec, mesh, {split: source}, config)
    summary = evaluator(models.parameters(finished.model), {}, split)
    evaluation = {
        "split": split,
        **summary,
        "per_class": dict(zip(finished.class_names, evaluator.evaluation.per_class(), strict=False)),
        "confusion": evaluator.evaluation.confusion.tolist(),
        "step": finished.best_step,
        "data_fingerprint": source.fingerprint,
        "skipped": list(source.skipped),
    }
    return evaluation, finished.class_names


def predict_images(workdir, path, threads: int = 2) -> tuple[list[dict[str, Any]], list[str]]:
    """Classifies an image file, or every image below a folder, with a run's best checkpoint.

    Decoding, resizing and normalisation are evaluation's own.

    Returns:
      One row an image: ``file``, ``class`` and ``probability`` of the likeliest class, and ``top`` (up to five pairs of
      class and probability); and one line for each file that could not be read.
    Raises:
      UserError: no such run or path, or no image there.
    """
    finished = run.load_run(workdir)
    files = decode.find_images(path)
    spec, names = finished.spec, finished.class_names
    prepare = inputs.make_evaluation_preparation(spec, finished.config.compute_dtype, ragged=True)
    static, params = models.structure(spec, slots_of(finished.config)), models.parameters(finished.model)
    classify = jax.jit(lambda params, images: jax.nn.softmax(models.apply(static, params, {}, prepare(images))))
    batch_size = min(finished.config.eval_batch_size, len(files), MOST_IMAGES_AT_ONCE)

    def read(file):
        try:
            image = decode.decode_file(file)
            return decode.host_resize_for_evaluation(image, spec.img_size, spec.preprocessing)
        except UserError as error:
            return error

    rows, unreadable = [], []
    with (
        concurrent.futures.ThreadPoolExecutor(threads) as pool,
        tqdm(total=len(files), unit="image", desc="predict", disable=None) as bar,
    ):
        for first in range(0, len(files), batch_size):
            group = files[first : first + batch_size]
            images = list(pool.map(read, group))
            unreadable += [str(image) for image in images if isinstance(image, UserError)]
            good = [
                (file, image) for file, image in zip(group, images, strict=True) if not isinstance(image, UserError)
            ]
            bar.update(len(group))
            if not good:
                continue
            pixels = np.zeros((batch_size, *spec.img_size, 3), np.uint8)  # one shape, so one compilation
            pixels[: len(good)] = np.stack([image for _, image in good])
            for (file, _), probabilities in zip(good, np.asarray(classify(params, pixels)), strict=False):
                order = np.argsort(-probabilities[: len(names)], kind="stable")[:5]
                top = [(names[c], float(probabilities[c])) for c in order]
                rows.append({"file": str(file), "class": top[0][0], "probability": top[0][1], "top": top})
    return rows, unreadable
