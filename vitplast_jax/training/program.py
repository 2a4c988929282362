"""The training step of a config as one program, before it is compiled: train compiles it, a rehearsal only looks at it.

In: a checked config, a spec, a mesh, and trees of arrays or of their shapes. Out: the lowered step, with every argument
where it will live.
"""

import jax
import jax.numpy as jnp

from vitplast_jax import sharding, trees
from vitplast_jax.training import inputs, optim
from vitplast_jax.training.run import kept_dtype
from vitplast_jax.training.step import TrainState, make_train_step


def initial_state(optimizer, trainable: trees.Tree) -> TrainState:
    """The state before the first step."""
    return TrainState(jnp.zeros((), jnp.int32), trainable, optimizer.init(trainable))


def state_shardings(mesh, optimizer, trainable: trees.Tree) -> TrainState:
    """Where each leaf of the state lives; ``trainable`` may hold arrays or shapes."""
    return sharding.like(mesh, jax.eval_shape(lambda tree: initial_state(optimizer, tree), trainable), trainable)


def lower_step(config, static, mesh, optimizer, schedule, prepare, state, frozen, batch, parts=1, class_weights=None):
    """Lowers one training step.

    Args:
      config: ``seed label_smoothing remat scan data`` are read.
      static: the model's structure.
      mesh: where it runs; its devices may be those of a machine that is not there.
      optimizer, schedule: from :func:`vitplast_jax.training.optim.make_optimizer`.
      prepare: ``(uint8 images, keys) -> images``, from :func:`vitplast_jax.training.inputs.make_training_preparation`.
      state, frozen, batch: arrays, or shapes with shardings.
      parts: in which a batch is computed one after the other.
      class_weights: [c], what an example of a class counts in the loss; None: all the same.
    """
    step = make_train_step(
        static,
        optimizer,
        schedule,
        prepare,
        seed=config.seed,
        label_smoothing=config.label_smoothing,
        accumulation=parts,
        remat=config.remat,
        scan=config.scan,
        class_weights=class_weights,
        mixing=inputs.mixing_of(config),
        mesh=mesh,
    )
    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    return jax.jit(step, donate_argnums=0, out_shardings=(places, sharding.replicated(mesh))).lower(
        state, frozen, batch
    )


def lower_abstract_step(config, static, params, depth: int, mesh, prepare, batch, mask: trees.Tree, parts: int = 1):
    """The same from shapes alone: takes no memory, reads no weights.

    ``params`` are the shapes of all parameters, ``mask`` says which of them train, ``depth`` how many blocks there are.
    """
    trainable, frozen = trees.partition(params, mask)
    trainable = trees.map_paths(lambda _, leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), trainable)
    frozen = trees.map_paths(lambda path, leaf: jax.ShapeDtypeStruct(leaf.shape, kept_dtype(config, path)), frozen)
    optimizer, schedule = optim.make_optimizer(config, trainable, depth)
    state = jax.eval_shape(lambda tree: initial_state(optimizer, tree), trainable)
    state = placed(state, sharding.like(mesh, state, trainable))
    frozen = placed(frozen, sharding.parameters(mesh, frozen))
    return lower_step(config, static, mesh, optimizer, schedule, prepare, state, frozen, batch, parts)


def placed(shapes, shardings):
    """Shapes that know where they live."""
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), shapes, shardings
    )
