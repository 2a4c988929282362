"""A run's folder: who it belongs to, its logs, and the finished model read back from it.

In: a checked config and a folder. Out: ``config.json``, ``environment.json``, ``metrics.jsonl``; and
:func:`load_run`, through which evaluation, prediction, measurement and export get a trained model.
"""

import contextlib
import dataclasses
import importlib.metadata
import json
import platform
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from vitplast_jax import components, files, models, sharding, trees
from vitplast_jax.errors import UserError
from vitplast_jax.files import as_path, write_json
from vitplast_jax.models import specs
from vitplast_jax.peft.attach import Origin
from vitplast_jax.training import config as settings
from vitplast_jax.training import processes
from vitplast_jax.training.checkpoint import Checkpoints
from vitplast_jax.training.start import base_parameters, slots_of

# What may differ when a run is continued: these change where and how fast it runs, not what it computes.
FREE_KEYS = (
    *("log_every", "checkpoint_every", "eval_batch_size", "microbatch", "accumulation", "remat", "scan"),
    *("data.path", "data.threads", "data.cache_gb", "mesh.data", "mesh.fsdp", "profile", "compilation_cache"),
)
RUN_FILES = (
    *("results.json", "evaluation.json", "confusion.csv", "confusion.png", "curves.png"),
    *("metrics.jsonl", "checkpoints", "environment.json", "config.json"),
)
FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished (or evaluated at least once) run: its best model and how to feed it."""

    folder: Path
    config: Any
    spec: models.ViTSpec
    class_names: tuple[str, ...]
    model: models.ViT
    best_step: int
    description: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Claim:
    """A folder looked at before a run takes it: ``results`` if the run in it has ended, ``parts`` if it was begun."""

    described: Mapping[str, Any]
    overwrite: bool
    results: Mapping[str, Any] | None = None
    parts: int | None = None


def check_claim(workdir: str | Path, config, facts: Mapping[str, Any], overwrite: bool) -> Claim:
    """Looks whether a folder may be taken for a run, changing nothing.

    Args:
      workdir: the folder, which need not exist.
      config: the checked config.
      facts: what the config resolved to (spec, class names, base weights, data); kept in ``config.json`` as well.
      overwrite: discard what the folder holds.
    Raises:
      UserError: the folder holds another run, or files of a run that is damaged.
    """
    workdir = as_path(workdir)
    described = {"format": FORMAT, **json.loads(settings.to_json(config)), **facts}
    described = json.loads(json.dumps(described))  # tuples become lists, as they will be read back
    claim = Claim(described, overwrite)
    if workdir.exists() and not workdir.is_dir():
        raise UserError(f"--workdir {workdir} is a file; name a folder")
    if overwrite or not workdir.exists():
        return claim
    if not (workdir / "config.json").exists():
        if left := [name for name in RUN_FILES if (workdir / name).exists()]:
            raise UserError(
                f"{workdir} has {', '.join(left)} but no config.json: it is damaged or not a run; name another "
                "--workdir, or --overwrite to discard it"
            )
        return claim
    old = read_description(workdir)
    _check_same(old, described, workdir)
    return dataclasses.replace(claim, results=read_results(workdir), parts=old.get("parts"))


@contextlib.contextmanager
def take(workdir: str | Path, claim: Claim, parts: int):
    """Takes a folder for a run as long as the context lasts: writes its ``config.json``, keeps other runs out.

    Of several processes the first takes it, and none goes on before it has.

    Raises:
      UserError: the folder cannot be written, or another process trains in it.
    """
    with contextlib.ExitStack() as stack:
        processes.together(stack.enter_context, _take(workdir, claim, parts))
        yield


@contextlib.contextmanager
def _take(workdir: str | Path, claim: Claim, parts: int):
    workdir = as_path(workdir)
    if jax.process_index():
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(files.locked(workdir))
        except BlockingIOError:
            raise UserError(f"another process trains in {workdir}; wait for it, or name another --workdir") from None
        except OSError as error:
            raise UserError(f"--workdir {workdir} cannot be written ({error.strerror}); name another folder") from None
        if claim.overwrite:
            # Results first: without them, and with config.json to the last, it is a run cut short.
            for name in RUN_FILES:
                files.remove(workdir / name)
        write_json(workdir / "config.json", {**claim.described, "parts": parts})
        write_json(workdir / "environment.json", environment())
        yield


def _check_same(old: Mapping, new: Mapping, workdir: Path):
    def flat(described):
        kept = {key: value for key, value in described.items() if key not in ("measure", "probe", "parts", "chosen")}
        return {path.replace("/", "."): value for path, value in trees.flatten(kept).items()}

    # A key that a later version added has its default in an older run.
    old, new = flat({**json.loads(settings.to_json(config_of(old))), **old}), flat(new)
    if old.get("base_weights.sha256") == new.get("base_weights.sha256"):  # the same bytes at another place
        for described in (old, new):
            for key in ("weights", "base_weights.source"):
                described.pop(key, None)
    keys = [key for key in (old | new) if old.get(key) != new.get(key) and key not in FREE_KEYS]
    if keys:
        shown = "; ".join(f"{key} was {_short(old.get(key))}, now {_short(new.get(key))}" for key in keys[:5])
        more = f"; and {len(keys) - 5} more" if len(keys) > 5 else ""
        raise UserError(
            f"{workdir} holds another run: {shown}{more}. Take another --workdir, or --overwrite to discard that run "
            "(tools/convert_checkpoint.py export keeps its result as weights to start from)"
        )


def is_finished(workdir: str | Path, config) -> bool:
    """Whether a folder holds the finished run of just this config; what it does not compare, ``train`` does."""
    if read_results(workdir) is None:
        return False

    def flat(config):
        kept = {key: value for key, value in config.to_dict().items() if key not in ("measure", "probe", "sweep")}
        return {path.replace("/", "."): value for path, value in trees.flatten(kept).items()}

    old, new = flat(config_of(read_description(workdir))), flat(config)
    return all(old[key] == new[key] for key in new if key not in FREE_KEYS)


def _short(value) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def read_description(workdir: str | Path) -> dict[str, Any]:
    """``config.json`` of a run, as a dict: the resolved config and what it resolved to."""
    path = as_path(workdir) / "config.json"
    try:
        described = json.loads(path.read_text())
        if not {"spec", "class_names", "base_weights", "data"} <= described.keys():
            raise ValueError
        if described["format"] > FORMAT:
            raise UserError(
                f"{path} was written by a newer version (format {described['format']}); update vitplast_jax"
            )
    except FileNotFoundError:
        raise UserError(f"{workdir} is not a run's folder: it has no config.json") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path} is damaged: it is not the JSON that train wrote") from None
    return described


def read_results(workdir: str | Path) -> dict[str, Any] | None:
    """``results.json`` of a run, None where it has not ended."""
    path = as_path(workdir) / "results.json"
    try:
        results = json.loads(path.read_text())
        if not {"test", "validation", "best_step", "trainable", "parameters"} <= results.keys():
            raise ValueError
    except FileNotFoundError:
        return None
    except (ValueError, AttributeError):
        raise UserError(f"{path} is damaged: not what train writes; delete it to let the run end again") from None
    return results


def environment() -> dict[str, Any]:
    """Versions and devices, for ``environment.json``."""
    packages = ("vitplast_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
        "backend": jax.default_backend(),
        "devices": [device.device_kind for device in jax.devices()],
        "processes": jax.process_count(),
    }


class MetricsLog:
    """``metrics.jsonl``: one JSON object a line. Opening it drops lines of steps that are about to be run again."""

    def __init__(self, path: str | Path, start: int):
        self._lines = None
        if jax.process_index() == 0:
            kept = [line for line in read_metrics(path) if line["step"] <= start] if start else []
            self._lines = files.Lines(path, map(_line, kept))

    def write(self, **entry):
        if self._lines is not None:
            self._lines.write(_line(entry))

    def flush(self):
        """Returns when every line is there to be read."""
        if self._lines is not None:
            self._lines.flush()


def _line(entry: Mapping) -> str:
    return json.dumps(entry) + "\n"


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a ``metrics.jsonl``; a last line that a kill cut short is left out."""
    try:
        lines = as_path(path).read_text().splitlines()
    except FileNotFoundError:
        return []
    entries = []
    for line in lines:
        try:
            entries.append(json.loads(line))
        except ValueError:
            continue
    return entries


