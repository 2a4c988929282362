"""The training loop: mesh, data, model, weights, shardings, step, restore, loop. Read it from top to bottom.

In: a checked config and a folder. Out: the run's files (README: how to read the results) and its results.
Where it runs, on one CPU or a pod, is decided by the mesh alone.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from vitplast_jax import components, files, models, sharding, trees
from vitplast_jax.errors import Stopped, UserError
from vitplast_jax.files import as_path, write_json
from vitplast_jax.training import cost, inputs, optim, processes, program, run
from vitplast_jax.training.checkpoint import Checkpoints
from vitplast_jax.training.evaluation import Evaluator
from vitplast_jax.training.shared import Shared, program_key
from vitplast_jax.training.start import load_start


def train_and_evaluate(
    config,
    workdir: str | Path,
    overwrite: bool = False,
    chosen: Mapping | None = None,
    shared: Shared | None = None,
) -> dict[str, Any]:
    """Trains as the config says, tests the best validated checkpoint, and returns what ``results.json`` holds.

    The same call continues a run that was stopped, and returns the results of one that is finished.

    Args:
      config: from :func:`vitplast_jax.training.config.validate`.
      workdir: the run's folder.
      overwrite: discard the run that the folder holds.
      chosen: why these components train, where a measurement chose them; kept in ``config.json``.
      shared: what runs of one grid do once, data and programs; such a run says nothing but its errors.
    Raises:
      UserError: anything wrong with config, data, weights or folder; found before the first step where it can be.
    """
    began, workdir = time.monotonic(), as_path(workdir)
    if config.sweep:
        raise UserError(
            "config.sweep names a grid of runs: start it with python -m vitplast_jax.sweep, or train one run with "
            "--config.sweep="
        )
    tell = say if shared is None else lambda text: None
    leave, shared = shared is None, shared or Shared()
    if config.compilation_cache:
        jax.config.update("jax_compilation_cache_dir", config.compilation_cache)

    # Mesh.
    mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp)
    if config.batch_size % mesh.size:
        raise UserError(
            f"config.batch_size {config.batch_size} is not a multiple of the {mesh.size} devices of the mesh"
        )

    # Data.
    processes.check_shared(workdir, "--workdir")
    data, _ = shared.once("data", config.data.to_dict(), lambda: processes.together(inputs.load_data, config))
    train = data["train"]

    # Model and base weights, still in host memory.
    start = processes.together(load_start, config, train.class_names)
    spec = start.spec
    mask = run.trainable_mask(config, start.params)
    trains = run.applied_selectors(config, components.counts(start.params))
    counted = count_parameters(start.params, mask)
    trainable, frozen = trees.partition(start.params, mask)
    facts = {
        "spec": models.specs.to_dict(spec),
        "class_names": train.class_names,
        "base_weights": dict(start.identity),
        "data_fingerprint": {split: source.fingerprint for split, source in data.items() if source is not None},
    }
    if chosen is not None:
        facts["chosen"] = dict(chosen)
    processes.check_agreement("settings, data or weights", comparable(config, facts))
    claim = processes.together(run.check_claim, workdir, config, facts, overwrite)
    if claim.results is not None:
        tell(f"{workdir} holds the finished run; nothing to do")
        return claim.results
    for note in (*start.notes, *data_notes(data), what_trains(spec, start.params, mask)):
        tell(note)
    start = dataclasses.replace(start, params={})  # only the two parts are needed from here on

    # Shardings: arrays go straight to where they live.
    frozen = sharding.put(mesh, frozen, lambda path: run.kept_dtype(config, path))
    trainable = sharding.put(mesh, trainable, lambda _: "float32")
    optimizer, schedule = optim.make_optimizer(config, trainable, spec.depth)
    places = program.state_shardings(mesh, optimizer, trainable)
    # A jitted copy owns its buffers, so that the step may overwrite them.
    key = program_key(config, claim.parts)
    initialise = jax.jit(lambda tree: program.initial_state(optimizer, tree), out_shardings=places)
    initialise, _ = shared.once("start", key, lambda: initialise)
    state = initialise(trainable)
    del trainable

    # Steps, compiled before anything is written: what does not fit is said here.
    prepare = inputs.make_training_preparation(config, spec, train)
    run_values = inputs.run_values(config, mesh)
    batch_shapes = {**inputs.example_batch(config.batch_size, train, spec.img_size, mesh), "run": target_of(run_values)}

    def compile_step(parts):
        static, weights = models.structure(spec, start.slots), inputs.class_weights(config, train, spec.num_classes)
        return program.lower_step(
            config, static, mesh, optimizer, schedule, prepare, state, frozen, batch_shapes, parts, weights
        ).compile()

    def compile_programs():
        train_step, parts, compilations = cost.fit_step(compile_step, config, mesh.size, claim.parts)
        evaluator = Evaluator(spec, mesh, data, config)
        evaluator.compile(state.trainable, frozen)
        return train_step, parts, compilations, evaluator

    (train_step, parts, compilations, evaluator), fresh = shared.once("programs", key, compile_programs)
    if parts > 1:
        tell(f"each batch is computed in {parts} parts of {config.batch_size // parts} images")

    with run.take(workdir, claim, parts), Checkpoints(workdir / "checkpoints") as checkpoints:
        # Restore.
        record = {"best_step": None, "best_accuracy": None, "seconds": 0.0}
        checkpoints.forget_after_latest()
        if checkpoints.latest_step() is not None:
            state, record = checkpoints.restore_latest(target_of(state))
            tell(f"continuing at step {int(state.step)} of {config.steps}")
        first, earlier = int(state.step), record["seconds"]
        log = run.MetricsLog(workdir / "metrics.jsonl", first)

        # Loop.
        batches = inputs.training_batches(config, train, spec.img_size, mesh, first)
        bar = {"total": config.steps, "initial": first, "unit": "step", "desc": "train", "leave": leave}
        bar = tqdm(**bar, dynamic_ncols=True, disable=None)
        mark, waited, logged, traced = time.monotonic(), 0.0, first, False
        with bar, contextlib.closing(batches), processes.StopRequest() as stop:
            for step in range(first + 1, config.steps + 1):
                if step in config.profile:
                    traced = trace(workdir / "profile", state, step == config.profile[0], traced)
                before = time.monotonic()
                batch = next(batches)
                waited += time.monotonic() - before
                state, measured = train_step(state, frozen, {**batch, "run": run_values})
                bar.update()

                periods = (config.log_every, config.eval_every, config.checkpoint_every)
                logs, evaluates, saves = (step % period == 0 or step == config.steps for period in periods)
                # All processes must stop at the same step: several ask each other, when they wait for it anyway.
                stops = stop.asked if jax.process_count() == 1 else logs and stop.anywhere()
                saves = saves or stops
                if logs or evaluates or saves:
                    check_finite(measured, step, checkpoints.latest_step())
                if logs:
                    line = {name: float(value) for name, value in measured.items()}
                    elapsed = time.monotonic() - mark
                    rate = (step - logged) * config.batch_size / elapsed
                    log.write(step=step, **line, images_per_second=rate, data_wait=waited / elapsed)
                    shown = {"images_s": f"{rate:.0f}", "data_wait": f"{waited / elapsed:.0%}"}
                    bar.set_postfix(loss=f"{line['loss']:.3f}", **shown, refresh=False)
                    mark, waited, logged = time.monotonic(), 0.0, step

                paused = time.monotonic()
                if evaluates:
                    summary = evaluator(state.trainable, frozen, "validation")
                    if summary is not None:
                        log.write(step=step, split="validation", **summary)
                        tell(f"step {step}: validation accuracy {summary['accuracy']:.4f}, loss {summary['loss']:.4f}")
                    if is_better(summary, record["best_accuracy"]):
                        accuracy = None if summary is None else summary["accuracy"]
                        record = {**record, "best_step": step, "best_accuracy": accuracy}
                        checkpoints.save_best(step, state.trainable)

                if saves:
                    log.flush()
                    record = {**record, "seconds": earlier + time.monotonic() - began}
                    checkpoints.save_latest(step, state, record)
                mark += time.monotonic() - paused
                if stops and step < config.steps:
                    raise Stopped(f"stopped at step {step} of {config.steps}, which is saved; the same command goes on")

        # Test the best validated checkpoint.
        best = checkpoints.restore_best(target_of(state.trainable), record["best_step"])
        results = {split: evaluator(best, frozen, split) for split in ("test", "validation")}
        results |= {
            "best_step": record["best_step"],
            "trainable": trains,
            "parameters": counted,
            "protocol": describe_protocol(config, spec, train, results["validation"] is not None),
            "data_fingerprint": facts["data_fingerprint"],
            "unreadable": {split: len(source.skipped) for split, source in data.items() if source is not None},
            "seconds": round(earlier + time.monotonic() - began, 2),
            "compilations": {"train": compilations * fresh, "evaluate": evaluator.compilations * fresh},
        }
        if jax.process_index() == 0:
            write_json(workdir / "results.json", results)
            if results["test"] is not None:
                log.write(step=record["best_step"], split="test", **results["test"])
            log.flush()
    return results


def comparable(config, facts: Mapping) -> dict[str, Any]:
    """What all hosts of a run must have alike; where its files lie may differ."""
    flat = trees.flatten(config.to_dict())
    alike = {path: value for path, value in flat.items() if path not in ("weights", "data/path", "data/threads")}
    return alike | {**facts, "base_weights": facts["base_weights"]["sha256"]}


def target_of(tree):
    """Shapes, dtypes and shardings of a tree of arrays, to restore into."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree)


