"""What does one block do to the distances of its inputs? Compiled functions over a tile of images, on any mesh.

In: a block's parameters, the token sequences of a tile of x and of y. Out: the distances of every component's inputs
and outputs for all pairs of the tile, and the same sequences at the next block.

The rows of a tile are divided over all devices of the mesh. Distances of matched pairs need no communication; those of
all pairs are taken in a ring: every device keeps its rows of x while the rows of y travel from device to device, so
that no device ever holds the activations of a whole side. Only distances, numbers, are gathered.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jax.sharding import PartitionSpec as P

from vitplast_jax import models, sharding, trees
from vitplast_jax.plasticity import pairs as pairing_rules
from vitplast_jax.plasticity import rates
from vitplast_jax.plasticity.bounds import COMPONENTS

# component -> (what it is given, what it returns), names of a block's activations
_NATURAL = {
    "ln1": ("input", "norm1"),
    "mha": ("norm1", "mha"),
    "ln2": ("mid", "norm2"),
    "fc1": ("norm2", "fc1"),
    "fc2": ("act", "fc2"),
}
_FROM_STREAM = {name: ("input", name) for name in COMPONENTS}

_ROWS = P(sharding.AXES)


# --- one block -------------------------------------------------------------------------------------------------------


@jax.jit
def fc1_factor(kernel: jax.Array) -> jax.Array:
    """A [d, d] matrix that preserves the distances of FC1's outputs: ||u W|| = ||u R^T|| for W^T = Q R, W [d, f].

    A quarter of the products and of the memory of the distances where f = 4 d.
    """
    if kernel.shape[1] <= kernel.shape[0]:
        return kernel
    return jnp.linalg.qr(kernel.T, mode="r").T


def plain_kernel(linear) -> jax.Array:
    """The kernel that a Linear applies, whatever sits in its slot."""
    kernel, bias = linear.kernel[...], None if linear.bias is None else linear.bias[...]
    return kernel if linear.slot is None else linear.slot.merged(kernel, bias)[0]


def _from_stream(block, factor, x, normed: bool) -> dict[str, jax.Array]:
    """Every component given `x` [b, n, d]; FC1 and FC2 up to a rotation and a shift, which no distance sees."""
    padded = plain_kernel(block.mlp.fc2)[: x.shape[-1]]  # of a zero-padded input only these rows meet anything
    norm1 = block.norm1(x)
    return {
        "ln1": norm1,
        "mha": block.attn(norm1 if normed else x),
        "ln2": block.norm2(x),
        "fc1": x @ factor.astype(x.dtype),
        "fc2": x @ padded.astype(x.dtype),
    }


def _domain(x):
    """(smallest standard deviation of a token over its channels, largest token norm)."""
    return jnp.std(x, axis=-1).min(), jnp.sqrt(jnp.square(x).sum(-1)).max()


@dataclasses.dataclass(frozen=True)
class Template:
    """A module without its parameters; two of one structure are equal, so they share one compiled function."""

    structure: Any
    module: Any = dataclasses.field(compare=False, repr=False)


def make_template(module) -> Template:
    params = models.parameters(module)
    structure = models.split(module, trees.map_paths(lambda *_: False, params))[0]
    shapes = trees.map_paths(lambda _, leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    return Template(structure, models.with_parameters(module, shapes))  # a cache of these must not hold weights


# --- over a mesh -----------------------------------------------------------------------------------------------------


def ring_distances(x: jax.Array, y: jax.Array, devices: int) -> jax.Array:
    """Distances of this device's rows of x [a, ...] to all rows of y, of which it holds [b, ...]: [a, devices * b].

    To be called inside a shard_map over both axes of the mesh.
    """
    if devices == 1:
        return rates.pairwise_distances(x, y)
    place = lax.axis_index(sharding.AXES)
    onwards = [(i, (i - 1) % devices) for i in range(devices)]

    def turn(y, _):
        found = rates.pairwise_distances(x, y)
        return lax.ppermute(y, sharding.AXES, onwards), found

    _, found = lax.scan(turn, y, None, length=devices)  # found[k]: to the rows that device place + k holds
    found = jnp.take(found, (jnp.arange(devices) - place) % devices, axis=0)
    return rearrange(found, "k a b -> a (k b)")


def _distances(pairing: str, devices: int):
    if pairing == "matched":
        return rates.matched_distances
    return functools.partial(ring_distances, devices=devices)


def _gathered(distances, axis: int, devices: int):
    """The distances of all devices' rows, on every device."""
    return distances if devices == 1 else lax.all_gather(distances, sharding.AXES, axis=axis, tiled=True)


