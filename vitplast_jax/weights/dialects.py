"""What does each source call our parameters, and how does it lay them out?

A dialect is a table of rules, read in both directions: our path <- the source's names, with a layout that turns the
one into the other.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping

import numpy as np
from einops import rearrange

from vitplast_jax.models.specs import Rope


@dataclasses.dataclass(frozen=True)
class Layout:
    """`rank` of the source's arrays; `read`: its arrays -> ours; `write`: ours, how many arrays -> its arrays.
    `heads_axis`: the axis that counts heads, where the source keeps them apart."""

    rank: int | None
    read: Callable
    write: Callable | None = None
    heads_axis: int | None = None


SAME = Layout(None, lambda x: x, lambda x, _: [x])
LINEAR = Layout(2, np.transpose, lambda x, _: [x.T])
CONV = Layout(
    4,
    lambda x: rearrange(x, "d c p q -> p q c d"),
    lambda x, _: [rearrange(x, "p q c d -> d c p q")],
)
JOINED_LINEAR = Layout(2, lambda *x: np.concatenate(x, 0).T, lambda x, n: np.split(x.T, n, 0))
JOINED_BIAS = Layout(1, lambda *x: np.concatenate(x, 0), lambda x, n: np.split(x, n, 0))
# Where a mask is 0 the bias is not used, whatever it holds.
MASKED_BIAS = Layout(1, lambda bias, mask: np.where(mask == 0, np.zeros((), bias.dtype), bias))
# The original JAX code keeps heads apart: [d, heads, head width].
JAX_QKV = Layout(3, lambda *x: np.concatenate([rearrange(w, "d h k -> d (h k)") for w in x], 1), heads_axis=1)
JAX_QKV_BIAS = Layout(2, lambda *x: np.concatenate([rearrange(b, "h k -> (h k)") for b in x], 0), heads_axis=0)
JAX_OUT = Layout(3, lambda x: rearrange(x, "h k d -> (h k) d"), heads_axis=0)


@dataclasses.dataclass(frozen=True)
class Rule:
    """`path` comes from `names`, in their order; a None among them stands for zeros like the first. `{i}` is the block.
    Of several rules for one path the first holds whose names are all there; the first is the one that is written.
    `norm_on`: only for models whose final norm acts there (`ViTSpec.norm_on`). `part`: (k, n), the path is the k-th of
    n equal parts of the source's first axis."""

    path: str
    names: tuple[str | None, ...]
    layout: Layout = SAME
    norm_on: str | None = None
    part: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True)