def is_better(summary: Mapping | None, best: float | None) -> bool:
    """Whether this validation beats the best so far; without validation data the last one does."""
    return summary is None or best is None or summary["accuracy"] > best


def check_finite(measured: Mapping[str, Any], step: int, saved: int | None):
    """Stops a run whose loss or gradient is no number, before it is logged, saved or chosen as the best."""
    loss, norm = float(measured["loss"]), float(measured["grad_norm"])
    if not (math.isfinite(loss) and math.isfinite(norm)):
        kept = f"the checkpoint of step {saved} is kept" if saved is not None else "nothing had been saved"
        raise UserError(
            f"at step {step} the loss is {loss} and the gradient norm {norm}: the run diverged "
            f"({kept}); lower config.learning_rate, or clip with config.clip_norm"
        )


def trace(folder: Path, state, begins: bool, traced: bool) -> bool:
    """Begins or ends a trace of the steps in between, for TensorBoard or Perfetto; returns whether one is running."""
    jax.block_until_ready(state)
    if begins:
        jax.profiler.start_trace(files.on_disk(folder))
    elif traced:  # a run continued within the range has begun none
        jax.profiler.stop_trace()
        if files.in_bucket(folder):
            files.copy(files.on_disk(folder), folder)
            files.remove(files.on_disk(folder))
        say(f"wrote a profile to {folder}")
    return begins


