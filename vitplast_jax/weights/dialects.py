"""What does each source call our parameters, and what does its code fix beside them?

A dialect is a table of rules (`rules`), read in both directions, the marks by which its files are known, and the
numerics of the source's code.
"""

import dataclasses
import re
from collections.abc import Mapping

from vitplast_jax.models.specs import Rope
from vitplast_jax.weights.rules import (
    GPT2_RULES,
    HF_CLASSIC_NAMES,
    HF_FIVE_NAMES,
    HUB_GATED_RULES,
    HUB_THREE_GATED_RULES,
    HUB_THREE_RULES,
    TIMM_EVA_GATED_RULES,
    TIMM_EVA_RULES,
    TIMM_GATED_RULES,
    TIMM_RULES,
    Rule,
    hf_dinov2_rules,
    hf_dinov3_rules,
    hf_rules,
    jax_rules,
)


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
    hf_rules("encoder.layer.{i}", *HF_CLASSIC_NAMES, "attention.output.dense", "intermediate.dense", "output.dense"),
    **_HF_VIT,
)
HF_FIVE = Dialect(
    "transformers 5",
    (_PATCHES, r"layers\.0\.attention\.q_proj\.weight"),
    hf_rules("layers.{i}", *HF_FIVE_NAMES, "attention.o_proj", "mlp.fc1", "mlp.fc2"),
    **_HF_VIT,
)
HF_DINOV2 = Dialect(
    "transformers dinov2",
    (_PATCHES, r"encoder\.layer\.0\.layer_scale1\.lambda1", r"encoder\.layer\.0\.mlp\.fc1\.weight"),
    hf_dinov2_rules(HF_CLASSIC_NAMES, "attention.output.dense", gated=False)
    + hf_dinov2_rules(HF_FIVE_NAMES, "attention.o_proj", gated=False),
    **_HF_DINO,
)
HF_DINOV2_GATED = Dialect(
    "transformers dinov2 SwiGLU",
    (_PATCHES, r"encoder\.layer\.0\.layer_scale1\.lambda1", r"encoder\.layer\.0\.mlp\.(weights_out|down_proj)\.weight"),
    hf_dinov2_rules(HF_CLASSIC_NAMES, "attention.output.dense", gated=True)
    + hf_dinov2_rules(HF_FIVE_NAMES, "attention.o_proj", gated=True),
    family="dinov2",
    **_HF_DINO,
)
HF_DINOV3 = Dialect(
    "transformers dinov3",
    (r"embeddings\.patch_embeddings\.weight", r"layer\.0\.layer_scale1\.lambda1"),
    hf_dinov3_rules(gated=False),
    fields=_TORCH_NUMERICS | _ROPE,
    family="dinov3",
    **_HF,
)
HF_DINOV3_GATED = dataclasses.replace(
    HF_DINOV3,
    name="transformers dinov3 SwiGLU",
    marks=(*HF_DINOV3.marks, r"layer\.0\.mlp\.gate_proj\.weight"),
    rules=hf_dinov3_rules(gated=True),
)
HF_GPT2 = Dialect(
    "transformers gpt2",
    (r"wte\.weight", r"h\.0\.attn\.c_attn\.weight"),
    GPT2_RULES,
    renames=((r"^transformer\.", ""),),
    ignored=(r"h\.\d+\.attn\.(bias|masked_bias)", r"lm_head\.weight"),
    fields={"gelu": "tanh", "eps": 1e-5},
    family="gpt2",
)
OURS_GPT2 = Dialect(
    "vitplast gpt2",
    (r"wte", r"blocks/0/norm1/scale"),
    tuple(Rule(path, (path,)) for path in dict.fromkeys(rule.path for rule in GPT2_RULES)),
    fields={"gelu": "tanh", "eps": 1e-5},
    family="gpt2",
)
JAX_ORIGINAL = Dialect(
    "original JAX",
    (r"embedding/kernel", r"Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query/kernel"),
    jax_rules(
        "MultiHeadDotProductAttention_1", "MlpBlock_3", "LayerNorm_2", "Transformer/posembed_input/pos_embedding"
    ),
    **_JAX,
)
BIG_VISION = Dialect(
    "big_vision",
    (r"embedding/kernel", r"Transformer/encoderblock_0/MultiHeadDotProductAttention_0/query/kernel"),
    jax_rules("MultiHeadDotProductAttention_0", "MlpBlock_0", "LayerNorm_1", "pos_embedding"),
    **_JAX,
)
# The first whose marks are all there is taken: the narrower before the wider. (TIMM_GATED has TIMM's names: `view`.)
DIALECTS = (
    *(OURS, OURS_GPT2, MAE, DINOV3_HUB_GATED, DINOV3_HUB, DINO_HUB_GATED, DINO_HUB),
    *(TIMM_EVA_GATED, TIMM_EVA, TIMM),
    *(HF_CLASSIC, HF_FIVE, HF_DINOV2, HF_DINOV2_GATED, HF_DINOV3_GATED, HF_DINOV3, HF_GPT2, JAX_ORIGINAL, BIG_VISION),
)
