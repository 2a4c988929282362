"""What do the methods cost? Parameters, as the table of the AOFT paper counts them, and training steps in turn."""

import os
import statistics
import time

from suites import steps

COUNTED = {  # rows of the paper's table (ORACLES B2)
    "LoRA+AOFT, q and v": {"method": "lora", "projection": "ao"},
    "Adapter+AOFT, count-single": {"method": "adapter", "preset": "count-single"},
    "Adapter+AOFT, count-tied": {"method": "adapter", "preset": "count-tied"},
    "Adapter+AOFT* (lambda, rank 8)": {"method": "adapter", "preset": "count-single", "scales": True},
    "Adapter+AOFT, formula": {"method": "adapter", "preset": "formula"},
    "VPT-Deep+AOFT": {"method": "vpt-deep", "preset": "formula"},
    "LoRA, q and v": {"method": "lora"},
    "Adapter at FFN": {"method": "adapter"},
    "VPT-Deep": {"method": "vpt-deep"},
}


def peft(flags) -> list[dict]:
    """Counts of every method; then, unless --repeats=0, times and compiled FLOPs of a step."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    rows = count_methods(flags.model)
    return rows + (time_methods(flags.model, flags.batch or 8, flags.repeats) if flags.repeats else [])


def count_methods(model: str) -> list[dict]:
    """Parameters of each method, without the head."""
    from vitplast_jax import components, models, trees
    from vitplast_jax.models import specs
    from vitplast_jax.peft.settings import make_settings

    spec = specs.spec(model, num_classes=0)
    rows = []
    for name, told in COUNTED.items():
        params = models.abstract_parameters(spec, make_settings(told | {"rank": 8}))
        trained, _ = trees.partition(params, components.mask(params, "peft"))
        rows.append(
            {"model": model, "batch": 0, "dtype": "float32", "method": name, "parameters": trees.count(trained)}
        )
    return rows


def time_methods(model: str, batch: int, repeats: int) -> list[dict]:
    """Interleaved steps of two adapters, a component and the qkv biases; the head and the final norm train too."""
    from vitplast_jax import components, models, peft, trees

    plain = models.create_model(model, num_classes=10)
    also = trees.flatten(components.mask(models.parameters(plain), ("head", "final_norm")))
    variants = {}
    for name in ("lora", "aoft-lora", "ln1", "qkv biases"):
        built = plain
        if name.endswith("lora"):
            projection = "ao" if name.startswith("aoft") else "free"
            built = peft.attach(plain, "lora", rank=8, projection=projection, targets=("q", "v"))
        params = models.parameters(built)
        if name == "qkv biases":
            mask = trees.map_paths(lambda path, _: path.endswith("qkv/bias") or also[path], params)
        else:
            mask = components.mask(params, ("ln1" if name == "ln1" else "peft", "head", "final_norm"))
        variants[name] = (*steps.step_of(built, mask, batch, "float32"), trees.count(trees.partition(params, mask)[0]))
        variants[name][0]()  # first touch
    times = {name: [] for name in variants}
    for _ in range(repeats):
        for name, (step, _, _) in variants.items():
            began = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - began)
    rows = []
    for name, (_, flops, trained) in variants.items():
        row = {"model": model, "batch": batch, "dtype": "float32", "method": name, "trained": trained}
        row |= {"step_s": round(statistics.median(times[name]), 4), "flops": flops, "pairs": repeats}
        for other in ("lora", "ln1"):
            ratios = sorted(a / b for a, b in zip(times[name], times[other], strict=True))
            quarter = len(ratios) // 4
            row[f"ratio_{other}"] = round(statistics.median(ratios), 3)
            row[f"ratio_{other}_low"], row[f"ratio_{other}_high"] = (
                round(ratios[quarter], 3),
                round(ratios[-1 - quarter], 3),
            )
        rows.append(row)
    return rows
