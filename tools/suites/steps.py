"""How fast is a training step of ours beside timm's in PyTorch? The same model, batch and optimizer, in turn.

cpu-step: float32 on this machine's threads. gpu: bfloat16 against torch.compile of timm's model with its fused
attention and channels-last images (on a machine without a GPU it runs on the CPU, which proves that it runs and says
nothing of speed); it needs only jax, flax, optax, orbax-checkpoint, einops, torch and timm.
"""

import os
import statistics
import time
import types

from vitplast_jax.errors import UserError

LEARNING_RATE, MOMENTUM, CLIP = 1e-3, 0.9, 1.0

# Dense bfloat16 FLOP/s at best, from the vendor's data sheets, by a part of the device's name.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "A10": 125e12}

# Which of timm's parameters make up a component: parts of their names.
TIMM_NAMES = {"ln1": ".norm1.", "mha": ".attn.", "ln2": ".norm2.", "fc1": ".mlp.fc1.", "fc2": ".mlp.fc2."}


def quartiles(times, others, name: str) -> dict[str, float]:
    """The lower and the upper quartile of the ratios of pairs, as NAME_low and NAME_high."""
    ratios = sorted(a / b for a, b in zip(times, others, strict=True))
    quarter = len(ratios) // 4
    return {f"{name}_low": round(ratios[quarter], 3), f"{name}_high": round(ratios[-1 - quarter], 3)}


def cpu_step(flags) -> list[dict]:
    """Interleaved steps of both libraries on the same random batch."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    rows = []
    for name, ours, theirs, peer in measured_pairs(flags, flags.batch or 8, "float32", lambda net: net):
        ours_s, peer_s = statistics.median(ours), statistics.median(theirs)
        rows.append(
            {
                "model": flags.model,
                "batch": flags.batch or 8,
                "dtype": "float32",
                "trainable": name,
                "method": "",
                "ours_s": round(ours_s, 4),
                "peer": peer,
                "peer_s": round(peer_s, 4),
                "ratio": round(ours_s / peer_s, 3),
                **quartiles(ours, theirs, "ratio"),
                "pairs": flags.repeats,
            }
        )
        print(f"{name:>5}: ours {ours_s:.3f} s, timm {peer_s:.3f} s, ratio {ours_s / peer_s:.2f}", flush=True)
    return rows


def gpu(flags) -> list[dict]:
    """Steps of both libraries in bfloat16 on the accelerator that is here."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs some of the memory, too
    import jax
    import torch

    on_gpu = torch.cuda.is_available()
    kind = jax.devices()[0].device_kind
    if on_gpu != (jax.default_backend() == "gpu"):
        raise UserError(f"jax runs on {kind}, torch {'on a GPU' if on_gpu else 'not on a GPU'}: install both for it")
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in kind), None)
    batch, mode = flags.batch or 128, "max-autotune" if on_gpu else "default"
    rows = []
    pairs = measured_pairs(flags, batch, "bfloat16", lambda net: torch.compile(net, mode=mode))
    for name, ours, theirs, peer in pairs:
        ours_s, peer_s = statistics.median(ours), statistics.median(theirs)
        flops = batch * training_flops(flags.model, name)
        rows.append(
            {
                "model": flags.model,
                "batch": batch,
                "dtype": "bfloat16",
                "trainable": name,
                "method": "",
                "device": kind,
                "ours_images_per_second": round(batch / ours_s, 2),
                "ours_mfu": peak and round(flops / ours_s / peak, 4),
                "peer": f"{peer}, torch.compile {mode}",
                "peer_images_per_second": round(batch / peer_s, 2),
                "peer_mfu": peak and round(flops / peer_s / peak, 4),
                "ratio": round(peer_s / ours_s, 3),
                "pairs": flags.repeats,
            }
        )
        print(
            f"{name:>5}: ours {batch / ours_s:.1f}, timm {batch / peer_s:.1f} images/s, {peer_s / ours_s:.2f}",
            flush=True,
        )
    return rows


def training_flops(model: str, name: str) -> float:
    """Products of one training step of one image, two FLOPs a multiplication and addition.

    Forward everything; backward the activations' gradients everywhere but below the patches, and the gradients of the
    kernels that train. Attention's two products have two gradients each.
    """
    from vitplast_jax.models import specs

    spec = specs.spec(model)
    n, d, f = spec.tokens, spec.width, spec.hidden
    patches = 2 * spec.grid[0] * spec.grid[1] * spec.patch_size[0] * spec.patch_size[1] * spec.in_chans * d
    kernels = {"mha": 2 * n * 4 * d * d, "fc1": 2 * n * d * f, "fc2": 2 * n * d * f}
    attention = 4 * n * n * d
    block = sum(kernels.values()) + attention
    trained = sum(kernels.values()) if name == "all" else kernels.get(name, 0)
    total = spec.depth * (2 * block + attention + trained)
    return total + patches * (2 if name == "all" else 1)


