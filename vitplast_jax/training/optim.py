"""The optimizer: SGD or AdamW over the trainable leaves, warm-up and cosine, clipping, factors by selector.

In: a checked config and the (pruned) tree of trainable parameters. Out: an optax transformation and its schedule.
Frozen parameters never reach it, so there is no state for them and nothing can move them.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import optax

from vitplast_jax import components, trees
from vitplast_jax.errors import UserError


def make_schedule(learning_rate: float, warmup_steps: int, steps: int) -> optax.Schedule:
    """Linear from 0 to ``learning_rate`` over ``warmup_steps``, then a cosine to 0 at ``steps``.

    ``schedule(step, peak)`` replaces the peak, by a value that may be known only at run time.
    """
    shape = optax.cosine_decay_schedule(1.0, max(steps - warmup_steps, 1))
    if warmup_steps:
        shape = optax.join_schedules([optax.linear_schedule(0.0, 1.0, warmup_steps), shape], [warmup_steps])

    def schedule(step, peak=learning_rate):
        return peak * shape(step)

    return schedule


def make_optimizer(config, trainable: Mapping, depth: int) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """Builds the optimizer for a tree of trainable parameters.

    Clipping is by the global norm over the trainable leaves. Weight decay is AdamW's decoupled one (Loshchilov and
    Hutter, arXiv 1711.05101), or with SGD an L2 term added to the gradient before the momentum, as in torch's SGD; by
    default it acts on kernels only, not on biases, norms, scales and tokens.

    Its ``update`` takes ``learning_rate=PEAK`` besides, in place of the config's, so that one compiled step serves the
    learning rates of a grid.

    Args:
      config: ``optimizer learning_rate warmup_steps steps momentum clip_norm weight_decay learning_rate_factors
        weight_decay_factors layer_decay`` are read.
      trainable: the pruned tree that the gradients have.
      depth: number of blocks, for the layer-wise decay.
    Raises:
      UserError: a factor's selector matches nothing that trains.
    """
    schedule = make_schedule(config.learning_rate, config.warmup_steps, config.steps)
    rates = learning_rate_factors(trainable, config.learning_rate_factors, config.layer_decay, depth)
    decays = weight_decay_factors(trainable, config.weight_decay_factors)
    decay = _decay_weights(config.weight_decay, decays) if config.weight_decay else optax.identity()
    if config.optimizer == "adamw":
        direction = optax.chain(optax.scale_by_adam(), decay)
    else:
        momentum = optax.trace(config.momentum) if config.momentum else optax.identity()
        direction = optax.chain(decay, momentum)
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity(),
        direction,
        _scale_by(rates) if any(rate != 1.0 for rate in trees.flatten(rates).values()) else optax.identity(),
        _descend(schedule),
    ), schedule


def learning_rate_factors(trainable: Mapping, factors: Sequence[str], layer_decay: float, depth: int) -> trees.Tree:
    """A factor on the learning rate for each leaf: layer-wise decay times what ``"SELECTOR=FACTOR"`` entries say.

    With layer-wise decay (BEiT, arXiv 2106.08254) block ``i`` has ``layer_decay ** (depth - i)``, the embedding
    ``layer_decay ** (depth + 1)``, the final norm and the head 1.
    """

    def by_depth(path, _):
        component, block = components.locate(path)
        layer = block + 1 if block is not None else 0 if component == "emb" else depth + 1
        return layer_decay ** (depth + 1 - layer)

    return _apply_factors(trainable, trees.map_paths(by_depth, trainable), factors, multiply=True)


def weight_decay_factors(trainable: Mapping, factors: Sequence[str]) -> trees.Tree:
    """A factor on the weight decay for each leaf: 1 for kernels, else 0, unless a ``"SELECTOR=FACTOR"`` entry says."""
    kernels = trees.map_paths(lambda path, _: float(path.endswith("kernel")), trainable)
    return _apply_factors(trainable, kernels, factors, multiply=False)


def _apply_factors(trainable: Mapping, values: trees.Tree, factors: Sequence[str], multiply: bool) -> trees.Tree:
    flat = trees.flatten(values)
    for entry in factors:  # where two entries name a leaf, the later one counts
        selector, _, factor = entry.rpartition("=")
        try:
            chosen = trees.flatten(components.mask(trainable, selector))
        except UserError as error:
            raise UserError(f"factor {entry!r}: of what trains, {error}") from None
        base = trees.flatten(values)
        flat |= {path: (base[path] if multiply else 1.0) * float(factor) for path, hit in chosen.items() if hit}
    return trees.unflatten(flat)


def _decay_weights(rate: float, factors: trees.Tree) -> optax.GradientTransformation:
    return optax.stateless(
        lambda updates, params: jax.tree.map(lambda u, p, f: u + rate * f * p, updates, params, factors)
    )


def _descend(schedule) -> optax.GradientTransformationExtraArgs:
    """Minus the scheduled rate times the update; the state is that of ``optax.scale_by_learning_rate``."""

    def update(updates, state, params=None, *, learning_rate=None, **_):
        rate = schedule(state.count) if learning_rate is None else schedule(state.count, learning_rate)
        count = optax.safe_increment(state.count)
        return jax.tree.map(lambda u: -rate * u, updates), optax.ScaleByScheduleState(count=count)

    return optax.GradientTransformationExtraArgs(
        lambda _: optax.ScaleByScheduleState(count=jnp.zeros((), jnp.int32)), update
    )


def _scale_by(factors: trees.Tree) -> optax.GradientTransformation:
    return optax.stateless(lambda updates, _: jax.tree.map(lambda u, f: f * u, updates, factors))
