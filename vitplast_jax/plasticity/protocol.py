"""How plastic is each component of each block on these images? `measure` -> the result that plasticity.json holds.

In: a model, images (or sequences of words) of the pretraining data (x) and of the downstream data (y). Out: means,
intervals, quantiles, bounds, a recommendation.

The pass: a tile of x and a tile of y are embedded; then block after block gives the distances of its components'
outputs in one compiled function, the same for all blocks. Rates are reduced to statistics at once, so memory depends on
the tile and not on the number of pairs.

What a component is given (`inputs`):
  embedding  every component of every block is given the embedding output, the stream is not propagated (the paper)
  block      every component is given the residual stream that enters its block
  natural    each is given what it really receives in the forward pass
Which pairs of images (`pairing`, `distribution`) is said in pairs.py. FC1 is measured before the activation. Given a
sequence of the model's width, FC2 sees it zero-padded to its own.
"""

from collections.abc import Sequence

import jax
import numpy as np

from vitplast_jax import models, sharding
from vitplast_jax.errors import UserError
from vitplast_jax.models.specs import GPT2Spec, Preprocessing
from vitplast_jax.plasticity import block_pass, stream, summary
from vitplast_jax.plasticity import pairs as pairing_rules
from vitplast_jax.plasticity.bounds import COMPONENTS

INPUTS = ("embedding", "block", "natural")

# A tile of all pairs: bytes of activations on a device, and images of each side, whose pairs the host sums up.
_TILE_BYTES, _TILE_IMAGES = 2**30, 512