class Dialect:
    """`marks`: patterns, each of which some name must match; `absent`: names that must not be there. `renames`:
    (pattern, replacement) that bring variants to the table's names. `ignored`: patterns of names that carry nothing of
    ours. `fields`: what the source's code fixes. `doubt`: what its files do not say and another reader of them does
    otherwise. `without_registers`: further `fields` of models without registers. `family`: the known sizes whose widths
    tell the heads."""

    name: str
    marks: tuple[str, ...]
    rules: tuple[Rule, ...]
    absent: tuple[str, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    fields: Mapping = dataclasses.field(default_factory=dict)
    doubt: Mapping = dataclasses.field(default_factory=dict)
    without_registers: Mapping = dataclasses.field(default_factory=dict)
    family: str = "vit"

    def rules_for(self, path, norm_on):
        """The rules of a path with its block's number filled in."""
        number = re.match(r"blocks/(\d+)/", path)
        general = re.sub(r"^blocks/\d+/", "blocks/{i}/", path)
        fill = (lambda name: name and name.replace("{i}", number[1])) if number else lambda name: name
        return [
            dataclasses.replace(rule, path=path, names=tuple(map(fill, rule.names)))
            for rule in self.rules
            if rule.path == general and rule.norm_on in (None, norm_on)
        ]


def _rules(*rows):
    return tuple(Rule(row[0], row[1] if isinstance(row[1], tuple) else (row[1],), *row[2:]) for row in rows)


def _affine(path, name, norm_on=None):
    """A LayerNorm of torch: weight and bias."""
    return (path + "/scale", name + ".weight", SAME, norm_on), (path + "/bias", name + ".bias", SAME, norm_on)


def _linear(path, name):
    return (path + "/kernel", name + ".weight", LINEAR), (path + "/bias", name + ".bias")


def _halves(first, second, name):
    """Two linear layers in one of torch, one above the other."""
    return [
        (f"{path}/{leaf}", f"{name}.{torch_leaf}", layout, None, (k, 2))
        for k, path in enumerate((first, second))
        for leaf, torch_leaf, layout in (("kernel", "weight", LINEAR), ("bias", "bias", SAME))
    ]


def _joined(path, parts):
    """Three linear layers of torch as our one."""
    return (
        (path + "/kernel", tuple(f"{part}.weight" for part in parts), JOINED_LINEAR),
        (path + "/bias", tuple(f"{part}.bias" for part in parts), JOINED_BIAS),
    )


_MLP, _QKV = "blocks/{i}/mlp/", "blocks/{i}/attn/qkv"
_NO_KEY_BIAS = (_QKV + "/bias", ("blocks.{i}.attn.q_bias", None, "blocks.{i}.attn.v_bias"), JOINED_BIAS)  # BEiT's

_TIMM_ROWS = (
    ("patch_embed/kernel", "patch_embed.proj.weight", CONV),
    ("patch_embed/bias", "patch_embed.proj.bias"),
    ("cls_token", "cls_token"),
    ("dist_token", "dist_token"),
    ("reg_token", "reg_token"),
    ("pos_embed", "pos_embed"),
    *_affine("blocks/{i}/norm1", "blocks.{i}.norm1"),
    *_linear("blocks/{i}/attn/qkv", "blocks.{i}.attn.qkv"),
    _NO_KEY_BIAS,
    *_linear("blocks/{i}/attn/out", "blocks.{i}.attn.proj"),
    ("blocks/{i}/ls1/gamma", "blocks.{i}.ls1.gamma"),
    ("blocks/{i}/ls1/gamma", "blocks.{i}.gamma_1"),
    *_affine("blocks/{i}/norm2", "blocks.{i}.norm2"),
    *_linear("blocks/{i}/mlp/fc1", "blocks.{i}.mlp.fc1"),
    *_linear("blocks/{i}/mlp/fc2", "blocks.{i}.mlp.fc2"),
    ("blocks/{i}/ls2/gamma", "blocks.{i}.ls2.gamma"),
    ("blocks/{i}/ls2/gamma", "blocks.{i}.gamma_2"),
    *_affine("norm", "norm", "tokens"),
    *_affine("norm", "fc_norm", "pooled"),
    *_linear("head", "head"),
    *_linear("head_dist", "head_dist"),
)
_WITHOUT_FC1 = tuple(row for row in _TIMM_ROWS if not row[0].startswith(_MLP + "fc1"))
_WITHOUT_MLP = tuple(row for row in _TIMM_ROWS if not row[0].startswith(_MLP))
TIMM_RULES = _rules(*_TIMM_ROWS)
# SwiGLU: both halves in one layer, the gate first.
TIMM_GATED_RULES = _rules(*_WITHOUT_FC1, *_halves(_MLP + "gate", _MLP + "fc1", "blocks.{i}.mlp.fc1"))
# timm's Eva, which is its DINOv3.
TIMM_EVA_RULES = _rules(
    _NO_KEY_BIAS,
    *(row for row in _TIMM_ROWS if ".ls" not in row[1] and not row[0].startswith(_QKV + "/bias")),
)
TIMM_EVA_GATED_RULES = tuple(rule for rule in TIMM_EVA_RULES if not rule.path.startswith(_MLP + "fc1")) + _rules(
    *_linear(_MLP + "gate", "blocks.{i}.mlp.fc1_g"), *_linear(_MLP + "fc1", "blocks.{i}.mlp.fc1_x")
)
HUB_GATED_RULES = _rules(
    *_WITHOUT_MLP,
    *_halves(_MLP + "gate", _MLP + "fc1", "blocks.{i}.mlp.w12"),
    *_linear(_MLP + "fc2", "blocks.{i}.mlp.w3"),
)
_HUB_THREE_ROWS = (
    (_QKV + "/bias", ("blocks.{i}.attn.qkv.bias", "blocks.{i}.attn.qkv.bias_mask"), MASKED_BIAS),
    *_WITHOUT_MLP,
)
HUB_THREE_RULES = _rules(*_HUB_THREE_ROWS, *(row for row in _TIMM_ROWS if row[0].startswith(_MLP)))
HUB_THREE_GATED_RULES = _rules(
    *_HUB_THREE_ROWS,
    *_linear(_MLP + "gate", "blocks.{i}.mlp.w1"),
    *_linear(_MLP + "fc1", "blocks.{i}.mlp.w2"),
    *_linear(_MLP + "fc2", "blocks.{i}.mlp.w3"),
)


def _hf_rows(layer, query, key, value, out):
    """What transformers' ViTs share: all but the norms and the MLP of their layers."""
    return (
        ("patch_embed/kernel", "embeddings.patch_embeddings.projection.weight", CONV),
        ("patch_embed/bias", "embeddings.patch_embeddings.projection.bias"),
        ("cls_token", "embeddings.cls_token"),
        ("dist_token", "embeddings.distillation_token"),
        ("reg_token", "embeddings.register_tokens"),
        ("pos_embed", "embeddings.position_embeddings"),
        *_joined(_QKV, tuple(f"{layer}.{name}" for name in (query, key, value))),
        *_linear("blocks/{i}/attn/out", f"{layer}.{out}"),
        *_affine("norm", "layernorm"),
        *_linear("head", "classifier"),
    )


def _hf_rules(layer, query, key, value, out, fc1, fc2):
    """transformers' ViT, whose names changed within the layer over its versions; DeiT's heads are two."""
    return _rules(
        *_hf_rows(layer, query, key, value, out),
        *_affine("blocks/{i}/norm1", f"{layer}.layernorm_before"),
        *_affine("blocks/{i}/norm2", f"{layer}.layernorm_after"),
        *_linear("blocks/{i}/mlp/fc1", f"{layer}.{fc1}"),
        *_linear("blocks/{i}/mlp/fc2", f"{layer}.{fc2}"),
        *_linear("head", "cls_classifier"),
        *_linear("head_dist", "distillation_classifier"),
    )


_HF_CLASSIC_NAMES = ("attention.attention.query", "attention.attention.key", "attention.attention.value")
_HF_FIVE_NAMES = ("attention.q_proj", "attention.k_proj", "attention.v_proj")


def _hf_dino_rows(layer):
    return (
        *_affine("blocks/{i}/norm1", f"{layer}.norm1"),
        ("blocks/{i}/ls1/gamma", f"{layer}.layer_scale1.lambda1"),
        *_affine("blocks/{i}/norm2", f"{layer}.norm2"),
        ("blocks/{i}/ls2/gamma", f"{layer}.layer_scale2.lambda1"),
    )


def _hf_dinov2_rules(qkv, out, gated):
    layer = "encoder.layer.{i}"
    mlp = [*_linear(_MLP + "fc1", f"{layer}.mlp.fc1"), *_linear(_MLP + "fc2", f"{layer}.mlp.fc2")]
    if gated:
        mlp = [
            *_halves(_MLP + "gate", _MLP + "fc1", f"{layer}.mlp.weights_in"),
            *_linear(_MLP + "fc2", f"{layer}.mlp.weights_out"),
            *_linear(_MLP + "gate", f"{layer}.mlp.gate_proj"),
            *_linear(_MLP + "fc1", f"{layer}.mlp.up_proj"),
            *_linear(_MLP + "fc2", f"{layer}.mlp.down_proj"),
        ]
    return _rules(*_hf_rows(layer, *qkv, out), *_hf_dino_rows(layer), *mlp)


def _hf_dinov3_rules(gated):
    layer = "layer.{i}"
    return _rules(
        ("patch_embed/kernel", "embeddings.patch_embeddings.weight", CONV),
        ("patch_embed/bias", "embeddings.patch_embeddings.bias"),
        ("cls_token", "embeddings.cls_token"),
        ("reg_token", "embeddings.register_tokens"),
        # The keys have no bias: written so, and read with one too.
        (_QKV + "/bias", (f"{layer}.attention.q_proj.bias", None, f"{layer}.attention.v_proj.bias"), JOINED_BIAS),
        *_joined(_QKV, tuple(f"{layer}.{name}" for name in _HF_FIVE_NAMES)),
        *_linear("blocks/{i}/attn/out", f"{layer}.attention.o_proj"),
        *_hf_dino_rows(layer),
        *(_linear(_MLP + "gate", f"{layer}.mlp.gate_proj") if gated else ()),
        *_linear(_MLP + "fc1", f"{layer}.mlp.up_proj"),
        *_linear(_MLP + "fc2", f"{layer}.mlp.down_proj"),
        *_affine("norm", "norm"),
        *_linear("head", "classifier"),
    )


def _same(path, name, *leaves):
    return [(f"{path}/{leaf}", f"{name}/{leaf}") for leaf in leaves]


def _jax_rules(attention, mlp, norm2, positions):
    """The original JAX code and big_vision differ in the numbers of the layers and in where the positions are."""
    block = "Transformer/encoderblock_{i}/"

    def parts(leaf):
        return tuple(f"{block}{attention}/{part}/{leaf}" for part in ("query", "key", "value"))

    return _rules(
        *_same("patch_embed", "embedding", "kernel", "bias"),
        ("cls_token", "cls"),
        ("pos_embed", positions),
        *_same("blocks/{i}/norm1", block + "LayerNorm_0", "scale", "bias"),
        (_QKV + "/kernel", parts("kernel"), JAX_QKV),
        (_QKV + "/bias", parts("bias"), JAX_QKV_BIAS),
        ("blocks/{i}/attn/out/kernel", f"{block}{attention}/out/kernel", JAX_OUT),
        ("blocks/{i}/attn/out/bias", f"{block}{attention}/out/bias"),
        *_same("blocks/{i}/norm2", block + norm2, "scale", "bias"),
        *_same("blocks/{i}/mlp/fc1", f"{block}{mlp}/Dense_0", "kernel", "bias"),
        *_same("blocks/{i}/mlp/fc2", f"{block}{mlp}/Dense_1", "kernel", "bias"),
        *_same("norm", "Transformer/encoder_norm", "scale", "bias"),
        *_same("head", "head", "kernel", "bias"),
    )


def _conv1d(path, name):
    """transformers' Conv1D: a linear layer whose matrix is [in, out], as ours."""
    return (path + "/kernel", name + ".weight", Layout(2, SAME.read, SAME.write)), (path + "/bias", name + ".bias")


_GPT2_RULES = _rules(
    ("wte", "wte.weight"),
    ("wpe", "wpe.weight"),
    *_affine("blocks/{i}/norm1", "h.{i}.ln_1"),
    *_conv1d(_QKV, "h.{i}.attn.c_attn"),
    *_conv1d("blocks/{i}/attn/out", "h.{i}.attn.c_proj"),
    *_affine("blocks/{i}/norm2", "h.{i}.ln_2"),
    *_conv1d(_MLP + "fc1", "h.{i}.mlp.c_fc"),
    *_conv1d(_MLP + "fc2", "h.{i}.mlp.c_proj"),
    *_affine("norm", "ln_f"),
)

_TORCH_NUMERICS = {"gelu": "erf", "eps": 1e-6, "antialias": True, "pos_offset": 0.0}
_ROPE = {"eps": 1e-5, "rope": Rope(), "pos_embed": False, "pos_prefix": "none", "key_bias": False}
_HF = {
    "renames": ((r"^(vit|model|deit|dinov2|dinov2_with_registers|dinov3_vit)\.", ""),),
    "ignored": (r"pooler\..*", r"embeddings\.mask_token", r"embeddings\.position_ids", r"decoder\..*"),
}
_HF_VIT = _HF | {"fields": {"gelu": "erf", "eps": 1e-12, "antialias": False}}
# With registers the sources of DINOv2 resize positions with antialias, without them they do not.
_HF_DINO = _HF | {"fields": _TORCH_NUMERICS, "without_registers": {"antialias": False}}
_JAX = {
    "ignored": (r"pre_logits/(kernel|bias)", r"opt/state/.*"),
    "fields": {"eps": 1e-6},
    "doubt": {"gelu": "the JAX code runs these weights with the tanh GELU, timm with erf"},
}
_TIMM_MARKS = (r"patch_embed\.proj\.weight", r"blocks\.0\.norm1\.weight")
_PATCHES = r"embeddings\.patch_embeddings\.projection\.weight"

OURS = Dialect(
    "vitplast",
    (r"patch_embed/kernel", r"blocks/0/norm1/scale"),
    tuple(Rule(path, (path,)) for path in dict.fromkeys(rule.path for rule in TIMM_RULES + TIMM_GATED_RULES)),
)
TIMM = Dialect(
    "timm",
    _TIMM_MARKS,
    TIMM_RULES,
    ignored=(r"pre_logits\..*", r"mask_token", r".*\.relative_position_index"),
    fields=_TORCH_NUMERICS,
)
TIMM_GATED = dataclasses.replace(TIMM, name="timm SwiGLU", rules=TIMM_GATED_RULES, family="dinov2")
TIMM_EVA = Dialect(
    "timm eva",
    (*_TIMM_MARKS, r"blocks\.0\.gamma_1"),
    TIMM_EVA_RULES,
    absent=("pos_embed",),
    fields=_TORCH_NUMERICS | _ROPE,
    family="dinov3",
)
TIMM_EVA_GATED = dataclasses.replace(
    TIMM_EVA,
    name="timm eva SwiGLU",
    marks=(*TIMM_EVA.marks, r"blocks\.0\.mlp\.fc1_g\.weight"),
    rules=TIMM_EVA_GATED_RULES,
)
MAE = dataclasses.replace(
    TIMM,
    name="mae",
    marks=(*_TIMM_MARKS, r"decoder_embed\.weight"),
    ignored=(*TIMM.ignored, r"decoder_.*"),
    fields=_TORCH_NUMERICS | {"antialias": False},
)
DINO_HUB = dataclasses.replace(
    TIMM,
    name="dino hub",
    marks=(r"patch_embed\.proj\.weight", r"mask_token|register_tokens|blocks\.\d+\.\d+\.norm1\.weight"),
    # Chunked blocks carry their chunk's number before their own.
    renames=((r"^blocks\.\d+\.(\d+)\.", r"blocks.\1."), (r"^register_tokens$", "reg_token")),
    without_registers={"antialias": False, "pos_offset": 0.1},
)
DINO_HUB_GATED = dataclasses.replace(
    DINO_HUB,
    name="dino hub SwiGLU",
    marks=(r"patch_embed\.proj\.weight", r"blocks(\.\d+)?\.0\.mlp\.w12\.weight"),
    rules=HUB_GATED_RULES,
    family="dinov2",
)
DINOV3_HUB = Dialect(
    "dinov3 hub",
    (r"patch_embed\.proj\.weight", r"reg_token", r"mask_token|rope_embed\.periods|blocks\.0\.attn\.qkv\.bias_mask"),
    HUB_THREE_RULES,
    absent=("pos_embed",),
    renames=((r"^blocks\.\d+\.(\d+)\.", r"blocks.\1."), (r"^storage_tokens$", "reg_token")),
    ignored=(r"mask_token", r"local_cls_norm\..*", r"rope_embed\.periods"),
    fields=_TORCH_NUMERICS | _ROPE,
    family="dinov3",
)
DINOV3_HUB_GATED = dataclasses.replace(
    DINOV3_HUB,
    name="dinov3 hub SwiGLU",
    marks=(*DINOV3_HUB.marks, r"blocks\.0\.mlp\.w1\.weight"),
    rules=HUB_THREE_GATED_RULES,
)
HF_CLASSIC = Dialect(
    "transformers",
    (
        _PATCHES,
        r"encoder\.layer\.0\.attention\.attention\.query\.weight",
        r"encoder\.layer\.0\.layernorm_before\.weight",
    ),
    _hf_rules("encoder.layer.{i}", *_HF_CLASSIC_NAMES, "attention.output.dense", "intermediate.dense", "output.dense"),
    **_HF_VIT,
)
HF_FIVE = Dialect(
    "transformers 5",
    (_PATCHES, r"layers\.0\.attention\.q_proj\.weight"),
    _hf_rules("layers.{i}", *_HF_FIVE_NAMES, "attention.o_proj", "mlp.fc1", "mlp.fc2"),
    **_HF_VIT,
)
HF_DINOV2 = Dialect(
    "transformers dinov2",
    (_PATCHES, r"encoder\.layer\.0\.layer_scale1\.lambda1", r"encoder\.layer\.0\.mlp\.fc1\.weight"),
    _hf_dinov2_rules(_HF_CLASSIC_NAMES, "attention.output.dense", gated=False)
    + _hf_dinov2_rules(_HF_FIVE_NAMES, "attention.o_proj", gated=False),
    **_HF_DINO,
)
HF_DINOV2_GATED = Dialect(
    "transformers dinov2 SwiGLU",
    (_PATCHES, r"encoder\.layer\.0\.layer_scale1\.lambda1", r"encoder\.layer\.0\.mlp\.(weights_out|down_proj)\.weight"),
    _hf_dinov2_rules(_HF_CLASSIC_NAMES, "attention.output.dense", gated=True)
    + _hf_dinov2_rules(_HF_FIVE_NAMES, "attention.o_proj", gated=True),
    family="dinov2",
    **_HF_DINO,
)
HF_DINOV3 = Dialect(
    "transformers dinov3",
    (r"embeddings\.patch_embeddings\.weight", r"layer\.0\.layer_scale1\.lambda1"),
    _hf_dinov3_rules(gated=False),
    fields=_TORCH_NUMERICS | _ROPE,
    family="dinov3",
    **_HF,
)
HF_DINOV3_GATED = dataclasses.replace(
    HF_DINOV3,
    name="transformers dinov3 SwiGLU",
    marks=(*HF_DINOV3.marks, r"layer\.0\.mlp\.gate_proj\.weight"),
    rules=_hf_dinov3_rules(gated=True),
)
HF_GPT2 = Dialect(
    "transformers gpt2",
    (r"wte\.weight", r"h\.0\.attn\.c_attn\.weight"),
    _GPT2_RULES,
    renames=((r"^transformer\.", ""),),
    ignored=(r"h\.\d+\.attn\.(bias|masked_bias)", r"lm_head\.weight"),
    fields={"gelu": "tanh", "eps": 1e-5},
    family="gpt2",
)
OURS_GPT2 = Dialect(
    "vitplast gpt2",
    (r"wte", r"blocks/0/norm1/scale"),
    tuple(Rule(path, (path,)) for path in dict.fromkeys(rule.path for rule in _GPT2_RULES)),
    fields={"gelu": "tanh", "eps": 1e-5},
    family="gpt2",
)
JAX_ORIGINAL = Dialect(
    "original JAX",
    (r"embedding/kernel", r"Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query/kernel"),
    _jax_rules(
        "MultiHeadDotProductAttention_1", "MlpBlock_3", "LayerNorm_2", "Transformer/posembed_input/pos_embedding"
    ),
    **_JAX,
)
BIG_VISION = Dialect(
    "big_vision",
    (r"embedding/kernel", r"Transformer/encoderblock_0/MultiHeadDotProductAttention_0/query/kernel"),
    _jax_rules("MultiHeadDotProductAttention_0", "MlpBlock_0", "LayerNorm_1", "pos_embedding"),
    **_JAX,
)
# The first whose marks are all there is taken: the narrower before the wider. (TIMM_GATED has TIMM's names: `view`.)
DIALECTS = (
    *(OURS, OURS_GPT2, MAE, DINOV3_HUB_GATED, DINOV3_HUB, DINO_HUB_GATED, DINO_HUB),
    *(TIMM_EVA_GATED, TIMM_EVA, TIMM),
    *(HF_CLASSIC, HF_FIVE, HF_DINOV2, HF_DINOV2_GATED, HF_DINOV3_GATED, HF_DINOV3, HF_GPT2, JAX_ORIGINAL, BIG_VISION),
)
