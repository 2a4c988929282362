"""Compiles a config's program with the real TPU compiler for chips that are not there: does it fit, what does it cost?

Example:
  python tools/rehearse_pod.py --config configs/X.py --topology v5e:16x16 [--slices 4] [--json FILE]
  python tools/rehearse_pod.py --config configs/X.py --topology v5e:2x4 --what-if "batch_size=256,512;remat=none,block"

Needs libtpu (pip install libtpu), best in an environment of its own: beside it every plain `import jax` seeks a TPU.
Nothing is run, no weights are read. Figures are those of one device: bytes, FLOPs, bytes by collective, and
estimated_cycles, which is the compiler's own estimate, made without a chip; mfu is what these cycles would mean.
"""

import itertools

from vitplast_jax import command
from vitplast_jax.errors import UserError

FLAGS = (
    command.CONFIG,
    command.Flag("topology", "chips and shape of a slice: v5e:2x4, v5e:16x16, v5p:4x4x4, v6e:16x16", required=True),
    command.Flag("slices", "how many such slices", default=1, value="N"),
    command.Flag("program", "train or measure", default="train", value="NAME"),
    command.Flag(
        "what-if", "further rows, one for each combination: KEY=A,B;KEY=C,D (lists joined by +)", value="KEYS"
    ),
    command.Flag("json", "file to write", value="FILE"),
)
COLUMNS = ("batch_per_device", "fits", "argument_bytes", "temp_bytes", "flops", "estimated_cycles", "mfu", "compile_s")


def main(flags):
    from vitplast_jax.training import rehearsal

    if flags.program not in ("train", "measure"):
        raise command.UsageError(f"--program {flags.program}: expected train or measure")
    if flags.slices < 1:
        raise command.UsageError(f"--slices {flags.slices}: expected at least 1")
    combinations = read_combinations(getattr(flags, "what-if"))
    configs = [changed(flags.config, combination) for combination in combinations]
    rehearsal.prepare_environment(flags.topology)

    data, note = find_data(flags.config)
    print(note)
    row = rehearse(flags.program, flags.config, flags.topology, flags.slices, data)
    print(describe(row))
    others = []
    for combination, config in zip(combinations, configs, strict=True):
        others.append(dict(combination) | rehearse(flags.program, config, flags.topology, flags.slices, data))
        print("; ".join(f"{key}={value}" for key, value in combination) + f": {verdict(others[-1])}", flush=True)
    if others:
        from vitplast_jax.reports import tables

        print(tables.text_table(others, (*dict(combinations[0]), *COLUMNS)))
    if flags.json:
        from vitplast_jax.files import write_json

        write_json(flags.json, row | ({"what_if": others} if others else {}))


def rehearse(program: str, config, topology: str, slices: int, data) -> dict:
    if program == "measure":
        from vitplast_jax.plasticity.rehearsal import rehearse_measurement

        return rehearse_measurement(config, topology, slices, data)
    from vitplast_jax.training.rehearsal import rehearse_training

    return rehearse_training(config, topology, slices, data)


def find_data(config):
    """The training data if they are here, for their images' shape and their classes; and a sentence that says so."""
    from vitplast_jax.training import inputs

    try:
        data = inputs.load_split(config, "train")
    except UserError as error:
        classes = config.num_classes or 1000
        return None, f"the data are not here ({error}): images as the model sees them, {classes} classes"
    shape = "files" if data.images is None else "x".join(map(str, data.images.shape[1:]))
    return data, f"data: {config.data.name}, {shape}, {len(data.class_names)} classes"


def read_combinations(text: str) -> list[tuple[tuple[str, str], ...]]:
    """``"a=1,2;b=x"`` -> ((a, 1), (b, x)), ((a, 2), (b, x)); a list is one value whose items are joined by ``+``."""
    choices = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        key, equals, values = part.partition("=")
        if not (equals and values):
            raise command.UsageError(f"--what-if {part!r}: expected KEY=VALUE,VALUE")
        choices.append([(key.strip(), value.strip()) for value in values.split(",")])
    return list(itertools.product(*choices)) if choices else []


def changed(config, combination):
    """The config with some keys changed, checked."""
    from vitplast_jax.training import config as settings

    values = config.to_dict()
    for key, value in combination:
        *groups, name = key.removeprefix("config.").split(".")
        node = values
        for group in groups:
            node = node.setdefault(group, {})
        node[name] = settings.read(key.removeprefix("config."), value.replace("+", ","))
    return settings.validate(values)


def verdict(row: dict) -> str:
    """One sentence: does it fit?"""
    hbm = row["hbm_bytes"] / 2**30
    if row["fits"]:
        used = (row["argument_bytes"] + row["temp_bytes"]) / 2**30
        return f"fits: {used:.2f} of {hbm:.2f} GiB on each chip"
    largest = row["largest_batch"]
    return f"does not fit into {hbm:.2f} GiB; " + (
        f"the largest batch that does is {largest} a chip, {largest * row['chips']} in all"
        if largest
        else "not even one image a chip does (mesh.fsdp, remat=block and frozen_dtype=bfloat16 save memory)"
    )


def describe(row: dict) -> str:
    """The row for people."""
    what = f"training {', '.join(row['trainable'])}" if row["trainable"] else "measuring"
    what += f" by {row['method']}" if row["method"] else ""
    lines = [
        f"{row['model']}, {what}: {row['slices']} x {row['topology']}, {row['chips']} chips, "
        f"{row['batch_per_device']} images a chip (compiled in {row['compile_s']:.0f} s)",
        verdict(row),
    ]
    if row["flops"] is not None:
        sums = ", ".join(f"{kind} {size / 1e6:.3g} MB" for kind, size in row["collective_bytes"].items()) or "none"
        lines.append(
            f"{row['flops'] / 1e12:.3g} TFLOP a chip and step; arguments {row['argument_bytes'] / 1e9:.3g} GB, "
            f"temporaries {row['temp_bytes'] / 1e9:.3g} GB; collectives: {sums}"
        )
        if row["estimated_cycles"]:
            lines.append(
                f"{row['estimated_cycles'] / 1e6:.1f} M cycles, an MFU of {row['mfu']:.2f} (the compiler's estimate, "
                "not a measurement)"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    command.run(main, __doc__, FLAGS)
