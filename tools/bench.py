"""Measures speed: each suite prints a table and, with --json, writes {"environment": {...}, "rows": [{...}]}.

Example:
  python tools/bench.py --suite cpu-step --json bench.json

Suites:
  cpu-step   a training step of ours (jax) and of timm's (torch, extra `parity`), the same model, batch, optimizer and
             threads, in one process, one after the other in turn; full finetuning and each component alone
             (head and final norm always train). Times are medians in seconds; ratio = ours / peer.
  plasticity the paper's protocol on 16 + 16 images (--batch): ours with all 256 pairs, ours with 16, and the way the
             paper's code goes, in torch (extra `parity`), with 16; weights and images are the same, and so must be the
             60 means (`largest_difference`, relative).
  plasticity-spread
             how much the estimate varies over 20 draws of --batch + --batch images of the quickstart's two data sets,
             for matched and for all pairs, which take the same forward passes.
"""

import os
import statistics
import time

from vitplast_jax import command
from vitplast_jax.errors import UserError

FLAGS = (
    command.Flag("suite", "cpu-step", value="NAME", required=True),
    command.Flag("model", "timm name", default="vit_base_patch16_224", value="NAME"),
    command.Flag("batch", "images a step, or of each side; 0: the suite's own (8, 16, 32)", default=0, value="N"),
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


def plasticity(model: str, batch: int, repeats: int) -> list[dict]:
    """Interleaved measurements of ours and of the paper's way on the same weights and random images."""
    try:
        import timm
        import torch
    except ImportError:
        raise UserError("the suite plasticity compares with torch: pip install 'vitplast_jax[parity]'") from None
    import tempfile

    import numpy as np
    from safetensors.torch import load_file

    from vitplast_jax import models
    from vitplast_jax.plasticity import measure
    from vitplast_jax.weights.export import save_timm

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    ours = models.create_model(model, num_classes=10)
    net = timm.create_model(model, pretrained=False, num_classes=10).eval()
    with tempfile.TemporaryDirectory() as folder:
        save_timm(models.parameters(ours), ours.spec, f"{folder}/same.safetensors")
        net.load_state_dict(load_file(f"{folder}/same.safetensors"))
    draw = np.random.RandomState(0)
    x, y = (draw.randn(batch, *ours.spec.img_size, 3).astype(np.float32) for _ in range(2))
    as_torch = [torch.from_numpy(side.transpose(0, 3, 1, 2).copy()) for side in (x, y)]
    options = {"protocol": "reference", "batch_size": batch, "with_bounds": False}
    runs = {
        "all": lambda: measure(ours, x, y, pairing="all", **options),
        "matched": lambda: measure(ours, x, y, pairing="matched", **options),
        "peer": lambda: paper_rates(net, *as_torch),
    }
    found = {name: run() for name, run in runs.items()}  # compilation and first touch
    times = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - began)
    means = np.array([row["mean"] for row in found["matched"]["rows"]])
    seconds = {name: statistics.median(values) for name, values in times.items()}
    ratios = sorted(a / b for a, b in zip(times["all"], times["peer"], strict=True))
    return [
        {
            "model": model,
            "batch": batch,
            "dtype": "float32",
            "pairs": found["all"]["pairs"],
            "ours_s": round(seconds["all"], 4),
            "ours_matched_s": round(seconds["matched"], 4),
            "extra_pairs": round(seconds["all"] / seconds["matched"], 3),
            "peer": f"the paper's protocol, torch {torch.__version__}, timm {timm.__version__}",
            "peer_pairs": batch,
            "peer_s": round(seconds["peer"], 4),
            "ratio": round(seconds["all"] / seconds["peer"], 3),
            "ratio_low": round(ratios[len(ratios) // 4], 3),
            "ratio_high": round(ratios[-1 - len(ratios) // 4], 3),
            "largest_difference": float(np.abs(means / found["peer"] - 1).max()),
        }
    ]


def paper_rates(net, x, y):
    """Mean rates [blocks * components] of matched pairs as the paper's code gets them: every component of every block
    on the embedding output, outputs of both batches kept, FC2 on the input zero-padded to the hidden width."""
    import numpy as np
    import torch

    def outputs(images):
        tokens = net._pos_embed(net.patch_embed(images))
        kept = {"embedding": tokens}
        for index, block in enumerate(net.blocks):
            zeros = tokens.new_zeros(*tokens.shape[:2], block.mlp.fc2.in_features - tokens.shape[-1])
            kept[index, "ln1"] = block.norm1(tokens)
            kept[index, "mha"] = block.attn(tokens)
            kept[index, "ln2"] = block.norm2(tokens)
            kept[index, "fc1"] = block.mlp.fc1(tokens)
            kept[index, "fc2"] = block.mlp.fc2(torch.cat((tokens, zeros), -1))
        return kept

    for block in net.blocks:
        block.attn.fused_attn = False  # as there
    with torch.inference_mode():
        of_x, of_y = outputs(x), outputs(y)
        distances = {}
        for key in list(of_x):
            one, other = of_x.pop(key), of_y.pop(key)
            distances[key] = ((one - other) ** 2).flatten(1).sum(-1).sqrt().numpy()
    inputs = distances.pop("embedding")
    return np.array([float(np.mean(found / inputs)) for found in distances.values()])


def plasticity_spread(batch: int, draws: int = 20) -> list[dict]:
    """Standard deviation of the components' means over draws of images, for matched and all pairs."""
    import numpy as np

    from vitplast_jax import load_model
    from vitplast_jax.data import sources
    from vitplast_jax.plasticity import measure
    from vitplast_jax.weights.convert import resolve

    name = "vit_pico_patch4_28.fashion_mnist"
    model, digits = load_model(name), sources.load("digits", split="test")
    with np.load(os.path.splitext(resolve(name))[0] + ".sample.npz") as sample:
        images = sample["images"]
    found = {
        pairing: [
            measure(model, images, digits, pairing=pairing, images=batch, batch_size=batch, seed=seed)["components"]
            for seed in range(draws)
        ]
        for pairing in ("matched", "all")
    }
    rows = []
    for k, entry in enumerate(found["all"][0]):
        means = {pairing: np.array([one[k]["mean"] for one in runs]) for pairing, runs in found.items()}
        spread = {pairing: float(values.std(ddof=1)) for pairing, values in means.items()}
        rows.append(
            {
                "model": name,
                "batch": batch,
                "dtype": "float32",
                "component": entry["component"],
                "draws": draws,
                "mean": float(means["all"].mean()),
                "matched": spread["matched"],
                "all": spread["all"],
                "ratio": spread["all"] / spread["matched"],
            }
        )
    return rows


SHOWN = {  # columns of the table that a suite prints
    "cpu-step": ("trainable", "ours_s", "peer_s", "ratio", "ratio_low", "ratio_high"),
    "plasticity": ("ours_s", "ours_matched_s", "extra_pairs", "peer_s", "ratio", "largest_difference"),
    "plasticity-spread": ("component", "mean", "matched", "all", "ratio"),
}


def main(flags):
    if flags.suite not in SHOWN:
        raise UserError(f"no suite is called {flags.suite!r}; there is: {', '.join(SHOWN)}")
    os.environ["JAX_PLATFORMS"] = "cpu"
    if flags.suite == "cpu-step":
        rows = cpu_step(flags.model, flags.batch or 8, flags.repeats, flags.trainable.split(","))
    elif flags.suite == "plasticity":
        rows = plasticity(flags.model, flags.batch or 16, flags.repeats)
    else:
        rows = plasticity_spread(flags.batch or 32)

    from vitplast_jax.files import write_json
    from vitplast_jax.reports import tables
    from vitplast_jax.training import run

    print(tables.text_table(rows, SHOWN[flags.suite]))
    if flags.json:
        environment = run.environment() | {"threads": os.cpu_count(), "malloc": os.environ.get("GLIBC_TUNABLES", "")}
        write_json(flags.json, {"environment": environment, "rows": rows})


if __name__ == "__main__":
    command.run(main, __doc__, FLAGS)
