"""What would a training step cost on TPUs that are not there? The real TPU compiler answers, on any machine.

In: a checked config and a topology ("v5e:16x16", several slices of it). Out: bytes, FLOPs, collectives and the
compiler's own estimate of cycles, for one device. Nothing is run and no weights are read; libtpu must be installed
(`pip install libtpu`), and the environment be set by :func:`prepare_environment` before jax is imported.

Estimated cycles are the compiler's opinion, made without a chip: they rank programs well and foresee no waiting for
data, hosts or the network.
"""

import dataclasses
import importlib.util
import os
import re
import time
import types
from typing import Any

from vitplast_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Chip:
    """One chip: memory that a program may use (as the compiler has it), bfloat16 FLOP/s at best, cycles a second."""

    hbm_bytes: int
    flops: float
    hertz: float


# Peak FLOP/s and memory (16 GB, 95 GB, 32 GB, less what the compiler keeps for itself: its own limit stands here) from
# https://docs.cloud.google.com/tpu/docs/v5e, v5p and v6e. The clock is that at which the matrix units reach the peak:
# peak / (2 x units x side^2), with 4 units of 128 x 128 in v5e, 8 in v5p, and as much as 4 of 256 x 256 in a v6e chip
# (editions of the vendor's page say 2 or 4).
CHIPS = {
    "v5e": Chip(int(15.75 * 2**30), 197e12, 1.5e9),
    "v5p": Chip(int(95.74 * 2**30), 459e12, 1.75e9),
    "v6e": Chip(int(31.25 * 2**30), 918e12, 1.75e9),
}
_ACCELERATORS = {"v5e": "v5litepod-8", "v5p": "v5p-8", "v6e": "v6e-8"}
_TOPOLOGY = re.compile(r"(v\w+):\d+x\d+(?:x\d+)?")
_OUT_OF_MEMORY = re.compile(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm")


def chip_of(topology: str) -> str:
    """The chip's name in "v5e:16x16"; UserError if it is not such a name."""
    match = _TOPOLOGY.fullmatch(topology)
    if not match or match[1] not in CHIPS:
        raise UserError(
            f"--topology {topology}: expected CHIP:SHAPE with a chip of {', '.join(CHIPS)}, such as v5e:16x16 or "
            "v5p:4x4x4"
        )
    return match[1]


def prepare_environment(topology: str):
    """Lets libtpu compile without a TPU; to be called before jax is imported.

    Raises:
      UserError: libtpu is not installed.
    """
    chip = chip_of(topology)
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            "the TPU compiler is not installed: pip install libtpu (beside jax, in an environment of its own)"
        )
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["TPU_ACCELERATOR_TYPE"] = _ACCELERATORS[chip]
    os.environ["TPU_WORKER_HOSTNAMES"] = "localhost"
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # no chip is taken, so two rehearsals at once are no conflict


def topology_devices(topology: str, slices: int = 1) -> list:
    """The devices of a topology that is not there.

    Raises:
      UserError: the compiler knows no such topology.
    """
    from jax.experimental import topologies

    options = {"num_slices": slices} if slices > 1 else {}
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=topology, **options).devices)
    except Exception as error:  # whatever libtpu raises
        reason = " ".join(str(error).split())[:160]
        raise UserError(f"--topology {topology}, {slices} slices: the TPU compiler refuses it ({reason})") from None


def rehearse_training(config, topology: str, slices: int = 1, data=None, **overrides) -> dict[str, Any]:
    """Compiles the training step of a config for a topology.

    Args:
      config: checked; ``batch_size`` is global, as in training.
      topology, slices: "v5e:16x16", how many of them.
      data: the training data's Source, whose images' shape and classes count; None: images as the model sees them,
        ``config.num_classes`` or 1000 classes.
      **overrides: fields of the model's spec.
    Returns:
      The row that DESIGN's contract names. ``largest_batch`` is the largest batch per device known to fit: the asked
      one, or else the largest found by search (0: not even one image).
    Raises:
      UserError: the batch is not a multiple of the devices, or the topology is not known.
    """
    import jax

    from vitplast_jax import components, models, sharding
    from vitplast_jax.training import config as settings
    from vitplast_jax.training import inputs, program, run
    from vitplast_jax.training.start import slots_of

    chip, devices = chip_of(topology), topology_devices(topology, slices)
    mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp, devices)
    if config.batch_size % mesh.size:
        raise UserError(f"config.batch_size {config.batch_size} is not a multiple of the {mesh.size} chips")
    spec = abstract_spec(config, len(data.class_names) if data is not None else 0, **overrides)
    slots = slots_of(config)
    shapes = models.abstract_parameters(spec, slots)
    mask = run.trainable_mask(config, shapes)
    parts = config.batch_size // int(config.microbatch) if config.microbatch.isdigit() else config.accumulation

    source = data if data is not None else types.SimpleNamespace(images=None)

    def lower_step(batch_per_device, config, mesh):
        batch = inputs.example_batch(batch_per_device * mesh.size, source, spec.img_size, mesh)
        batch["run"] = inputs.run_value_shapes(mesh)
        prepare = inputs.make_training_preparation(config, spec, source)
        static = models.structure(spec, slots)
        return program.lower_abstract_step(config, static, shapes, spec.depth, mesh, prepare, batch, mask, parts)

    def compile_step(batch_per_device):
        return lower_step(batch_per_device, config, mesh).compile()

    began = time.monotonic()
    asked = config.batch_size // mesh.size
    found, flops = try_compile(compile_step, asked), None
    compiled = time.monotonic()
    if config.scan:  # whose body the compiler counts once: those of the blocks one by one, before optimisation
        plain = settings.validate({**config.to_dict(), "scan": False})
        one = sharding.make_mesh(1, 1, jax.local_devices()[:1])
        flops = lower_step(asked, plain, one).cost_analysis()["flops"]
    row = {
        "model": spec.name,
        "trainable": run.applied_selectors(config, components.counts(shapes)),
        "method": config.peft.method,
        "topology": topology,
        "slices": slices,
        "chips": mesh.size,
        "batch_per_device": asked,
        **describe(found, CHIPS[chip], parts, flops),
        "compile_s": round(compiled - began, 1),
    }
    row["largest_batch"] = asked if row["fits"] else largest_batch(compile_step, asked, found, CHIPS[chip], parts)
    return row