def measure(
    model,
    data_x,
    data_y,
    *,
    protocol: str = "ours",
    inputs: str = "embedding",
    pairing: str = "matched",
    distribution: str = "tasks",
    radius: float = 1.0,
    pairs: int = 0,
    images: int = 0,
    batch_size: int = 64,
    seed: int = 0,
    preprocessing: Preprocessing | None = None,
    mesh=None,
    folder=None,
    ratios: bool = False,
    with_bounds: bool = True,
    progress: bool = False,
) -> dict:
    """Measures the plasticity of every component of every block, its bound, and what to train.

    Args:
      model: a ViT, or GPT-2.
      data_x: images of the pretraining data: a Source, uint8 [n, h, w, c], or normalised floats [n, height, width, c];
        of GPT-2 words, whole numbers [n, t]; unused (None will do) where `distribution` takes both sides from the
        downstream data.
      data_y: images of the downstream data, likewise.
      protocol, inputs, pairing, distribution: see the docstrings of this module and of pairs.py.
      radius: Frobenius norm of the perturbation of a normalised image, for distribution "perturbation".
      pairs: at most so many pairs; 0: one for each image of the smaller side (matched), or all.
      images: at most so many of each side; 0: all.
      batch_size: images of each side that go through a block at once; changes no number (but `reference` reuse).
      seed: of the order of the images under `ours`.
      preprocessing: of uint8 images and files; None: the model's own, under `reference` the paper's.
      mesh: from :func:`vitplast_jax.sharding.make_mesh`, over whose devices images are divided; None: one device.
      folder: keep the state there every few seconds; the same call then goes on after a kill, with the same numbers.
      ratios: also write every single ratio to `ratios.npz` in the folder: `ratios` [blocks, components, pairs] (all
        pairs: [..., x, y]) float32, NaN for equal images, and the indices of the images.
      with_bounds: compute the bounds; of a few images they take longer than the measurement.
      progress: show a progress bar.
    Returns:
      The content of `plasticity.json`. What was not measured is None, `notes` says why. Intervals are 95 %; those of
      `components` are of the mean over the blocks. `quantiles` are those of the single rates, exact to 0.1 %.
    """
    for name, value, allowed in (
        ("protocol", protocol, pairing_rules.PROTOCOLS),
        ("inputs", inputs, INPUTS),
        ("pairing", pairing, pairing_rules.PAIRINGS),
        ("distribution", distribution, pairing_rules.DISTRIBUTIONS),
    ):
        if value not in allowed:
            raise UserError(f"measure.{name} is {value!r}, expected one of {', '.join(allowed)}")
    if ratios and folder is None:
        raise UserError("ratios=True needs a folder to write ratios.npz to")
    spec = model.spec
    if preprocessing is None:
        preprocessing = pairing_rules.REFERENCE_PREPROCESSING if protocol == "reference" else spec.preprocessing
    mesh = sharding.make_mesh(1) if mesh is None else mesh
    side_y = pairing_rules.open_images(data_y, spec, preprocessing, "y")
    side_x = side_y if distribution != "tasks" else pairing_rules.open_images(data_x, spec, preprocessing, "x")
    if side_x.words != side_y.words:
        raise UserError(f"sequences of {side_x.words} and of {side_y.words} words cannot be compared; cut them alike")
    if distribution == "perturbation" and side_y.words:
        raise UserError("words cannot be perturbed a little; take measure.distribution=tasks or downstream")
    tokens = side_y.words or spec.tokens
    # The paper's code gives GPT-2's attention, and no other, the output of LN1; the distance stays that of the input.
    normed = protocol == "reference" and isinstance(spec, GPT2Spec)
    places = pairing_rules.choose_pairs(
        side_x.count,
        side_y.count,
        protocol=protocol,
        pairing=pairing,
        pairs=pairs,
        images=images,
        batch_size=batch_size,
        seed=seed,
        distribution=distribution,
        labels=side_y.labels,
    )
    if distribution == "perturbation":
        side_y = side_y.perturbed(radius, seed)
    batch_size = -(-min(batch_size, max(map(len, places))) // mesh.size) * mesh.size
    tiles, sizes = _cut(spec, tokens, inputs, pairing, batch_size, places, mesh.size)
    params = models.parameters(model)
    key = ""
    if folder is not None:
        settings = [spec, protocol, inputs, pairing, ratios, side_x.prepare, side_y.prepare, sizes, mesh.size]
        key = stream.identify(settings, params, places, (side_x.fingerprint(), side_y.fingerprint()))
    found = stream.Stream(
        len(params["blocks"]),
        places,
        pairing=pairing,
        reference=protocol == "reference",
        folder=folder,
        key=key,
        ratios=ratios,
    )
    with jax.default_matmul_precision("highest"), _bar(tiles, found, places, pairing, progress) as bar:
        sides = side_x, side_y
        compiled = _compile(model, mesh, sides, inputs, found.pairing, batch_size, normed)
        _run(model, params, mesh, sides, compiled, inputs, batch_size, tiles[found.tiles :], sizes, found, bar)
    if min(int(statistics.count.min()) for statistics in found.by_block) == 0:
        raise UserError("all pairs consist of two equal images, so no rate exists; give two different sets of images")
    result = {
        "model": spec.name,
        "protocol": protocol,
        "inputs": inputs,
        "pairing": pairing,
        "distribution": distribution,
        "radius_of_perturbation": float(radius) if distribution == "perturbation" else None,
        "images_x": len(np.unique(places[0])),
        "images_y": len(np.unique(places[1])),
        "pairs": int(found.overall.count.min()),
        "excluded_pairs": int(found.overall.excluded.max()),
        "preprocessing": summary.describe_preprocessing(side_x.prepare, side_y.prepare),
        "tokens": tokens,
        "radius": float(found.radius.max()),
        "sigma": float(found.sigma.min()),
        **summary.make_tables(model, params, found, with_bounds),
        "notes": summary.make_notes(model, found, protocol, with_bounds),
    }
    found.finish()
    return result


def _cut(spec, tokens: int, inputs: str, pairing: str, batch_size: int, places, devices: int):
    """([(first x, first y)] of each tile, (images of x, of y) in a tile).

    Tiles of all pairs are whole batches of each side, as many as fit a device and are needed.
    """
    sizes = (batch_size, batch_size)
    if pairing == "all":
        widths = 6 * spec.width + 2 * spec.hidden if inputs == "natural" else 7 * spec.width
        batch_bytes = 2 * 4 * tokens * widths * batch_size // devices
        most = max(1, min(_TILE_BYTES // batch_bytes, _TILE_IMAGES // batch_size))
        sizes = tuple(batch_size * min(most, -(-len(side) // batch_size)) for side in places)
        return [(i, j) for i in range(0, len(places[0]), sizes[0]) for j in range(0, len(places[1]), sizes[1])], sizes
    return [(i, i) for i in range(0, len(places[0]), batch_size)], sizes


def _compile(model, mesh, sides, inputs: str, pairing: str, batch_size: int, normed: bool):
    """(embedding of each side, pass of a block, distances): the compiled functions of a measurement."""
    whole, block = block_pass.make_template(model), block_pass.make_template(model.blocks[0])
    embeds = [block_pass.make_embed(whole, side.prepare, mesh) for side in sides]
    run = block_pass.make_block_pass(block, inputs, pairing, batch_size // mesh.size, mesh, normed)
    return embeds, run, block_pass.make_distances(pairing, mesh)


def _run(model, params, mesh, sides, compiled, inputs, batch_size, tiles: Sequence, sizes, found: stream.Stream, bar):
    """Measures tile after tile into `found`."""
    rows, everywhere = sharding.batch(mesh), sharding.replicated(mesh)
    embeds, run, distances = compiled
    factors = [block_pass.fc1_factor(block_pass.plain_kernel(block.mlp.fc1)) for block in model.blocks]
    params, factors = jax.device_put((params, factors), everywhere)

    def stream_of(side: int, start: int):
        """The embedding output of one side of a tile; every process reads the rows of its own devices."""
        chosen = found.places[side][start : start + sizes[side]]
        chosen = np.concatenate([chosen, np.full(sizes[side] - len(chosen), chosen[-1])])

        def own(index):
            read = sides[side].read
            mine = chosen[index[0]]
            return np.concatenate([read(mine[k : k + batch_size]) for k in range(0, len(mine), batch_size)])

        shape = (len(chosen), *sides[side].read(chosen[:1]).shape[1:])
        images = jax.make_array_from_callback(shape, rows, own)
        numbers = jax.make_array_from_callback(chosen.shape, rows, lambda index: chosen[index].astype(np.int32))
        return embeds[side](params, images, numbers)

    kept: dict = {}  # the embedding of the x tile, which serves every y tile of its row
    for start in tiles:
        if kept.get("start") != start[0]:
            kept = {"start": start[0], "x": stream_of(0, start[0])}
        x, y = kept["x"], stream_of(1, start[1])
        real = tuple(slice(len(side) - first) for side, first in zip(found.places, start, strict=True))
        real = (slice(None), *(real if found.pairing == "all" else real[:1]))
        between, tile = distances(x, y), []
        for index in range(len(factors)):
            ratios, given, domain, x, y = run(params["blocks"][index], factors[index], x, y, between)
            if inputs != "embedding":
                between = distances(x, y)
            ratios, given = np.asarray(ratios)[real], np.asarray(given)[real]
            _check_finite(ratios, given, index)
            found.see(index, domain)
            tile.append((ratios, given))
            bar.update(given[0].size / len(factors))
        found.add(tile, start)


def _bar(tiles, found: stream.Stream, places, pairing: str, progress: bool):
    import tqdm

    counts = [len(side) for side in places]
    total = counts[0] * counts[1] if pairing == "all" else counts[0]
    done = total * found.tiles // len(tiles)
    form = "{l_bar}{bar}| {n:.0f}/{total} [{elapsed}<{remaining}, {rate_fmt}]"
    return tqdm.tqdm(
        total=total,
        initial=done,
        desc="plasticity",
        unit="pair",
        bar_format=form,
        dynamic_ncols=True,
        leave=False,
        disable=None if progress else True,
    )


def _check_finite(found, given, index: int):
    broken = np.asarray(~np.isfinite(found) & (given > 0)).reshape(len(COMPONENTS), -1).any(-1)
    if broken.any():
        names = ", ".join(name for name, bad in zip(COMPONENTS, broken, strict=True) if bad)
        raise UserError(f"block {index}: {names} returns NaN or infinity; check the weights and the images")
