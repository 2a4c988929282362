"""Equal blocks as a loop: one of them is traced and compiled, however many there are.

In: a model's blocks and tokens. Out: the tokens after the last block. Parameters keep their paths: those of a loop's
blocks are stacked within the program, which costs it a copy of them, and their gradients come back one by one.
"""

import itertools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vitplast_jax import trees

# In these attributes equal blocks may differ: where they draw random numbers, how often they are dropped.
_VARYING = ("first_place", "place", "drop_path")


def loops(blocks: Sequence[nnx.Module], trainable: Mapping) -> tuple[int, ...]:
    """Lengths of the runs of equal blocks: same structure, shapes and dtypes, and the same parameters train.

    ``trainable``: index -> the tree of what trains in that block; a block without is left out.
    """

    def kind(index):
        graph, params, _ = _opened(blocks[index])
        leaves = [(path, leaf.shape, leaf.dtype) for path, leaf in trees.flatten(params).items()]
        return graph, leaves, sorted(trees.flatten(trainable.get(index, {})))

    return tuple(len(list(run)) for _, run in itertools.groupby(range(len(blocks)), kind))


def run_loop(blocks: Sequence[nnx.Module], x, keys, wrapped):
    """The tokens after equal blocks; ``wrapped`` changes the function of one block, as for rematerialisation."""
    if len(blocks) == 1:
        return wrapped(lambda x: blocks[0](x, keys))(x)
    graphs, trees_of, values = zip(*map(_opened, blocks), strict=True)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees_of)
    columns = list(zip(*values, strict=True))
    differing = {index: np.asarray(column) for index, column in enumerate(columns) if len(set(column)) > 1}

    def step(x, part):
        params, differing = part

        def call(x):
            block = nnx.merge(graphs[0], params)
            for index, (module, name) in enumerate(_varying(block)):
                setattr(module, name, differing.get(index, columns[index][0]))
            return block(x, keys)

        return wrapped(call)(x), None

    return jax.lax.scan(step, x, (stacked, differing))[0]


def _opened(block):
    """(structure without what may differ, parameters, [what may differ])."""
    block = nnx.merge(*nnx.split(block))  # a copy that shares its arrays
    found = list(_varying(block))
    values = [getattr(module, name) for module, name in found]
    for module, name in found:
        setattr(module, name, 0)
    graph, state = nnx.split(block)
    return graph, nnx.to_pure_dict(state), values


def _varying(block):
    """(module, attribute) of all that may differ, in the order of modules."""
    for _, module in nnx.iter_modules(block):
        for name in _VARYING:
            if hasattr(module, name):
                yield module, name
