"""Makes the goldens in tests/data/weights: tiny models of the real peers, their weights, and what they answer.

Run where torch, timm and transformers are installed (the extra `parity`):

    python tools/make_golden.py --output tests/data/weights

Every case is NAME.safetensors (or .pth, .npz) and NAME.golden.json with the command, versions, seed, the peer's
arguments and its logits for an input that numpy draws. Weights are drawn at random everywhere, so that a part that was
skipped shows.
"""

import argparse
import functools
import json
import os
import pathlib
import platform

import numpy as np
import safetensors.torch
import timm
import torch
import transformers
from timm.layers import SwiGLUPacked, resample_abs_pos_embed
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn

COMMAND = "python tools/make_golden.py --output tests/data/weights"
SEED = 20261130
NORMS = ("norm.weight", "norm1.weight", "norm2.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight")
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
    families(output)
    jax_case(output)
    torch_files(output)
    positions(output)
    positions_of_dinov2(output)


def drawn(model, seed=SEED):
    """The model with every parameter drawn at random, in evaluation mode."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = torch.randn(parameter.shape, generator=generator)
            scale = parameter.shape[1] ** -0.5 if parameter.ndim == 2 else 0.2
            near_one = name.endswith((*NORMS, "before.weight", "after.weight"))
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


def families(output):
    """One tiny model of every further family, by its own class, in the two layouts that we export to."""
    rope = {"use_rot_pos_emb": True, "use_abs_pos_emb": False, "rope_type": "dinov3", "rope_temperature": 100.0}
    rope |= {"rope_rotate_half": True, "num_reg_tokens": 2, "use_fc_norm": False, "init_values": 0.1}
    rope |= {"global_pool": "token", "norm_layer": functools.partial(timm.layers.LayerNorm, eps=1e-5)}
    rope |= {"img_size": (8, 12)}
    swiglu = {"mlp_layer": SwiGLUPacked, "act_layer": torch.nn.SiLU, "init_values": 0.1, "mlp_ratio": 4.0}
    models = {
        "deit_timm": VisionTransformerDistilled(**SMALL, img_size=16),
        "dinov2_timm": VisionTransformer(**SMALL | swiglu, img_size=16, reg_tokens=2, no_embed_class=True),
        "gap_timm": VisionTransformer(**SMALL, img_size=16, class_token=False, global_pool="avg", fc_norm=False),
        "dinov3_timm": Eva(**SMALL, **rope),
        "dinov3_gated_timm": Eva(**SMALL, **rope, swiglu_mlp=True, swiglu_align_to=8, qkv_bias=False),
    }
    for name, model in models.items():
        safetensors.torch.save_file(drawn(model).state_dict(), output / f"{name}.safetensors")
        write(output, name, **answers(model, model.patch_embed.img_size))
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 4}
    small |= {"num_labels": 7}
    dinov3 = {**small, "intermediate_size": 24, "num_register_tokens": 2, "use_gated_mlp": True, "hidden_act": "silu"}
    folders = {
        "deit_hf": (
            transformers.DeiTForImageClassificationWithTeacher,
            transformers.DeiTConfig,
            {"intermediate_size": 48},
        ),
        "mae_hf": (transformers.ViTMAEModel, transformers.ViTMAEConfig, {"intermediate_size": 48, "mask_ratio": 0.0}),
        "dinov2_hf": (transformers.Dinov2ForImageClassification, transformers.Dinov2Config, {"mlp_ratio": 3}),
        "dinov2_registers_hf": (
            transformers.Dinov2WithRegistersForImageClassification,
            transformers.Dinov2WithRegistersConfig,
            {"mlp_ratio": 3, "num_register_tokens": 2, "use_swiglu_ffn": True},
        ),
        "dinov3_hf": (transformers.DINOv3ViTModel, transformers.DINOv3ViTConfig, dinov3),
    }
    for name, (kind, config, arguments) in folders.items():
        model = drawn(kind(config(**small | arguments)))
        model.save_pretrained(output / name)
        options = {"noise": torch.arange(16.0)[None].repeat(2, 1)} if name == "mae_hf" else {}
        has_head = hasattr(model, "classifier") or hasattr(model, "cls_classifier")
        pick = (lambda y: y.logits) if has_head else (lambda y: y.last_hidden_state[:, 0])
        write(output, name, **answers(lambda x, m=model, o=options: m(x, **o), 16, pick))
        if name.startswith("dinov2"):  # positions resized by the peer itself
            write(output, f"{name}_resized", **answers(model, (24, 12), pick))
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=12, vocab_size=19, eos_token_id=18)
    config.bos_token_id = 18
    model = drawn(transformers.GPT2LMHeadModel(config))
    model.save_pretrained(output / "gpt2_hf")
    (output / "gpt2_hf" / "generation_config.json").unlink()
    words = np.random.default_rng(SEED).integers(0, 19, (2, 9))
    with torch.no_grad():
        logits = model(torch.from_numpy(words)).logits
    write(output, "gpt2_hf", words=words.tolist(), logits=logits.double().numpy().tolist())


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
        # As DINOv2's own code without registers asks for it: by a scale with a small offset.
        grid = torch.from_numpy(table[:, prefix:]).reshape(1, *old, 3).permute(0, 3, 1, 2)
        scale = tuple((new[axis] + 0.1) / old[axis] for axis in (0, 1))
        grid = torch.nn.functional.interpolate(grid, scale_factor=scale, mode="bicubic")
        result = np.concatenate([table[:, :prefix], grid.permute(0, 2, 3, 1).reshape(1, -1, 3).numpy()], axis=1)
        case = {"old": old, "new": new, "prefix": prefix, "antialias": False, "offset": 0.1}
        cases.append(case | {"table": table.tolist(), "result": result.tolist()})
    write(output, "positions", cases=cases)


def positions_of_dinov2(output):
    """DINOv2's grid of 37 x 37 at other sizes, by torch's plain bicubic kernel (a = -0.75, no antialias)."""
    table = np.random.default_rng(SEED).standard_normal((1, 2, 37, 37), np.float32)
    resized = {}
    for side in (16, 24, 48):
        grid = torch.nn.functional.interpolate(torch.from_numpy(table), size=(side, side), mode="bicubic")
        resized[str(side)] = grid[0].permute(1, 2, 0).numpy()
    np.savez_compressed(output / "positions_37.npz", **resized)
    write(output, "positions_37", kernel="interpolate(mode='bicubic'), antialias off", sides=list(map(int, resized)))


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
