"""One training step and one evaluation step, as pure functions to be jitted.

In: a state, the frozen parameters, a batch of uint8 images. Out: the next state and the step's metrics; or per-example
losses and predictions. Preprocessing is part of the step: small uint8 images travel, the device crops and normalises.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from einops import rearrange

from vitplast_jax import components, models, sharding, trees
from vitplast_jax.data import preprocess


class TrainState(NamedTuple):
    """All that changes from step to step: what a checkpoint holds."""

    step: jax.Array
    trainable: trees.Tree
    opt_state: Any


def cross_entropy(logits, labels, label_smoothing: float = 0.0):
    """Softmax cross-entropy of each example in float32: logits [b, c], int labels [b] -> [b]."""
    targets = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1]), label_smoothing)
    return optax.softmax_cross_entropy(logits.astype(jnp.float32), targets)


def make_train_step(
    static,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    prepare: Callable,
    *,
    seed: int,
    label_smoothing: float = 0.0,
    accumulation: int = 1,
    remat: str = "none",
    scan: bool = False,
    class_weights=None,
    mixing: Callable | None = None,
    mesh=None,
) -> Callable:
    """Returns ``train_step(state, frozen, batch) -> (state, metrics)``.

    Only the trainable leaves are differentiated. The gradient is the mean over the global batch, summed in float32,
    whether the batch is computed at once or in ``accumulation`` parts. Every random draw is a function of (seed, step,
    row of the global batch), so that neither parts nor devices change it.

    Args:
      static: the model's structure, from :func:`vitplast_jax.models.split`.
      optimizer, schedule: from :func:`vitplast_jax.training.optim.make_optimizer`.
      prepare: ``(uint8 images [b, h, w, c], keys [b]) -> images`` as the model wants them.
      seed: of the run. A batch with an entry "run", {"seed", "learning_rate"}, replaces it and the schedule's peak, so
        that one compiled step serves a grid of runs.
      label_smoothing: mass given to all classes alike.
      accumulation: parts of equal size in which a batch is computed one after the other.
      remat: which activations are recomputed in the backward pass, a name in :data:`vitplast_jax.models.layers.REMAT`.
      scan: whether equal blocks are computed in a loop, which compiles faster.
      class_weights: [c], what an example of a class counts in the loss (the mean is over examples, not weights).
      mixing: ``(images, others, keys) -> (images, shares [b])``; the other of an image is the next row of the global
        batch, so that neither parts nor devices change it.
      mesh: with it and whole parameters, devices add their parts up before they exchange sums: once, not once a part.
    """

    def losses(logits, labels):
        each = cross_entropy(logits, labels, label_smoothing)
        return each if class_weights is None else each * jnp.asarray(class_weights)[labels]

    def mean_loss(trainable, frozen, images, labels, keys, *other):
        inputs, share = prepare(images, keys), None
        if other:
            inputs, share = mixing(inputs, prepare(other[0], other[2]), keys)
        logits = models.apply(static, trainable, frozen, inputs, keys, remat=remat, scan=scan)
        if share is None:
            return losses(logits, labels).mean()
        return (share * losses(logits, labels) + (1 - share) * losses(logits, other[1])).mean()

    def gradients(trainable, frozen, *arguments):
        if accumulation == 1:
            return jax.value_and_grad(mean_loss)(trainable, frozen, *arguments)
        # Part i takes rows i, i + accumulation, ...: each device's rows stay on it.
        parts = jax.tree.map(lambda x: rearrange(x, "(b a) ... -> a b ...", a=accumulation), arguments)

        def add(total, part):
            return jax.tree.map(jnp.add, total, jax.value_and_grad(mean_loss)(trainable, frozen, *part)), None

        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), (jnp.zeros(()), trainable))
        total, _ = jax.lax.scan(add, zeros, parts)
        return jax.tree.map(lambda x: x / accumulation, total)

    if accumulation > 1 and mesh is not None and mesh.shape["fsdp"] == 1:
        gradients = sharding.mean_over_devices(mesh, gradients)

    def train_step(state: TrainState, frozen: Mapping, batch: Mapping):
        rows = batch["label"].shape[0]
        given = batch.get("run")
        peak = {} if given is None else {"learning_rate": given["learning_rate"]}
        keys = preprocess.example_keys(seed if given is None else given["seed"], state.step, jnp.arange(rows))
        arguments = (batch["image"], batch["label"], keys)
        if mixing is not None:
            following = jnp.roll(jnp.arange(rows), -1)
            arguments += tuple(argument[following] for argument in arguments)
        loss, grads = gradients(state.trainable, frozen, *arguments)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.trainable, **peak)
        trainable = optax.apply_updates(state.trainable, updates)
        rate = schedule(state.step, *peak.values())
        metrics = {"loss": loss, "learning_rate": rate, "grad_norm": optax.tree.norm(grads)}
        metrics |= {f"grad_norm/{name}": norm for name, norm in component_norms(grads).items()}
        return TrainState(state.step + 1, trainable, opt_state), metrics

    return train_step


def component_norms(grads: Mapping) -> dict[str, jax.Array]:
    """The norm of the gradient of each component, over all its blocks."""
    groups: dict[str, list] = {}
    for path, leaf in trees.flatten(grads).items():
        groups.setdefault(components.locate(path).component, []).append(leaf)
    return {name: optax.tree.norm(groups[name]) for name in components.COMPONENTS if name in groups}


def make_evaluation_step(static, prepare: Callable, scan: bool = False) -> Callable:
    """Returns ``evaluation_step(trainable, frozen, batch) -> batch of results``, one entry an example.

    Results are "loss" float32 [b], "prediction" int32 [b], and the batch's own "label" and "mask", so that sums are
    taken over real examples only, outside, in double precision.
    """

    def evaluation_step(trainable: Mapping, frozen: Mapping, batch: Mapping):
        logits = models.apply(static, trainable, frozen, prepare(batch["image"]), scan=scan)
        return {
            "loss": cross_entropy(logits, batch["label"]),
            "prediction": logits.argmax(-1).astype(jnp.int32),
            "label": batch["label"],
            "mask": batch["mask"],
        }

    return evaluation_step
