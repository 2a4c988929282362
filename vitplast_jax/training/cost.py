"""What a compiled step costs, as its compiler states it, and what the device has.

In: a compiled function. Out: bytes and FLOPs a device. XLA counts the body of a loop once: the FLOPs of a step that
accumulates are those of one part.
"""

import dataclasses
import os
from collections.abc import Callable

import jax

from vitplast_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Cost:
    """Figures of one execution on one device: bytes of arguments, temporaries and results, and FLOPs."""

    argument_bytes: int
    temp_bytes: int
    output_bytes: int
    flops: float

    @property
    def bytes(self) -> int:
        return self.argument_bytes + self.temp_bytes + self.output_bytes


def analyse(compiled: jax.stages.Compiled) -> Cost:
    """Reads the compiler's own analysis; donated arguments that results reuse are counted once."""
    memory, counts = compiled.memory_analysis(), compiled.cost_analysis()
    return Cost(
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.output_size_in_bytes - memory.alias_size_in_bytes,
        float(counts.get("flops", 0.0)),
    )


def device_bytes() -> int:
    """Memory that a program may use on the first local device; on a CPU, the machine's (or the container's) memory."""
    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max") as file:
            limit = file.read().strip()
    except OSError:
        limit = "max"
    return physical if limit == "max" else min(physical, int(limit))


def check_fits(compiled: jax.stages.Compiled, what: str, remedy: str):
    """Raises a UserError that names the remedy if a program needs more memory than its device has."""
    needed, limit = analyse(compiled).bytes, device_bytes()
    if needed > limit:
        raise UserError(f"{what} needs {needed / 1e9:.2f} GB on each device, which has {limit / 1e9:.2f} GB; {remedy}")


def fit_step(
    compile_step: Callable, config, devices: int, before: int | None = None
) -> tuple[jax.stages.Compiled, int, int]:
    """Compiles a training step so that it fits the device.

    Args:
      compile_step: from the number of parts in which a batch is computed to the compiled step.
      config: ``batch_size accumulation microbatch`` are read; ``microbatch="auto"`` takes the fewest parts that fit.
      devices: over which a batch is divided.
      before: the parts that an earlier start of the same run took; "auto" begins there, so that a resumed run sums in
        the same order.
    Returns:
      (compiled step, number of parts, number of compilations).
    Raises:
      UserError: it does not fit, and what would.
    """
    limit, batch = device_bytes(), config.batch_size
    possible = [n for n in range(1, batch + 1) if batch % (n * devices) == 0]
    asked = batch // int(config.microbatch) if config.microbatch.isdigit() else config.accumulation
    if config.microbatch == "auto" and before in possible:
        asked = before
    if asked not in possible:
        raise UserError(
            f"a batch of {batch} in {asked} parts cannot be shared equally by {devices} devices; "
            f"the parts may be {', '.join(map(str, possible)) or 'none: take a multiple of the devices as batch_size'}"
        )
    needed: dict[int, int] = {}
    for parts in (n for n in possible if n >= asked):
        compiled = compile_step(parts)
        needed[parts] = analyse(compiled).bytes
        if needed[parts] <= limit:
            break
    if needed[parts] <= limit and (parts == asked or config.microbatch == "auto"):
        return compiled, parts, len(needed)
    fits = f"--config.microbatch={batch // parts}" if needed[parts] <= limit else "no microbatch"
    raise UserError(
        f"a training step needs {needed[asked] / 1e9:.2f} GB on each device, which has {limit / 1e9:.2f} GB; "
        f"{fits} fits (--config.microbatch=auto finds it; --config.remat=block and --config.frozen_dtype=bfloat16 "
        "save memory)"
    )
