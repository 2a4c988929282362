"""Measures speed: each suite prints a table and, with --json, writes {"environment": {...}, "rows": [{...}]}.

Example:
  python tools/bench.py --suite cpu-step --json bench.json

Suites:
  cpu-step   a training step of ours (jax) and of timm's (torch, extra `parity`), the same model, batch, optimizer and
             threads, in one process, one after the other in turn; full finetuning and each component alone
             (head and final norm always train). Times are medians in seconds; ratio = ours / peer.
  peft       parameters of each method without the head (the table of the AOFT paper) and, in turn, steps of AOFT-LoRA,
             LoRA (both q and v, rank 8), ln1 and the qkv biases alone: medians in seconds, compiled FLOPs; ratio_lora
             and ratio_ln1 = this / that step.
"""

import os
import statistics
import time

from vitplast_jax import command
from vitplast_jax.errors import UserError

FLAGS = (
    command.Flag("suite", "cpu-step or peft", value="NAME", required=True),
    command.Flag("model", "timm name", default="vit_base_patch16_224", value="NAME"),
    command.Flag("batch", "images a step", default=8, value="N"),
    command.Flag("repeats", "pairs of steps, after one warm-up each; 0: peft counts alone", default=9, value="N"),
    command.Flag("trainable", "rows to measure", default="all,ln1,mha,ln2,fc1,fc2", value="LIST"),
    command.Flag("json", "file to write", value="FILE"),
)
LEARNING_RATE, MOMENTUM, CLIP = 1e-3, 0.9, 1.0

# Which of timm's parameters make up a component: parts of their names.
TIMM_NAMES = {"ln1": ".norm1.", "mha": ".attn.", "ln2": ".norm2.", "fc1": ".mlp.fc1.", "fc2": ".mlp.fc2."}


def cpu_step(model: str, batch: int, repeats: int, trainable: list[str]) -> list[dict]:
    """Interleaved steps of both libraries on the same random batch."""
    try:
        import timm
        import torch
    except ImportError:
        raise UserError("the suite cpu-step compares with timm: pip install 'vitplast_jax[parity]'") from None
    torch.set_num_threads(os.cpu_count() or 1)
    rows = []
    for name in trainable:
        ours, theirs = our_step(model, batch, name), timm_step(model, batch, name)
        ours(), theirs()  # compilation and first touch
        times = {ours: [], theirs: []}
        for _ in range(repeats):
            for step in (ours, theirs):
                began = time.perf_counter()
                step()
                times[step].append(time.perf_counter() - began)
        ours_s, peer_s = statistics.median(times[ours]), statistics.median(times[theirs])
        ratios = sorted(a / b for a, b in zip(times[ours], times[theirs], strict=True))
        rows.append(
            {
                "model": model,
                "batch": batch,
                "dtype": "float32",
                "trainable": name,
                "method": "",
                "ours_s": round(ours_s, 4),
                "peer": f"timm {timm.__version__}, torch {torch.__version__}",
                "peer_s": round(peer_s, 4),
                "ratio": round(ours_s / peer_s, 3),
                "ratio_low": round(ratios[len(ratios) // 4], 3),
                "ratio_high": round(ratios[-1 - len(ratios) // 4], 3),
                "pairs": repeats,
            }
        )
        print(f"{name:>5}: ours {ours_s:.3f} s, timm {peer_s:.3f} s, ratio {ours_s / peer_s:.2f}", flush=True)
        del ours, theirs
    return rows


def our_step(model: str, batch: int, name: str):
    """A call that runs one step of ours to its end."""
    from vitplast_jax import components, models

    built = models.create_model(model, num_classes=10)
    selectors = ["all"] if name == "all" else [name, "head", "final_norm"]
    return step_of(built, components.mask(models.parameters(built), selectors), batch)[0]


def step_of(built, mask, batch: int):
    """(A call that runs one step of a model to its end, the FLOPs of the compiled step.)"""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from vitplast_jax import models
    from vitplast_jax.training import config as settings
    from vitplast_jax.training import cost, optim, step

    static, trainable, frozen = models.split(built, mask)
    config = settings.validate(
        {"learning_rate": LEARNING_RATE, "momentum": MOMENTUM, "clip_norm": CLIP, "warmup_steps": 0}
    )
    optimizer, schedule = optim.make_optimizer(config, trainable, built.spec.depth)
    # The images arrive as the peer gets them, already floating point.
    train_step = jax.jit(
        step.make_train_step(static, optimizer, schedule, lambda images, keys: images, seed=0), donate_argnums=0
    )
    images = np.random.RandomState(0).randn(batch, *built.spec.img_size, 3).astype(np.float32)
    data = {"image": jnp.asarray(images), "label": jnp.arange(batch) % 10}
    trainable = jax.tree.map(jnp.copy, trainable)  # donated: it must not be the model's own
    state = [step.TrainState(jnp.zeros((), jnp.int32), trainable, optimizer.init(trainable))]
    compiled = train_step.lower(state[0], frozen, data).compile()

    def run():
        state[0], metrics = compiled(state[0], frozen, data)
        jax.block_until_ready((state[0], metrics))

    return run, cost.analyse(compiled).flops


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


def peft_counts(model: str) -> list[dict]:
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


def peft_steps(model: str, batch: int, repeats: int) -> list[dict]:
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
        variants[name] = (*step_of(built, mask, batch), trees.count(trees.partition(params, mask)[0]))
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


def timm_step(model: str, batch: int, name: str):
    """A call that runs one step of timm's model in PyTorch."""
    import numpy as np
    import timm
    import torch

    net = timm.create_model(model, pretrained=False, num_classes=10).train()
    for path, parameter in net.named_parameters():
        always = path.startswith(("head.", "norm."))
        parameter.requires_grad_(name == "all" or always or TIMM_NAMES[name] in f".{path}")
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=LEARNING_RATE, momentum=MOMENTUM)
    size = net.patch_embed.img_size
    images = torch.from_numpy(np.random.RandomState(0).randn(batch, 3, *size).astype(np.float32))
    labels = torch.arange(batch) % 10

    def run():
        optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(net(images), labels).backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()

    return run


def main(flags):
    if flags.suite not in ("cpu-step", "peft"):
        raise UserError(f"no suite is called {flags.suite!r}; there are: cpu-step, peft")
    os.environ["JAX_PLATFORMS"] = "cpu"
    shown = ("trainable", "ours_s", "peer_s", "ratio", "ratio_low", "ratio_high")
    if flags.suite == "cpu-step":
        rows = cpu_step(flags.model, flags.batch, flags.repeats, flags.trainable.split(","))
    else:
        shown = ("method", "parameters", "step_s", "flops", "ratio_lora", "ratio_ln1")
        rows = peft_counts(flags.model) + (peft_steps(flags.model, flags.batch, flags.repeats) if flags.repeats else [])

    from vitplast_jax.files import write_json
    from vitplast_jax.reports import tables
    from vitplast_jax.training import run

    print(tables.text_table(rows, shown))
    if flags.json:
        environment = run.environment() | {"threads": os.cpu_count(), "malloc": os.environ.get("GLIBC_TUNABLES", "")}
        write_json(flags.json, {"environment": environment, "rows": rows})


if __name__ == "__main__":
    command.run(main, __doc__, FLAGS)
