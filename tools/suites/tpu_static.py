"""What does the TPU compiler say of a training step? Nothing is run: figures for one device (needs libtpu)."""

# Rows of --trainable that are no component: what is attached to q and v, beside the head.
ATTACHED = {
    "lora": {"peft.method": "lora", "also_trainable": ("head",)},
    "aoft": {"peft.method": "lora", "peft.projection": "ao", "also_trainable": ("head",)},
}


def tpu_static(flags) -> list[dict]:
    """The TPU compiler's figures of a training step: full, by component, and with what is attached."""
    from vitplast_jax.training import config as settings
    from vitplast_jax.training import rehearsal

    rehearsal.prepare_environment(flags.topology)
    chips, rows = len(rehearsal.topology_devices(flags.topology, flags.slices)), []
    batch = flags.batch or 64
    for name in flags.trainable.split(","):
        config = settings.validate(
            {
                "model": flags.model,
                "num_classes": 1000,
                **ATTACHED.get(name, {"trainable": (name,)}),
                "batch_size": batch * chips,
                "compute_dtype": "bfloat16",
                "frozen_dtype": "bfloat16",
                "mesh.fsdp": flags.fsdp,
                "remat": flags.remat,
                "accumulation": flags.parts,
            }
        )
        row = rehearsal.rehearse_training(config, flags.topology, flags.slices, gelu=flags.gelu)
        rows.append({"model": flags.model, "batch": batch * chips, "dtype": "bfloat16", "gelu": flags.gelu} | row)
        rows[-1] |= {"trainable": name, "remat": flags.remat, "parts": flags.parts}
        if row["flops"] is None:
            print(f"{name:>5}: does not fit; {row['largest_batch']} images a chip do", flush=True)
        else:
            cycles, temporaries = row["estimated_cycles"] / 1e6, row["temp_bytes"] / 1e9
            print(
                f"{name:>5}: {cycles:.1f} M cycles, {temporaries:.2f} GB of temporaries, MFU {row['mfu']}", flush=True
            )
    return rows
