"""A run's checkpoints, through Orbax.

In: a training state (trainable leaves, optimizer state, step) and a small record. Out: ``checkpoints/latest/STEP`` to
continue from and ``checkpoints/best/STEP`` to evaluate. Frozen weights are not saved: the config names their source.

States are saved as plain nested dicts of their leaves' paths, so that reading one needs no class of any library, and
are always restored into a target, which carries shapes, dtypes and the current shardings.
"""

import contextlib
import os
from collections.abc import Mapping

import jax
import orbax.checkpoint as ocp

from vitplast_jax import trees
from vitplast_jax.errors import UserError
from vitplast_jax.files import absolute

KEEP_LATEST = 2


class Checkpoints:
    """The checkpoints of one run: the latest two and the best by validation, kept apart."""

    def __init__(self, folder: str | os.PathLike):
        folder = absolute(folder)
        options = ocp.CheckpointManagerOptions(enable_async_checkpointing=True)

        def manager(name):
            # Handlers are named so that what a checkpoint holds can be asked before it is read.
            handlers = {"state": ocp.StandardCheckpointHandler(), "record": ocp.JsonCheckpointHandler()}
            return ocp.CheckpointManager(folder / name, item_handlers=handlers, options=options)

        self._latest, self._best = manager("latest"), manager("best")

    def latest_step(self) -> int | None:
        return self._latest.latest_step()

    def save_best(self, step: int, trainable: Mapping):
        """Saves what is to be tested. The former best stays until :meth:`save_latest` has recorded this one."""
        if step not in self._best.all_steps():
            _save(self._best, step, {"trainable": trainable})

    def forget_after_latest(self):
        """Drops best checkpoints of steps that are about to be run again."""
        latest = self.latest_step() or 0
        for step in [step for step in self._best.all_steps() if step > latest]:
            self._best.delete(step)

    def save_latest(self, step: int, state, record: Mapping):
        """Saves what is to be continued from; ``record["best_step"]`` names the checkpoint that is the best so far."""
        if step == self.latest_step():
            return
        self._best.wait_until_finished()  # a record must not name a checkpoint that is not yet on disk
        _save(self._latest, step, state, record)
        self.wait()
        for old in sorted(self._latest.all_steps())[:-KEEP_LATEST]:
            self._latest.delete(old)
        for old in self._best.all_steps():
            if old != record["best_step"]:
                self._best.delete(old)

    def restore_latest(self, target):
        """Returns (state, record) of the newest checkpoint; ``target`` has its shapes, dtypes and shardings."""
        step = self.latest_step()
        state = _restore(self._latest, step, target)
        record = self._latest.restore(step, args=ocp.args.Composite(record=ocp.args.JsonRestore())).record
        best = record["best_step"]
        if best is not None and best not in self._best.all_steps():
            raise UserError(f"{self._best.directory}: the best checkpoint, of step {best}, is gone; use --overwrite")
        return state, dict(record)

    def restore_best(self, target: Mapping, step: int) -> trees.Tree:
        """Returns the trainable leaves of the best checkpoint; ``target`` has their shapes, dtypes and shardings."""
        if step not in self._best.all_steps():
            raise UserError(f"{self._best.directory}: no checkpoint of step {step}; the run folder is not complete")
        return _restore(self._best, step, {"trainable": target})["trainable"]

    def wait(self):
        """Waits until everything is on disk; an error of a save in the background is raised here."""
        self._latest.wait_until_finished()
        self._best.wait_until_finished()

    def close(self):
        self.wait()
        self._latest.close()
        self._best.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def _save(manager: ocp.CheckpointManager, step: int, state, record: Mapping | None = None):
    items = {"state": ocp.args.StandardSave(_plain(state))}
    if record is not None:
        items["record"] = ocp.args.JsonSave(dict(record))
    if not manager.save(step, args=ocp.args.Composite(**items)):
        raise UserError(
            f"{manager.directory}: step {step} was not saved; steps up to {manager.latest_step()} are there"
        )


def _restore(manager: ocp.CheckpointManager, step: int, target):
    where = manager.directory / str(step)
    expected = trees.flatten(_plain(target))
    with _damage_is_said(where):
        stored = trees.flatten(manager.item_metadata(step).state)
    problems = [f"{path} is missing" for path in expected if path not in stored]
    problems += [f"{path} is not expected" for path in stored if path not in expected]
    for path in expected.keys() & stored.keys():
        want, have = expected[path], stored[path]
        if tuple(want.shape) != tuple(have.shape) or want.dtype != have.dtype:
            problems.append(f"{path} is {have.dtype}{list(have.shape)}, expected {want.dtype}{list(want.shape)}")
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise UserError(f"checkpoint {where} does not fit this run: " + "; ".join(problems[:5]) + more)
    with _damage_is_said(where):
        restored = manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(_plain(target)))).state
    flat = trees.flatten(restored)
    return jax.tree.unflatten(jax.tree.structure(target), [flat[path] for path in _paths(target)])


@contextlib.contextmanager
def _damage_is_said(where):
    """Orbax and the storage below it raise errors of many kinds; all mean that the checkpoint cannot be read."""
    try:
        yield
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:120]
        raise UserError(
            f"checkpoint {where} is damaged ({reason}); delete that folder to go on from an older one"
        ) from error


def _paths(tree) -> list[str]:
    """One path a leaf of any pytree: keys, field names and indices joined by slashes."""
    keys = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [
        "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path) for path, _ in keys
    ]


def _plain(tree) -> trees.Tree:
    return trees.unflatten(dict(zip(_paths(tree), jax.tree.leaves(tree), strict=True)))