def abstract_spec(config, classes: int = 0, **overrides):
    """The spec of a config's model, without its weights where ``config.model`` names it."""
    from vitplast_jax.models import specs
    from vitplast_jax.training.start import load_start

    classes = config.num_classes or classes or 1000
    if config.model:
        size = tuple(config.image_size) or None
        spec = specs.spec(config.model, num_classes=classes, img_size=size, **overrides)
        preprocessing = spec.preprocessing or specs.Preprocessing()  # which mean and std costs the same
        return specs.replace(
            spec, drop_rate=config.dropout, drop_path_rate=config.drop_path, preprocessing=preprocessing
        )
    return specs.replace(load_start(config, [str(label) for label in range(classes)]).spec, **overrides)


@dataclasses.dataclass(frozen=True)
class TooLarge:
    """A program that the compiler refused: the bytes it needs and those there are, None where it did not say."""

    used: int | None = None
    limit: int | None = None


def try_compile(compile_step, batch_per_device: int):
    """The compiled program, or a :class:`TooLarge` if the compiler found that it does not fit."""
    try:
        return compile_step(batch_per_device)
    except Exception as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return refusal(str(error))


def refusal(message: str) -> TooLarge:
    """What the compiler's error says of memory."""
    match = _OUT_OF_MEMORY.search(message)
    if not match:
        return TooLarge()
    units = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    return TooLarge(*(int(float(match[i]) * units[match[i + 1]]) for i in (1, 3)))


def describe(found, chip: Chip, parts: int = 1, flops: float | None = None) -> dict[str, Any]:
    """The figures of a compiled program; of one that does not fit only the bytes that it would need.

    ``flops``: of one of the ``parts``, where they are known better than the compiler tells.
    """
    from vitplast_jax.training import cost, hlo

    if isinstance(found, TooLarge):
        blank = dict.fromkeys(("argument_bytes", "flops", "collective_bytes", "estimated_cycles", "mfu"))
        return {**blank, "temp_bytes": found.used, "hbm_bytes": found.limit or chip.hbm_bytes, "fits": False}
    costs, text = cost.analyse(found), found.as_text()
    flops = (costs.flops if flops is None else flops) * parts  # the compiler counts a loop's body once
    cycles = hlo.estimated_cycles(text)
    return {
        "argument_bytes": costs.argument_bytes,
        "temp_bytes": costs.temp_bytes,
        "hbm_bytes": chip.hbm_bytes,
        "fits": costs.bytes <= chip.hbm_bytes,
        "flops": flops,
        "collective_bytes": hlo.collective_bytes(text),
        "estimated_cycles": cycles,
        "mfu": round(flops / chip.flops / (cycles / chip.hertz), 4) if cycles else None,
    }


def largest_batch(compile_step, asked: int, found, chip: Chip, parts: int = 1) -> int:
    """The largest batch per device that fits, below one that does not; every answer has been compiled.

    Bytes are nearly linear in the batch, so that a line through two attempts finds it in a few compilations.
    """
    low, high = 0, asked  # the largest known to fit, the smallest known not to
    known = {} if _bytes_of(found) is None else {asked: _bytes_of(found)}
    while high - low > 1:
        guess = (low + high) // 2
        if len(known) >= 2:
            (a, first), (b, second) = sorted(known.items())[:2]
            slope = (second - first) / (b - a)
            guess = int((chip.hbm_bytes - first) / slope) + a if slope > 0 else guess
        guess = min(max(guess // parts * parts or guess, low + 1), high - 1)
        result = try_compile(compile_step, guess)
        if _bytes_of(result) is not None:
            known[guess] = _bytes_of(result)
        fits = not isinstance(result, TooLarge) and _bytes_of(result) <= chip.hbm_bytes
        low, high = (guess, high) if fits else (low, guess)
    return low


def _bytes_of(found) -> int | None:
    from vitplast_jax.training import cost

    return found.used if isinstance(found, TooLarge) else cost.analyse(found).bytes
