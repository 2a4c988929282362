"""What do the methods cost? Parameters, as the table of the AOFT paper counts them, and training steps in turn."""

import importlib.util
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
    """Interleaved steps of two adapters, a component and HF's peft; the head and the final norm train too.

    Of the qkv biases only the FLOPs are of interest. Without timm and peft (extra `parity`) their row is left out.
    """
    from vitplast_jax import components, models, peft, trees

    plain = models.create_model(model, num_classes=10)
    also = trees.flatten(components.mask(models.parameters(plain), ("head", "final_norm")))
    calls, facts = {}, {}
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
        call, flops = steps.step_of(built, mask, batch, "float32")
        facts[name] = {"trained": trees.count(trees.partition(params, mask)[0]), "flops": flops}
        if name != "qkv biases":
            calls[name] = call
    if importlib.util.find_spec("timm") and importlib.util.find_spec("peft"):
        calls["hf peft"], facts["hf peft"] = hf_peft_step(model, batch)
    for call in calls.values():
        call()  # first touch
    times = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - began)
    rows = []
    for name, known in facts.items():
        row = {"model": model, "batch": batch, "dtype": "float32", "method": name, **known}
        if name in times:
            row |= {"step_s": round(statistics.median(times[name]), 4), "pairs": repeats}
            for key, other in (("lora", "lora"), ("ln1", "ln1"), ("peer", "hf peft")):
                if other in times:
                    pairs = zip(times[name], times[other], strict=True)
                    row[f"ratio_{key}"] = round(statistics.median(a / b for a, b in pairs), 3)
                    row |= steps.quartiles(times[name], times[other], f"ratio_{key}")
        rows.append(row)
    return rows


def hf_peft_step(model: str, batch: int):
    """(A call that runs one step of HF peft's LoRA on timm's model, what the row says of it.)

    On the whole of qkv, which timm keeps fused: rank 8, one down projection of 768 to 8 and one up to 2304.
    """
    import peft as hf
    import timm
    import torch

    torch.set_num_threads(os.cpu_count() or 1)
    net = timm.create_model(model, pretrained=False, num_classes=10)
    told = {"target_modules": ["qkv"], "modules_to_save": ["head", "norm"]}
    net = hf.get_peft_model(net, hf.LoraConfig(r=8, lora_alpha=8, **told)).train()
    trained = sum(parameter.numel() for parameter in net.parameters() if parameter.requires_grad)
    peer = f"peft {hf.__version__}, timm {timm.__version__}, torch {torch.__version__}"
    return steps.torch_step(net, batch, "float32", lambda net: net), {"trained": trained, "peer": peer}
