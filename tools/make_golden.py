"""Makes the goldens in tests/data/weights: tiny models of the real peers, their weights, and what they answer.

Run where torch, timm and transformers are installed (the extra `parity`):

    python tools/make_golden.py --output tests/data/weights

Every case is NAME.safetensors (or .pth, .npz) and NAME.golden.json with the command, versions, seed, the peer's
arguments and its logits for an input that numpy draws. Weights are drawn at random everywhere, so that a part that was
skipped shows.
"""

import argparse
import json
import os
import pathlib
import platform

import numpy as np
import safetensors.torch
import timm
import torch
import transformers
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn

COMMAND = "python tools/make_golden.py --output tests/data/weights"
SEED = 20261130
SMALL = {"patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "mlp_ratio": 3.0, "num_classes": 7}
CASES = {
    "token": {"img_size": 16},
    "avg": {"img_size": 16, "global_pool": "avg"},
    "registers": {"img_size": 16, "reg_tokens": 3, "no_embed_class": True, "init_values": 0.1},
    "oblong": {"img_size": (12, 20), "reg_tokens": 2, "qkv_bias": False, "in_chans": 1},
    "classless": {"img_size": 16, "class_token": False, "global_pool": "avg"},
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", required=True)
    output = pathlib.Path(parser.parse_args().output)
    output.mkdir(parents=True, exist_ok=True)
    for name, arguments in CASES.items():
        model = drawn(VisionTransformer(**SMALL, **arguments))
        safetensors.torch.save_file(model.state_dict(), output / f"{name}.safetensors")
        write(output, name, arguments=SMALL | arguments, **answers(model, arguments["img_size"]))
    resized(output)
    transformers_case(output)
    jax_case(output)
    torch_files(output)
    positions(output)


def drawn(model, seed=SEED):
    """The model with every parameter drawn at random, in evaluation mode."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = torch.randn(parameter.shape, generator=generator)
            scale = parameter.shape[1] ** -0.5 if parameter.ndim == 2 else 0.2
            near_one = name.endswith(("norm.weight", "norm1.weight", "norm2.weight", "before.weight", "after.weight"))
            parameter.copy_(value * scale + (1.0 if near_one else 0.0))
    return model.eval()


def images(size, channels=3, seed=SEED):
    """[2, h, w, c] float32, as the tests draw them again."""
    height, width = (size, size) if isinstance(size, int) else size
    return np.random.default_rng(seed).standard_normal((2, height, width, channels)).astype(np.float32)


def answers(model, size, logits=lambda y: y):
    channels = getattr(model, "patch_embed", None) and model.patch_embed.proj.in_channels or 3
    x = images(size, channels)
    with torch.no_grad():
        y = logits(model(torch.from_numpy(x).permute(0, 3, 1, 2)))
    return {"input": list(x.shape), "logits": y.double().numpy().tolist()}


def resized(output):
    """timm's own loading of the square model into another, not square, size."""
    source = safetensors.torch.load_file(output / "token.safetensors")
    arguments = {"img_size": (24, 12)}
    model = VisionTransformer(**SMALL, **arguments).eval()
    model.load_state_dict(checkpoint_filter_fn(source, model), strict=True)
    write(output, "token_resized", arguments=SMALL | arguments, **answers(model, (24, 12)))


def transformers_case(output):
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, image_size=16, patch_size=4,
        num_labels=7, layer_norm_eps=1e-12,
    )  # fmt: skip
    model = drawn(transformers.ViTForImageClassification(config))
    folder = output / "hf"
    model.save_pretrained(folder)
    write(output, "hf", **answers(model, 16, lambda y: y.logits))


def jax_case(output):
    """A file in the original JAX code's names, and timm's answer with it."""
    rng = np.random.default_rng(SEED)
    d, heads, hidden = 16, 2, 48
    tensors = {}

    def put(name, *shape, one=0.0):
        tensors[name] = (rng.standard_normal(shape) * 0.2 + one).astype(np.float32)

    put("embedding/kernel", 4, 4, 3, d)
    put("embedding/bias", d)
    put("cls", 1, 1, d)
    put("Transformer/posembed_input/pos_embedding", 1, 17, d)
    for i in range(2):
        block = f"Transformer/encoderblock_{i}/"
        for norm in ("LayerNorm_0", "LayerNorm_2"):
            put(block + norm + "/scale", d, one=1.0)
            put(block + norm + "/bias", d)
        for part in ("query", "key", "value"):
            put(f"{block}MultiHeadDotProductAttention_1/{part}/kernel", d, heads, d // heads)
            put(f"{block}MultiHeadDotProductAttention_1/{part}/bias", heads, d // heads)
        put(f"{block}MultiHeadDotProductAttention_1/out/kernel", heads, d // heads, d)
        put(f"{block}MultiHeadDotProductAttention_1/out/bias", d)
        for dense, shape in (("Dense_0", (d, hidden)), ("Dense_1", (hidden, d))):
            put(f"{block}MlpBlock_3/{dense}/kernel", *shape)
            put(f"{block}MlpBlock_3/{dense}/bias", shape[1])
    put("Transformer/encoder_norm/scale", d, one=1.0)
    put("Transformer/encoder_norm/bias", d)
    put("head/kernel", d, 7)
    put("head/bias", 7)
    np.savez(output / "jax.npz", **tensors)
    model = VisionTransformer(**SMALL, img_size=16).eval()
    model.load_pretrained(str(output / "jax.npz"))
    write(output, "jax", arguments=SMALL | {"img_size": 16}, **answers(model, 16))


def torch_files(output):
    """Files as training scripts of torch leave them; all hold the tensors of one tiny model."""
    arguments = {"img_size": 8, "patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 2, "mlp_ratio": 2.0}
    model = drawn(VisionTransformer(**arguments, num_classes=3))
    state = model.state_dict()
    averaged = {name: tensor + 1 for name, tensor in state.items()}

    def prefixed(prefix, tensors):
        return {prefix + name: tensor for name, tensor in tensors.items()}

    namespace = argparse.Namespace(lr=0.1, path=pathlib.PurePosixPath("x"))
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    backbone = {name: tensor for name, tensor in state.items() if not name.startswith("head")}
    projector = {"head.mlp.0.weight": torch.ones(2, 2), "head.last_layer.weight_v": torch.ones(2)}
    files = {
        "plain.pth": state,
        "wrapped.pth": {"model": state, "args": namespace, "epoch": 3, "optimizer": optimizer.state_dict()},
        "averaged.pth": {"state_dict": prefixed("module.", state), "state_dict_ema": prefixed("module.", averaged)},
        "teacher.pth": {"teacher": prefixed("backbone.", backbone) | projector, "student": {}},
        "parameters.pth": {name: torch.nn.Parameter(tensor) for name, tensor in state.items()},
        "bfloat16.pth": {name: tensor.bfloat16() for name, tensor in state.items()},
        # Views into one storage, with an offset and swapped strides.
        "strided.pth": strided(state),
    }
    for name, content in files.items():
        torch.save(content, output / name)
    torch.save({"model": state}, output / "legacy.pt", _use_new_zipfile_serialization=False)
    safetensors.torch.save_file(state, output / "plain.safetensors")
    write(output, "plain", arguments=arguments | {"num_classes": 3}, files=sorted(files), **answers(model, 8))


def strided(state):
    sizes = [tensor.numel() for tensor in state.values()]
    storage = torch.zeros(sum(sizes) + 5)
    result, place = {}, 5
    for name, tensor in state.items():
        part = storage[place : place + tensor.numel()]
        view = part.view(tensor.shape[::-1]).permute(*range(tensor.ndim)[::-1])
        view.copy_(tensor)
        result[name] = view
        place += tensor.numel()
    return result


def positions(output):
    """Position tables of several grids, resized by timm, and by torch without antialias."""
    rng = np.random.default_rng(SEED)
    cases = []
    for old, new, prefix in (((7, 7), (3, 3), 1), ((4, 4), (7, 7), 1), ((5, 7), (8, 4), 0), ((3, 3), (3, 5), 4)):
        table = rng.standard_normal((1, prefix + old[0] * old[1], 3)).astype(np.float32)
        for antialias in (True, False):
            result = resample_abs_pos_embed(
                torch.from_numpy(table), list(new), list(old), num_prefix_tokens=prefix, antialias=antialias
            )
            case = {"old": old, "new": new, "prefix": prefix, "antialias": antialias}
            cases.append(case | {"table": table.tolist(), "result": result.tolist()})
    write(output, "positions", cases=cases)


def write(output, name, **content):
    versions = {
        "timm": timm.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
    provenance = {"command": COMMAND, "seed": SEED, "versions": versions}
    with open(output / f"{name}.golden.json", "w", encoding="utf-8") as file:
        json.dump(provenance | content, file)
        file.write("\n")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