def say(text: str):
    """One line to the user, once however many processes there are."""
    if jax.process_index() == 0:
        tqdm.write(text)


def data_notes(data: Mapping) -> list[str]:
    """What a reader should know of the data: classes that are absent, files left out."""
    present = {split: source for split, source in data.items() if source is not None}
    notes = [f"{split}: {note}" for split, source in present.items() for note in source.notes]
    for split, source in present.items():
        notes += [f"{split}: left out {line}" for line in source.skipped[:5]]
        if len(source.skipped) > 5:
            notes.append(f"{split}: and {len(source.skipped) - 5} more unreadable files left out")
    sizes = ", ".join(f"{len(source):,} {split}" for split, source in present.items())
    return [f"data: {sizes} images, {len(present['train'].class_names)} classes", *notes]


def count_parameters(params: Mapping, mask: Mapping) -> dict[str, int]:
    """``total``, ``trainable``, and the latter divided into ``head`` and ``method`` (all that is not head)."""
    trainable, _ = trees.partition(params, mask)
    head = components.counts(trainable).get("head", 0)
    total = trees.count(trainable)
    return {"total": trees.count(params), "trainable": total, "method": total - head, "head": head}


def what_trains(spec: models.ViTSpec, params: Mapping, mask: Mapping) -> str:
    """Each component with what of it trains, in a line, so that a selector that is too narrow or too wide is seen."""
    trainable, _ = trees.partition(params, mask)
    trains, has = components.counts(trainable), components.counts(params)
    parts = [
        f"{name} {trains[name]:,}" + ("" if trains[name] == has[name] else f" of {has[name]:,}") for name in trains
    ]
    counted = count_parameters(params, mask)
    share = counted["trainable"] / counted["total"]
    return (
        f"{spec.name}: training {counted['trainable']:,} of {counted['total']:,} parameters ({share:.2%}): "
        + ", ".join(parts)
    )


AUGMENTATION_KEYS = (
    "crop_scale",
    "crop_ratio",
    "window",
    "shift",
    "flip",
    "interpolation",
    "jitter",
    "mixup",
    "cutmix",
)


def describe_protocol(config, spec: models.ViTSpec, train, validated: bool) -> dict[str, Any]:
    """What must agree before two results may be compared: data, splits, pixels, training augmentation, selection."""
    pixels = models.specs.to_dict(spec)["preprocessing"]
    augmentation = {key: config.data[key] for key in AUGMENTATION_KEYS}
    return {
        "data": config.data.name,
        **({"benchmark": dict(train.task)} if train.task else {}),
        "validation": config.data.validation,
        "split_seed": config.data.split_seed,
        "image_size": list(spec.img_size),
        "preprocessing": pixels,
        "augmentation": augmentation,
        "selection": "best validation accuracy, tested once" if validated else "last step",
    }
