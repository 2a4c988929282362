"""What does it cost to train a choice of components? FLOPs of a step, bytes of optimizer state and of the all-reduce.

In: a model's spec and parameters (or their shapes), and which of them train. Out: figures of one image or one step.

FLOPs are those of the matrix products (2 a b c for [a, b] @ [b, c]), counted from the shapes: the forward pass; for
every product whose weights train the weights' gradient, as much again; and the gradient of the input of every product
that comes after the first trained parameter, as much again (attention's own products: twice, for both operands). So a
choice of late blocks is cheaper than one of early blocks. What is left out, norms, softmax and GELU, is a few percent.
Checked against XLA's count of the lowered training step in the tests.
"""

from collections.abc import Iterable, Mapping

import jax
import numpy as np

from vitplast_jax import components, trees
from vitplast_jax.training import optim

# The operations of a block in the order of the forward pass, by the beginnings of their parameters' paths.
_BLOCK = ("norm1", "attn", "attention", "attn/out", "ls1", "norm2", "mlp/gate", "mlp/fc1", "mlp/fc2", "ls2")
REDUCED_BYTES = 4  # gradients are reduced over devices in float32


def _operations(spec, params: Mapping) -> Iterable[tuple[list[str], float, int]]:
    """(paths of the parameters, FLOPs of the forward pass of one image, operands with gradients) in forward order."""
    flat = trees.flatten(params)
    blocks: dict[int, dict[str, list[str]]] = {}
    first, last = [], []
    for path in flat:
        component, block = components.locate(path)
        if block is None:
            (first if component == "emb" else last).append(path)
            continue
        inside = path.split("/", 2)[2]
        name = max((n for n in _BLOCK if f"{inside}/".startswith(f"{n}/")), key=len, default="norm1")
        blocks.setdefault(block, {}).setdefault(name, []).append(path)

    def products(paths, tokens):
        return sum(2.0 * tokens * int(np.prod(flat[path].shape)) for path in paths if path.endswith("kernel"))

    yield first, products(first, spec.tokens - spec.prefix), 0
    for block in sorted(blocks):
        for name in _BLOCK:
            paths = blocks[block].get(name, [])
            if name == "attention":
                yield [], 4.0 * spec.tokens**2 * spec.width, 2
            elif paths:
                yield paths, products(paths, spec.tokens), 1
    yield last, products(last, 1), 1
    if "wte" in flat:  # GPT-2's head
        yield ["wte"], 2.0 * spec.tokens * int(np.prod(flat["wte"].shape)), 1


def step_flops(spec, params: Mapping, mask: Mapping) -> float:
    """FLOPs of one training step for one image, when the parameters that `mask` marks train."""
    chosen = trees.flatten(mask)
    total, trained_before = 0.0, False
    for paths, flops, operands in _operations(spec, params):
        trains = any(chosen[path] for path in paths)
        total += flops
        if any(chosen[path] for path in paths if path.endswith(("kernel", "wte"))):
            total += flops
        if trained_before:
            total += operands * flops
        trained_before = trained_before or trains
    return total


class Costs:
    """The costs of choices of one model under one config, each a function of its selectors.

    Args:
      config: a checked config: optimizer and `also_trainable` are read.
      spec, params: of the model; shapes of parameters will do.
    """

    def __init__(self, config, spec, params: Mapping):
        shapes = {path: jax.ShapeDtypeStruct(leaf.shape, np.float32) for path, leaf in trees.flatten(params).items()}
        self._spec, self._params = spec, trees.unflatten(shapes)
        has = {*components.counts(params), "all"}
        self._also = [str(s) for s in components.parse(config.also_trainable) if s.component in has]
        everything = trees.map_paths(lambda *_: True, self._params)
        self._full = step_flops(spec, self._params, everything)
        # Factors by selector may name a component that is not there yet (peft); they change no size.
        plain = config.copy_and_resolve_references()
        with plain.unlocked():
            plain.learning_rate_factors, plain.weight_decay_factors = (), ()
        optimizer, _ = optim.make_optimizer(plain, self._params, spec.depth)
        state = jax.eval_shape(optimizer.init, self._params)
        # Its arrays mirror the parameters, so their bytes grow with what trains; step counts are no cost.
        state_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state) if leaf.ndim)
        self._state_bytes = state_bytes / trees.count(self._params)

    def __call__(self, selectors: Iterable[str]) -> dict:
        """The cost of training `selectors` (and `also_trainable`).

        Returns:
          parameters: of the selectors alone, as the papers count; trainable_parameters: with `also_trainable`;
          flops: of a step, as a share of full finetuning's; flops_per_image;
          optimizer_bytes: of its state; allreduce_bytes: of the gradients that devices exchange in a step.
        """
        selectors = list(selectors)
        alone = trees.partition(self._params, components.mask(self._params, selectors))[0]
        mask = components.mask(self._params, [*selectors, *self._also])
        trainable = trees.partition(self._params, mask)[0]
        flops = step_flops(self._spec, self._params, mask)
        count = trees.count(trainable)
        return {
            "parameters": trees.count(alone),
            "trainable_parameters": count,
            "flops": flops / self._full,
            "flops_per_image": flops,
            "optimizer_bytes": round(self._state_bytes * count),
            "allreduce_bytes": REDUCED_BYTES * count,
        }
