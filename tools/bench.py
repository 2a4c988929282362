"""Measures speed: each suite prints a table and, with --json, writes {"environment": {...}, "rows": [{...}]}.

Example:
  python tools/bench.py --suite cpu-step --json bench.json

Suites:
  cpu-step   a training step of ours (jax) and of timm's (torch, extra `parity`), the same model, batch, optimizer and
             threads, in one process, one after the other in turn; full finetuning and each component alone
             (head and final norm always train). Times are medians in seconds; ratio = ours / peer.
"""

import os
import statistics
import time

from vitplast_jax import command
from vitplast_jax.errors import UserError

FLAGS = (
    command.Flag("suite", "cpu-step", value="NAME", required=True),
    command.Flag("model", "timm name", default="vit_base_patch16_224", value="NAME"),
    command.Flag("batch", "images a step", default=8, value="N"),
    command.Flag("repeats", "pairs of steps, after one warm-up each", default=9, value="N"),
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
    import jax
    import jax.numpy as jnp
    import numpy as np

    from vitplast_jax import components, models
    from vitplast_jax.training import config as settings
    from vitplast_jax.training import optim, step

    built = models.create_model(model, num_classes=10)
    selectors = ["all"] if name == "all" else [name, "head", "final_norm"]
    static, trainable, frozen = models.split(built, components.mask(models.parameters(built), selectors))
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

    def run():
        state[0], metrics = train_step(state[0], frozen, data)
        jax.block_until_ready((state[0], metrics))

    return run


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
    if flags.suite != "cpu-step":
        raise UserError(f"no suite is called {flags.suite!r}; there is: cpu-step")
    os.environ["JAX_PLATFORMS"] = "cpu"
    rows = cpu_step(flags.model, flags.batch, flags.repeats, flags.trainable.split(","))

    from vitplast_jax.files import write_json
    from vitplast_jax.reports import tables
    from vitplast_jax.training import run

    print(tables.text_table(rows, ("trainable", "ours_s", "peer_s", "ratio", "ratio_low", "ratio_high")))
    if flags.json:
        environment = run.environment() | {"threads": os.cpu_count(), "malloc": os.environ.get("GLIBC_TUNABLES", "")}
        write_json(flags.json, {"environment": environment, "rows": rows})


if __name__ == "__main__":
    command.run(main, __doc__, FLAGS)