def measured_pairs(flags, batch: int, dtype: str, optimise):
    """Yields (name, seconds of our steps, seconds of timm's, the peer's version) for each thing to train, in turn."""
    try:
        import timm
        import torch
    except ImportError:
        raise UserError(f"the suite {flags.suite} compares with timm: pip install 'vitplast_jax[parity]'") from None
    torch.set_num_threads(os.cpu_count() or 1)
    for name in flags.trainable.split(","):
        ours = our_step(flags.model, batch, name, dtype)
        theirs = timm_step(flags.model, batch, name, dtype, optimise)
        ours(), theirs()  # compilation and first touch
        times: dict = {ours: [], theirs: []}
        for _ in range(flags.repeats):
            for step in (ours, theirs):
                began = time.perf_counter()
                step()
                times[step].append(time.perf_counter() - began)
        yield name, times[ours], times[theirs], f"timm {timm.__version__}, torch {torch.__version__}"
        del ours, theirs


def our_step(model: str, batch: int, name: str, dtype: str):
    """A call that runs one step of ours to its end."""
    from vitplast_jax import components, models

    built = models.create_model(model, num_classes=10)
    selectors = ["all"] if name == "all" else [name, "head", "final_norm"]
    return step_of(built, components.mask(models.parameters(built), selectors), batch, dtype)[0]


def step_of(built, mask, batch: int, dtype: str):
    """(A call that runs one step of a model to its end, the FLOPs of the compiled step.)

    What ``mask`` says trains and stays float32; frozen weights have ``dtype``.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from vitplast_jax import models
    from vitplast_jax.training import cost, optim, step

    static, trainable, frozen = models.split(built, mask)
    # Not a checked config, whose module needs packages that the suite gpu does without.
    config = types.SimpleNamespace(
        **{"optimizer": "sgd", "learning_rate": LEARNING_RATE, "momentum": MOMENTUM, "clip_norm": CLIP},
        **{"warmup_steps": 0, "steps": 10000, "weight_decay": 0.0, "layer_decay": 1.0},
        **{"learning_rate_factors": (), "weight_decay_factors": ()},
    )
    frozen = jax.tree.map(lambda leaf: leaf.astype(dtype), frozen)
    optimizer, schedule = optim.make_optimizer(config, trainable, built.spec.depth)
    # The images arrive as the peer gets them, already floating point.
    train_step = jax.jit(
        step.make_train_step(static, optimizer, schedule, lambda images, keys: images, seed=0), donate_argnums=0
    )
    images = np.random.RandomState(0).randn(batch, *built.spec.img_size, 3).astype(np.float32)
    data = {"image": jnp.asarray(images, dtype), "label": jnp.arange(batch) % 10}
    trainable = jax.tree.map(jnp.copy, trainable)  # donated: it must not be the model's own
    state = [step.TrainState(jnp.zeros((), jnp.int32), trainable, optimizer.init(trainable))]
    compiled = train_step.lower(state[0], frozen, data).compile()

    def run():
        state[0], metrics = compiled(state[0], frozen, data)
        jax.block_until_ready((state[0], metrics))

    return run, cost.analyse(compiled).flops


def timm_step(model: str, batch: int, name: str, dtype: str, optimise):
    """A call that runs one step of timm's model in PyTorch, on the GPU if there is one; bfloat16 by autocast."""
    import timm

    net = timm.create_model(model, pretrained=False, num_classes=10).train()
    for path, parameter in net.named_parameters():
        always = path.startswith(("head.", "norm."))
        parameter.requires_grad_(name == "all" or always or TIMM_NAMES[name] in f".{path}")
    return torch_step(net, batch, dtype, optimise)


def torch_step(net, batch: int, dtype: str, optimise):
    """A call that runs one step of a timm model, or of one that peft has wrapped: what requires gradients trains."""
    import numpy as np
    import torch

    size = net.patch_embed.img_size
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    device = "cuda" if torch.cuda.is_available() and dtype == "bfloat16" else "cpu"
    net = optimise(net.to(device, memory_format=torch.channels_last))
    optimizer = torch.optim.SGD(trained, lr=LEARNING_RATE, momentum=MOMENTUM)
    images = torch.from_numpy(np.random.RandomState(0).randn(batch, 3, *size).astype(np.float32)).to(device)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.arange(batch, device=device) % 10

    def run():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = torch.nn.functional.cross_entropy(net(images), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()

    return run
