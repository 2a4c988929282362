"""What would a measurement cost on TPUs that are not there? As :mod:`vitplast_jax.training.rehearsal`, for `measure`.

In: a checked config and a topology. Out: the figures of one tile of pairs through the whole model, for one device.
"""

import time
from typing import Any

import jax
import jax.numpy as jnp

from vitplast_jax import models, sharding
from vitplast_jax.plasticity import block_pass
from vitplast_jax.training import rehearsal


def rehearse_measurement(config, topology: str, slices: int = 1, data=None) -> dict[str, Any]:
    """Compiles the program that measures one block for a topology; all blocks share it.

    Args:
      config: checked; ``measure.batch_size`` is global.
      topology, slices, data: as in :func:`vitplast_jax.training.rehearsal.rehearse_training`.
    Returns:
      The same row. FLOPs, cycles and collectives are those of all blocks, for one batch of each side; the bytes of the
      arguments include every block's parameters.
    """
    chip = rehearsal.CHIPS[rehearsal.chip_of(topology)]
    mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp, rehearsal.topology_devices(topology, slices))
    spec = rehearsal.abstract_spec(config, len(data.class_names) if data is not None else 0)
    params = models.abstract_parameters(spec)
    template = block_pass.make_template(models.build(spec, params).blocks[0])
    rows, everywhere = sharding.batch(mesh), sharding.replicated(mesh)
    asked = -(-config.measure.batch_size // mesh.size)

    def shape(*dimensions, place=everywhere):
        return jax.ShapeDtypeStruct(dimensions, jnp.float32, sharding=place)

    def compile_block(batch_per_device):
        batch = batch_per_device * mesh.size
        side = shape(batch, spec.tokens, spec.width, place=rows)
        block = jax.tree.map(lambda leaf: shape(*leaf.shape), params["blocks"][0])
        between = shape(batch) if config.measure.pairing == "matched" else shape(batch, batch)
        settings = config.measure.inputs, config.measure.pairing, batch_per_device, mesh
        program = block_pass.make_block_pass(template, *settings)
        with jax.default_matmul_precision("highest"):
            return program.lower(block, shape(spec.width, spec.width), side, side, between).compile()

    began = time.monotonic()
    found = rehearsal.try_compile(compile_block, asked)
    row = {
        "model": spec.name,
        "trainable": [],
        "method": "",
        "topology": topology,
        "slices": slices,
        "chips": mesh.size,
        "batch_per_device": asked,
        **rehearsal.describe(found, chip, spec.depth),
        "compile_s": round(time.monotonic() - began, 1),
    }
    if row["collective_bytes"] is not None:
        row["collective_bytes"] = {kind: size * spec.depth for kind, size in row["collective_bytes"].items()}
        row["estimated_cycles"] *= spec.depth
        others = sum(leaf.size * 4 for leaf in jax.tree.leaves(params)) * (spec.depth - 1) // spec.depth
        row["argument_bytes"] += others
        row["fits"] = row["fits"] and row["argument_bytes"] + row["temp_bytes"] <= chip.hbm_bytes
        if row["mfu"]:
            row["mfu"] = round(row["mfu"] / spec.depth, 4)  # the FLOPs above were those of all blocks already
    row["largest_batch"] = asked if row["fits"] else rehearsal.largest_batch(compile_block, asked, found, chip)
    return row