def _on_rows(function, mesh, in_specs, out_specs):
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))


@functools.lru_cache(maxsize=16)
def make_embed(template: Template, prepare: pairing_rules.Prepare, mesh):
    """Compiles (params, images of a tile, their places in the data) -> embedding output [b, n, d], rows divided."""

    def embed(params, images, places):
        return models.with_parameters(template.module, params).embed(prepare(images, places))

    return _on_rows(embed, mesh, (P(), _ROWS, _ROWS), _ROWS)


@functools.lru_cache(maxsize=16)
def make_distances(pairing: str, mesh):
    """Compiles (x, y) of a tile -> their distances [b] or [a, b], on every device."""
    distance = _distances(pairing, mesh.size)
    return _on_rows(lambda x, y: _gathered(distance(x, y), 0, mesh.size), mesh, (_ROWS, _ROWS), P())


@functools.lru_cache(maxsize=16)
def make_block_pass(template: Template, inputs: str, pairing: str, batch_size: int, mesh, normed: bool = False):
    """Compiles one block's measurement; all blocks share it, and so does the next measurement of such a model.

    Args:
      template: of the block.
      inputs: "embedding", "block" or "natural".
      pairing: "matched" or "all".
      batch_size: rows of each side that a device computes at once.
      mesh: over whose devices the rows are divided.
      normed: the attention receives what LN1 makes of its input (inputs "embedding" and "block").
    Returns:
      A function (params, factor, x, y, distances of x and y) -> (rates [components, *pairs], distances of their inputs
      [components, *pairs], domain {component: (sigma, radius)}, x, y at the next block); pairs are [b] or [a, b].
    """
    places = _NATURAL if inputs == "natural" else _FROM_STREAM
    distance = _distances(pairing, mesh.size)

    def activations(block, factor, x):
        if inputs == "natural":
            return block(x, intermediates=True)[1]
        out = {"input": x} | _from_stream(block, factor, x, normed)
        return out | {"output": block(x) if inputs == "block" else x}

    def in_batches(block, factor, x):
        if len(x) <= batch_size:
            return activations(block, factor, x)
        batches = rearrange(x, "(k b) n d -> k b n d", b=batch_size)
        out = lax.map(lambda batch: activations(block, factor, batch), batches)
        return jax.tree.map(lambda a: rearrange(a, "k b ... -> (k b) ..."), out)

    def run(params, factor, x, y, stream_distances):
        block = models.with_parameters(template.module, params)
        of_x, of_y = in_batches(block, factor, x), in_batches(block, factor, y)
        needed = sorted({name for pair in places.values() for name in pair} - {"input"})
        found = jnp.stack([distance(of_x[name], of_y[name]) for name in needed])
        distances = dict(zip(needed, _gathered(found, 1, mesh.size), strict=True)) | {"input": stream_distances}
        given = jnp.stack([distances[places[c][0]] for c in COMPONENTS])
        returned = jnp.stack([distances[places[c][1]] for c in COMPONENTS])
        domain = {}
        for name in ("ln1", "mha", "ln2"):
            (sigma_x, radius_x), (sigma_y, radius_y) = (_domain(a[places[name][0]]) for a in (of_x, of_y))
            sigma, radius = jnp.minimum(sigma_x, sigma_y), jnp.maximum(radius_x, radius_y)
            domain[name] = lax.pmin(sigma, sharding.AXES), lax.pmax(radius, sharding.AXES)
        return rates.divide_distances(returned, given), given, domain, of_x["output"], of_y["output"]

    return _on_rows(run, mesh, (P(), P(), _ROWS, _ROWS, P()), (P(), P(), P(), _ROWS, _ROWS))