def applied_selectors(config, has: Collection[str]) -> list[str]:
    """The selectors that apply to a model with these components: all of ``trainable``, and of ``also_trainable`` those
    that the model has (not every model has a head)."""
    also = [selector for selector in components.parse(config.also_trainable) if selector.component in ("all", *has)]
    return list(dict.fromkeys(map(str, (*components.parse(config.trainable), *also))))


def trainable_mask(config, params: Mapping) -> trees.Tree:
    """Which parameters a config trains, as a tree of bools."""
    return components.mask(params, applied_selectors(config, components.counts(params)))


def kept_dtype(config, path: str) -> str:
    """In which dtype a frozen parameter is kept; an adapter's start vectors must equal the float32 ones that train."""
    return "float32" if components.is_fixed(path) else config.frozen_dtype


def config_of(described: Mapping):
    """The checked config in what ``config.json`` holds."""
    return settings.validate({key: described[key] for key in settings.default_config() if key in described})


def load_run(workdir: str | Path, mesh=None) -> Run:
    """The best model of a run, whole: base weights by their recorded hash, trained leaves from the best step.

    Args:
      workdir: the run's folder.
      mesh: where its parameters go, each straight to its place; None: the first device of this process.
    Raises:
      UserError: no run there, no checkpoint yet, or the base weights are missing or have changed.
    """
    folder = as_path(workdir)
    described = read_description(folder)
    config = config_of(described)
    spec = specs.from_dict(described["spec"])
    best_step = _best_step(folder)
    class_names = tuple(described["class_names"])
    params = base_parameters(config, spec, class_names, described["base_weights"])
    initial, frozen = trees.partition(params, trainable_mask(config, params))
    if mesh is None:
        frozen = trees.map_paths(lambda path, leaf: jnp.asarray(leaf, kept_dtype(config, path)), frozen)
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        places = trees.map_paths(lambda *_: here, initial)
    else:
        frozen = sharding.put(mesh, frozen, lambda path: kept_dtype(config, path))
        places = sharding.parameters(mesh, initial)
    target = jax.tree.map(lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=at), initial, places)
    with Checkpoints(folder / "checkpoints") as checkpoints:
        trainable = checkpoints.restore_best(target, best_step)
    slots = slots_of(config)
    model = models.build(spec, trees.combine(trainable, frozen), slots)
    if slots is not None:
        model.origin = Origin(base=trees.combine(initial, frozen))
    return Run(folder, config, spec, class_names, model, best_step, described)


def _best_step(folder: Path) -> int:
    steps = [int(entry.name) for entry in (folder / "checkpoints" / "best").glob("*") if entry.name.isdigit()]
    results = read_results(folder)
    recorded = max(steps, default=None) if results is None else results["best_step"]
    if recorded not in steps:
        raise UserError(f"{folder} has no best checkpoint yet; let train reach its first validation")
    return recorded
