"""Which model of transformers is this one, and how does it want its weights and its config.json?

In: parameters and their spec. Out: name -> array in transformers' names, and the config as a dict. Where transformers'
class is built a little differently (a wider head, a row of positions), the weights are written so that it answers the
same.
"""

import re

import numpy as np

from vitplast_jax import trees
from vitplast_jax.errors import UserError
from vitplast_jax.models import specs
from vitplast_jax.weights import dialects

# model_type -> the backbone's class, and the prefix of its names where a head stands beside it
CLASSES = {
    "vit": ("ViTModel", "vit."),
    "deit": ("DeiTModel", "deit."),
    "dinov2": ("Dinov2Model", "dinov2."),
    "dinov2_with_registers": ("Dinov2WithRegistersModel", "dinov2_with_registers."),
    "dinov3_vit": ("DINOv3ViTModel", ""),
    "gpt2": ("GPT2Model", "transformer."),
}


def family(spec):
    """The model_type whose structure this is; a `UserError` says what stands in the way."""
    if isinstance(spec, specs.GPT2Spec):
        return "gpt2"
    problems = []
    if not spec.class_token:
        problems.append("no class token")
    if spec.norm_on == "pooled":
        problems.append("a final norm of the mean")
    if spec.img_size[0] != spec.img_size[1] or spec.patch_size[0] != spec.patch_size[1]:
        problems.append("images or patches that are not square")
    if spec.rope:
        name = "dinov3_vit"
        if not spec.layer_scale or spec.distilled:
            problems.append("rotary positions without LayerScale, or a distillation token")
        if spec.num_classes:
            problems.append("a head (DINOv3 has none in transformers: export with num_classes=0)")
    elif spec.layer_scale:
        name = "dinov2_with_registers" if spec.registers else "dinov2"
        if spec.distilled or (not spec.registers and spec.pos_prefix != "all") or spec.prefix_rows > 1:
            problems.append("LayerScale with other tokens or positions than DINOv2's")
    else:
        name = "deit" if spec.distilled else "vit"
        if spec.registers or spec.gated or spec.prefix_rows != spec.prefix or not spec.pos_embed:
            problems.append("registers, a gated MLP or prefix tokens without positions, but no LayerScale")
        if spec.pool not in ("token", "distilled"):
            problems.append(f"pooling {spec.pool}")
    if not spec.rope and not spec.key_bias:
        problems.append("attention without a bias for the keys")
    if problems:
        raise UserError(f"{spec.name}: no model of transformers has {'; '.join(problems)}")
    return name


def tensors(params, spec, to_dialect):
    """name -> array as the class of :func:`family` with this head stores them; `to_dialect` as in `export`."""
    name = family(spec)
    dialect = {
        "dinov2": (dialects.HF_DINOV2, dialects.HF_DINOV2_GATED),
        "dinov2_with_registers": (dialects.HF_DINOV2, dialects.HF_DINOV2_GATED),
        "dinov3_vit": (dialects.HF_DINOV3, dialects.HF_DINOV3_GATED),
        "gpt2": (dialects.HF_GPT2,),
    }.get(name, (dialects.HF_CLASSIC,))[bool(getattr(spec, "gated", False))]
    flat = trees.flatten(params)
    if name.startswith("dinov2"):
        flat = _dinov2(flat, spec)
    result = to_dialect(trees.unflatten(flat), spec, dialect)
    if name == "deit" and spec.pool == "distilled" and spec.num_classes:
        result = {re.sub("^classifier", "cls_classifier", n): a for n, a in result.items()}
    prefix = CLASSES[name][1] if spec.num_classes else ""
    if name.startswith("dinov"):  # it carries nothing of the model, but the class has one
        result["embeddings.mask_token"] = np.zeros((1, 1, spec.width)[name != "dinov3_vit" :], flat["cls_token"].dtype)
    return {n if "classifier" in n else prefix + n: a for n, a in result.items()}


def _dinov2(flat, spec):
    """A head that reads both class token and mean, and a row of positions for the class token."""
    flat = dict(flat)
    if spec.num_classes and spec.pool != "token+avg":
        kernel = np.asarray(flat["head/kernel"])
        halves = [kernel, np.zeros_like(kernel)]
        flat["head/kernel"] = np.concatenate(halves if spec.pool == "token" else halves[::-1])
    if spec.pos_prefix == "none":
        table = np.asarray(flat["pos_embed"])
        flat["pos_embed"] = np.concatenate([np.zeros_like(table[:, :1]), table], axis=1)
    return flat


def config(spec, class_names):
    """config.json with this structure and these numerics."""
    name = family(spec)
    backbone = CLASSES[name][0]
    if name == "gpt2":
        return {
            "architectures": ["GPT2LMHeadModel" if spec.num_classes else "GPT2Model"],
            "model_type": name,
            "n_embd": spec.width,
            "n_layer": spec.depth,
            "n_head": spec.heads,
            "n_inner": spec.hidden,
            "n_positions": spec.context,
            "vocab_size": spec.vocabulary,
            "activation_function": {"erf": "gelu", "tanh": "gelu_new"}[spec.gelu],
            "layer_norm_epsilon": spec.eps,
            "bos_token_id": spec.vocabulary - 1,
            "eos_token_id": spec.vocabulary - 1,
        }
    head = backbone.removesuffix("Model") + "ForImageClassification"
    head += "WithTeacher" if spec.pool == "distilled" else ""
    names = class_names or [f"LABEL_{i}" for i in range(spec.num_classes)]
    result = {
        "architectures": [head if spec.num_classes else backbone],
        "model_type": name,
        "hidden_size": spec.width,
        "num_hidden_layers": spec.depth,
        "num_attention_heads": spec.heads,
        "hidden_act": {"erf": "gelu", "tanh": "gelu_pytorch_tanh"}[spec.gelu],
        "layer_norm_eps": spec.eps,
        "num_channels": spec.in_chans,
        "image_size": spec.img_size[0],
        "patch_size": spec.patch_size[0],
    }
    if spec.num_classes:
        result |= {
            "id2label": {str(i): label for i, label in enumerate(names)},
            "label2id": {label: i for i, label in enumerate(names)},
        }
    if name == "dinov3_vit":
        return (
            result
            | {
                "intermediate_size": spec.hidden,
                "query_bias": spec.qkv_bias,
                "key_bias": spec.qkv_bias and spec.key_bias,
                "value_bias": spec.qkv_bias,
                "use_gated_mlp": spec.gated,
                "num_register_tokens": spec.registers,
                "rope_theta": spec.rope.theta,
            }
            | ({"hidden_act": "silu"} if spec.gated else {})
        )
    result |= {"qkv_bias": spec.qkv_bias, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if not name.startswith("dinov2"):
        return result | {"intermediate_size": spec.hidden}
    result |= {"use_swiglu_ffn": spec.gated, "mlp_ratio": _ratio(spec)}
    return result | ({"num_register_tokens": spec.registers} if spec.registers else {})


def _ratio(spec):
    """The whole number from which transformers' DINOv2 computes its hidden width."""
    for ratio in range(1, 33):
        hidden = ratio * spec.width
        if (((int(hidden * 2 / 3) + 7) // 8 * 8) if spec.gated else hidden) == spec.hidden:
            return ratio
    raise UserError(
        f"{spec.name}: transformers' DINOv2 cannot have a hidden width of {spec.hidden} at width {spec.width}"
    )
