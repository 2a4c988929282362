"""How long does plasticity take beside the paper's way of computing it, and how much does the estimate vary?"""

import os
import statistics
import time

from suites import steps

from vitplast_jax.errors import UserError


def plasticity(flags) -> list[dict]:
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

    os.environ["JAX_PLATFORMS"] = "cpu"
    model, batch = flags.model, flags.batch or 16
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    ours = models.create_model(model, num_classes=10)
    net = timm.create_model(model, pretrained=False, num_classes=10).eval()
    with tempfile.TemporaryDirectory() as folder:
        save_timm(models.parameters(ours), ours.spec, f"{folder}/same.safetensors")
        net.load_state_dict(load_file(f"{folder}/same.safetensors"))
    outputs = the_papers_own(flags.peer, net, ours.spec) if flags.peer else written_after_the_paper(net)
    draw = np.random.RandomState(0)
    x, y = (draw.randn(batch, *ours.spec.img_size, 3).astype(np.float32) for _ in range(2))
    as_torch = [torch.from_numpy(side.transpose(0, 3, 1, 2).copy()) for side in (x, y)]
    options = {"protocol": "reference", "batch_size": batch, "with_bounds": False}
    runs = {
        "all": lambda: measure(ours, x, y, pairing="all", **options),
        "matched": lambda: measure(ours, x, y, pairing="matched", **options),
        "peer": lambda: paper_rates(outputs, *as_torch),
    }
    found = {name: run() for name, run in runs.items()}  # compilation and first touch
    times = {name: [] for name in runs}
    for _ in range(flags.repeats):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - began)
    means = np.array([row["mean"] for row in found["matched"]["rows"]])
    seconds = {name: statistics.median(values) for name, values in times.items()}
    return [
        {
            "model": model,
            "batch": batch,
            "dtype": "float32",
            "pairs": found["all"]["pairs"],
            "ours_s": round(seconds["all"], 4),
            "ours_matched_s": round(seconds["matched"], 4),
            "extra_pairs": round(seconds["all"] / seconds["matched"], 3),
            "peer": f"the paper's {'code' if flags.peer else 'way'}, torch {torch.__version__}",
            "peer_pairs": batch,
            "peer_s": round(seconds["peer"], 4),
            "ratio": round(seconds["all"] / seconds["peer"], 3),
            **steps.quartiles(times["all"], times["peer"], "ratio"),
            "largest_difference": float(np.abs(means / found["peer"] - 1).max()),
        }
    ]


def paper_rates(outputs, x, y):
    """Mean rates [blocks * components] of matched pairs as the paper's code gets them: the outputs of both batches are
    kept, then compared one after the other. ``outputs``: images -> {"embedding": tokens, then each component's}."""
    import numpy as np
    import torch

    with torch.inference_mode():
        of_x, of_y = outputs(x), outputs(y)
        distances = {}
        for key in list(of_x):
            one, other = of_x.pop(key), of_y.pop(key)
            distances[key] = ((one - other) ** 2).flatten(1).sum(-1).sqrt().numpy()
    inputs = distances.pop("embedding")
    return np.array([float(np.mean(found / inputs)) for found in distances.values()])


def written_after_the_paper(net):
    """Every component of every block on the embedding output, FC2 on it zero-padded to the hidden width; on timm's."""
    import torch

    for block in net.blocks:
        block.attn.fused_attn = False  # as there

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

    return outputs


# timm's names -> those of the paper's code
_NAMES = {
    "patch_embed.proj": "embedding.patching.patching.0",
    "cls_token": "embedding.cls_token",
    "pos_embed": "embedding.pos_emb",
    ".norm1.": ".attn_norm.",
    ".norm2.": ".ffn_norm.",
    ".qkv.": ".qkv_mat.",
    ".attn.proj.": ".attn.output.",
    ".mlp.": ".ffn.",
}


def the_papers_own(folder: str, net, spec):
    """The method of the paper's own model; ``folder``: a clone of github.com/ambroiseodt/vit-plasticity."""
    import sys
    import types

    sys.path.insert(0, os.path.join(folder, "src"))
    try:
        sys.modules.setdefault("tiktoken", types.ModuleType("tiktoken"))  # of its GPT-2, which is not called
        from vitef.models.transformer.architecture import Transformer, TransformerConfig
    except ImportError as error:
        raise UserError(f"--peer {folder} is no clone of vit-plasticity that can be imported ({error})") from None
    sizes = {"emb_dim": spec.width, "n_heads": spec.heads, "n_layers": spec.depth, "ffn_dim": spec.hidden}
    image = {"image_dim": (spec.in_chans, *spec.img_size), "patch_size": spec.patch_size[0]}
    biases = {"attn_bias": True, "ffn_bias": True, "norm_bias": True, "norm_eps": spec.eps}
    kind = {"patch_type": "computer_vision", "emb_type": "linear", "cls_token": True, "output_type": "classification"}
    theirs = Transformer(TransformerConfig(**sizes, **image, **biases, **kind, n_classes=spec.num_classes)).eval()
    renamed = {}
    for name, value in net.state_dict().items():
        for ours, other in _NAMES.items():
            name = name.replace(ours, other)
        renamed[name] = value
    missing = theirs.load_state_dict(renamed, strict=False).missing_keys
    if left := [name for name in missing if not name.startswith("output.")]:
        raise UserError(f"--peer {folder}: its model has other names than expected: {', '.join(left[:5])}")
    return theirs.get_decomposition


def plasticity_spread(flags, draws: int = 20) -> list[dict]:
    """Standard deviation of the components' means over draws of images, for matched and all pairs."""
    import numpy as np

    from vitplast_jax import load_model
    from vitplast_jax.data import sources
    from vitplast_jax.plasticity import measure
    from vitplast_jax.weights.convert import resolve

    batch, name = flags.batch or 32, "vit_pico_patch4_28.fashion_mnist"
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
