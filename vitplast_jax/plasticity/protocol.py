"""How plastic is each component of each block on these images? `measure` -> the result that plasticity.json holds.

In: a model, images of the pretraining data (x) and of the downstream data (y). Out: means, intervals, quantiles,
bounds, a recommendation.

The pass: a tile of x and a tile of y are embedded; then block after block gives the distances of its components'
outputs in one compiled function, the same for all blocks. Rates are reduced to statistics at once, so memory depends on
the tile and not on the number of pairs.

What a component is given (`inputs`):
  embedding  every component of every block is given the embedding output, the stream is not propagated (the paper)
  block      every component is given the residual stream that enters its block
  natural    each is given what it really receives in the forward pass
FC1 is measured before the activation. Given a sequence of the model's width, FC2 sees it zero-padded to its own.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange

from vitplast_jax import models, trees
from vitplast_jax.errors import UserError
from vitplast_jax.models.specs import Preprocessing
from vitplast_jax.plasticity import pairs as pairing_rules
from vitplast_jax.plasticity import rates, summary
from vitplast_jax.plasticity.bounds import COMPONENTS

INPUTS = ("embedding", "block", "natural")

# component -> (what it is given, what it returns), names of a block's activations
_NATURAL = {
    "ln1": ("input", "norm1"),
    "mha": ("norm1", "mha"),
    "ln2": ("mid", "norm2"),
    "fc1": ("norm2", "fc1"),
    "fc2": ("act", "fc2"),
}
_FROM_STREAM = {name: ("input", name) for name in COMPONENTS}

_TILE_BYTES = 2**30  # of activations that a tile of all pairs may take


# --- one block -------------------------------------------------------------------------------------------------------


@jax.jit
def fc1_factor(kernel: jax.Array) -> jax.Array:
    """A [d, d] matrix that preserves the distances of FC1's outputs: ||u W|| = ||u R^T|| for W^T = Q R, W [d, f].

    A quarter of the products and of the memory of the distances where f = 4 d.
    """
    if kernel.shape[1] <= kernel.shape[0]:
        return kernel
    return jnp.linalg.qr(kernel.T, mode="r").T


def _kernel(linear) -> jax.Array:
    kernel, bias = linear.kernel[...], None if linear.bias is None else linear.bias[...]
    return kernel if linear.slot is None else linear.slot.merged(kernel, bias)[0]


def _from_stream(block, factor, x) -> dict[str, jax.Array]:
    """Every component given `x` [b, n, d]; FC1 and FC2 up to a rotation and a shift, which no distance sees."""
    padded = _kernel(block.mlp.fc2)[: x.shape[-1]]  # of a zero-padded input only these rows meet anything but zeros
    return {
        "ln1": block.norm1(x),
        "mha": block.attn(x),
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


@functools.lru_cache(maxsize=16)
def make_embed(template: Template, prepare: pairing_rules.Prepare):
    """Compiles (params, batch of images) -> embedding output [b, n, d]."""
    return jax.jit(lambda params, images: models.with_parameters(template.module, params).embed(prepare(images)))


@functools.lru_cache(maxsize=16)
def make_block_pass(template: Template, inputs: str, pairing: str, batch_size: int):
    """Compiles one block's measurement; all blocks share it, and so does the next measurement of such a model.

    Returns:
      A function (params, factor, x, y, distances of x and y) -> (rates [components, *pairs], distances of their inputs
      [components, *pairs], domain {component: (sigma, radius)}, x, y at the next block); pairs are [b] or [a, b].
    """
    places = _NATURAL if inputs == "natural" else _FROM_STREAM
    distance = rates.matched_distances if pairing == "matched" else rates.pairwise_distances

    def activations(block, factor, x):
        if inputs == "natural":
            return block(x, intermediates=True)[1]
        out = {"input": x} | _from_stream(block, factor, x)
        return out | {"output": block(x) if inputs == "block" else x}

    def in_batches(block, factor, x):
        if len(x) <= batch_size:
            return activations(block, factor, x)
        batches = rearrange(x, "(k b) n d -> k b n d", b=batch_size)
        out = jax.lax.map(lambda batch: activations(block, factor, batch), batches)
        return jax.tree.map(lambda a: rearrange(a, "k b ... -> (k b) ..."), out)

    @jax.jit
    def run(params, factor, x, y, stream_distances):
        block = models.with_parameters(template.module, params)
        of_x, of_y = in_batches(block, factor, x), in_batches(block, factor, y)
        needed = {name for pair in places.values() for name in pair} - {"input"}
        distances = {"input": stream_distances} | {name: distance(of_x[name], of_y[name]) for name in sorted(needed)}
        given = jnp.stack([distances[places[c][0]] for c in COMPONENTS])
        returned = jnp.stack([distances[places[c][1]] for c in COMPONENTS])
        domain = {}
        for name in ("ln1", "mha", "ln2"):
            (sigma_x, radius_x), (sigma_y, radius_y) = (_domain(a[places[name][0]]) for a in (of_x, of_y))
            domain[name] = jnp.minimum(sigma_x, sigma_y), jnp.maximum(radius_x, radius_y)
        return rates.divide_distances(returned, given), given, domain, of_x["output"], of_y["output"]

    return run


# --- the pass --------------------------------------------------------------------------------------------------------


def _padded(indices: np.ndarray, size: int) -> np.ndarray:
    return np.concatenate([indices, np.full(size - len(indices), indices[-1])])


def _tile_sizes(spec, inputs: str, batch_size: int, counts: tuple[int, int]) -> tuple[int, int]:
    """Images of each side in a tile of all pairs: whole batches, as many as fit and are needed."""
    widths = 6 * spec.width + 2 * spec.hidden if inputs == "natural" else 7 * spec.width
    batch_bytes = 2 * 4 * spec.tokens * widths * batch_size
    most = max(1, _TILE_BYTES // batch_bytes)
    return tuple(batch_size * min(most, -(-count // batch_size)) for count in counts)


def measure(
    model,
    data_x,
    data_y,
    *,
    protocol: str = "ours",
    inputs: str = "embedding",
    pairing: str = "matched",
    pairs: int = 0,
    images: int = 0,
    batch_size: int = 64,
    seed: int = 0,
    preprocessing: Preprocessing | None = None,
    progress: bool = False,
) -> dict:
    """Measures the plasticity of every component of every block, its bound, and what to train.

    Args:
      model: a ViT.
      data_x: images of the pretraining data: a Source, uint8 [n, h, w, c], or normalised floats [n, height, width, c].
      data_y: images of the downstream data, likewise.
      protocol, inputs, pairing: see the docstrings of this module and of :func:`choose_pairs`.
      pairs: at most so many pairs; 0: one for each image of the smaller side (matched), or all.
      images: at most so many of each side; 0: all.
      batch_size: images of each side that go through a block at once; changes no number (but `reference` reuse).
      seed: of the order of the images under `ours`.
      preprocessing: of uint8 images and files; None: the model's own, under `reference` the paper's.
      progress: show a progress bar.
    Returns:
      The content of `plasticity.json`. What was not measured is None, `notes` says why. Intervals are 95 %; those of
      `components` are of the mean over the blocks. `quantiles` are those of the single rates, exact to 0.1 %.
    """
    _check_choice("protocol", protocol, pairing_rules.PROTOCOLS)
    _check_choice("inputs", inputs, INPUTS)
    _check_choice("pairing", pairing, pairing_rules.PAIRINGS)
    spec = model.spec
    if preprocessing is None:
        preprocessing = pairing_rules.REFERENCE_PREPROCESSING if protocol == "reference" else spec.preprocessing
    side_x, side_y = (
        pairing_rules.open_images(data, spec, preprocessing, side) for data, side in ((data_x, "x"), (data_y, "y"))
    )
    places_x, places_y = pairing_rules.choose_pairs(
        side_x.count,
        side_y.count,
        protocol=protocol,
        pairing=pairing,
        pairs=pairs,
        images=images,
        batch_size=batch_size,
        seed=seed,
    )
    batch_size = min(batch_size, max(len(places_x), len(places_y)))
    params = models.parameters(model)
    depth = len(params["blocks"])

    def new_statistics():
        if pairing == "all":
            return rates.AllPairsStatistics((len(COMPONENTS),), len(places_x), len(places_y))
        return rates.RateStatistics((len(COMPONENTS),), reference=protocol == "reference")

    by_block, overall = [new_statistics() for _ in range(depth)], new_statistics()
    sigma, radius = np.full((depth, 2), np.inf), np.zeros(depth)
    if pairing == "all":
        size_x, size_y = _tile_sizes(spec, inputs, batch_size, (len(places_x), len(places_y)))
        starts = [(i, j) for i in range(0, len(places_x), size_x) for j in range(0, len(places_y), size_y)]
    else:
        size_x = size_y = batch_size
        starts = [(i, i) for i in range(0, len(places_x), batch_size)]

    with jax.default_matmul_precision("highest"), _bar(len(starts) * depth, progress) as bar:
        whole = make_template(model)
        embed_x, embed_y = (make_embed(whole, side.prepare) for side in (side_x, side_y))
        run = make_block_pass(make_template(model.blocks[0]), inputs, pairing, batch_size)
        distance = rates.matched_distances if pairing == "matched" else rates.pairwise_distances
        factors = [fc1_factor(_kernel(block.mlp.fc1)) for block in model.blocks]
        kept: dict = {}  # the embedding of the x tile, which serves every y tile of its row

        def stream_of(embed, side, places, start, size):
            chosen = _padded(places[start : start + size], size)
            batches = (side.read(chosen[k : k + batch_size]) for k in range(0, size, batch_size))
            return jnp.concatenate([embed(params, jnp.asarray(batch)) for batch in batches])

        for start_x, start_y in starts:
            if kept.get("start") != start_x:
                kept = {"start": start_x, "x": stream_of(embed_x, side_x, places_x, start_x, size_x)}
            x, y = kept["x"], stream_of(embed_y, side_y, places_y, start_y, size_y)
            real = (slice(None), slice(len(places_x) - start_x), slice(len(places_y) - start_y))
            real, start = (real, ((start_x, start_y),)) if pairing == "all" else (real[:2], ())
            total, shortest = 0.0, np.inf
            between = distance(x, y)
            for index in range(depth):
                found, given, domain, x, y = run(params["blocks"][index], factors[index], x, y, between)
                if inputs != "embedding":
                    between = distance(x, y)
                found, given = np.asarray(found, np.float64)[real], np.asarray(given)[real]
                _check_finite(found, given, index)
                by_block[index].update(found, given, *start)
                total, shortest = total + found, np.minimum(shortest, given)
                sigma[index] = np.minimum(sigma[index], [domain["ln1"][0], domain["ln2"][0]])
                radius[index] = max(radius[index], float(domain["mha"][1]))
                bar.update()
            overall.update(total / depth, shortest, *start)

    if min(int(statistics.count.min()) for statistics in by_block) == 0:
        raise UserError("all pairs consist of two equal images, so no rate exists; give two different sets of images")
    return {
        "model": spec.name,
        "protocol": protocol,
        "inputs": inputs,
        "pairing": pairing,
        "images_x": len(np.unique(places_x)),
        "images_y": len(np.unique(places_y)),
        "pairs": int(overall.count.min()),
        "excluded_pairs": int(overall.excluded.max()),
        "preprocessing": summary.describe_preprocessing(side_x.prepare, side_y.prepare),
        "tokens": spec.tokens,
        "radius": float(radius.max()),
        "sigma": float(sigma.min()),
        **summary.make_tables(model, params, by_block, overall, sigma, radius),
        "notes": summary.make_notes(overall, protocol, pairing, places_x, places_y),
    }


def _check_choice(name: str, value: str, allowed: tuple[str, ...]):
    if value not in allowed:
        raise UserError(f"measure.{name} is {value!r}, expected one of {', '.join(allowed)}")


def _bar(total: int, progress: bool):
    import tqdm

    return tqdm.tqdm(total=total, desc="plasticity", unit="block", disable=not progress, leave=False)


def _check_finite(found, given, index: int):
    broken = np.asarray(~np.isfinite(found) & (given > 0)).reshape(len(COMPONENTS), -1).any(-1)
    if broken.any():
        names = ", ".join(name for name, bad in zip(COMPONENTS, broken, strict=True) if bad)
        raise UserError(f"block {index}: {names} returns NaN or infinity; check the weights and the images")
