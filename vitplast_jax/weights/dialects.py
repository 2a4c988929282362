"""What does each source call our parameters, and how does it lay them out?

A dialect is a table of rules, read in both directions: our path <- the source's names, with a layout that turns the
one into the other.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping

import numpy as np
from einops import rearrange


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
# The original JAX code keeps heads apart: [d, heads, head width].
JAX_QKV = Layout(3, lambda *x: np.concatenate([rearrange(w, "d h k -> d (h k)") for w in x], 1), heads_axis=1)
JAX_QKV_BIAS = Layout(2, lambda *x: np.concatenate([rearrange(b, "h k -> (h k)") for b in x], 0), heads_axis=0)
JAX_OUT = Layout(3, lambda x: rearrange(x, "h k d -> (h k) d"), heads_axis=0)


@dataclasses.dataclass(frozen=True)
class Rule:
    """`path` comes from `names`, in their order; a None among them stands for zeros like the first. `{i}` is the block.
    Of several rules for one path the first holds whose names are all there. `pool`: only for that kind of pooling."""

    path: str
    names: tuple[str | None, ...]
    layout: Layout = SAME
    pool: str | None = None


@dataclasses.dataclass(frozen=True)
class Dialect:
    """`marks`: patterns, each of which some name must match. `renames`: (pattern, replacement) that bring variants to
    the table's names. `ignored`: patterns of names that carry nothing of ours. `fields`: numerics of the source's code,
    where it leaves no choice. `doubt`: what its files do not say and another reader of them does otherwise."""

    name: str
    marks: tuple[str, ...]
    rules: tuple[Rule, ...]
    renames: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    fields: Mapping = dataclasses.field(default_factory=dict)
    doubt: Mapping = dataclasses.field(default_factory=dict)

    def rules_for(self, path, pool):
        """The rules of a path with its block's number filled in."""
        number = re.match(r"blocks/(\d+)/", path)
        general = re.sub(r"^blocks/\d+/", "blocks/{i}/", path)
        fill = (lambda name: name and name.replace("{i}", number[1])) if number else lambda name: name
        return [
            dataclasses.replace(rule, path=path, names=tuple(map(fill, rule.names)))
            for rule in self.rules
            if rule.path == general and rule.pool in (None, pool)
        ]


def _rules(*rows):
    return tuple(
        Rule(row[0], row[1] if isinstance(row[1], tuple) else (row[1],), *row[2:]) for row in rows if row is not None
    )


def _affine(path, name, pool=None):
    """A LayerNorm of torch: weight and bias."""
    return (path + "/scale", name + ".weight", SAME, pool), (path + "/bias", name + ".bias", SAME, pool)


def _linear(path, name):
    return (path + "/kernel", name + ".weight", LINEAR), (path + "/bias", name + ".bias")


TIMM_RULES = _rules(
    ("patch_embed/kernel", "patch_embed.proj.weight", CONV),
    ("patch_embed/bias", "patch_embed.proj.bias"),
    ("cls_token", "cls_token"),
    ("reg_token", "reg_token"),
    ("pos_embed", "pos_embed"),
    *_affine("blocks/{i}/norm1", "blocks.{i}.norm1"),
    *_linear("blocks/{i}/attn/qkv", "blocks.{i}.attn.qkv"),
    # BEiT's attention: no bias for the keys.
    ("blocks/{i}/attn/qkv/bias", ("blocks.{i}.attn.q_bias", None, "blocks.{i}.attn.v_bias"), JOINED_BIAS),
    *_linear("blocks/{i}/attn/out", "blocks.{i}.attn.proj"),
    ("blocks/{i}/ls1/gamma", "blocks.{i}.ls1.gamma"),
    ("blocks/{i}/ls1/gamma", "blocks.{i}.gamma_1"),
    *_affine("blocks/{i}/norm2", "blocks.{i}.norm2"),
    *_linear("blocks/{i}/mlp/fc1", "blocks.{i}.mlp.fc1"),
    *_linear("blocks/{i}/mlp/fc2", "blocks.{i}.mlp.fc2"),
    ("blocks/{i}/ls2/gamma", "blocks.{i}.ls2.gamma"),
    ("blocks/{i}/ls2/gamma", "blocks.{i}.gamma_2"),
    *_affine("norm", "norm", "token"),
    *_affine("norm", "fc_norm", "avg"),
    *_linear("head", "head"),
)


def _hf_rules(layer, query, key, value, out, fc1, fc2):
    """transformers' ViT, whose names changed within the layer over its versions."""
    parts = tuple(f"{layer}.{name}" for name in (query, key, value))
    return _rules(
        ("patch_embed/kernel", "embeddings.patch_embeddings.projection.weight", CONV),
        ("patch_embed/bias", "embeddings.patch_embeddings.projection.bias"),
        ("cls_token", "embeddings.cls_token"),
        ("reg_token", "embeddings.register_tokens"),
        ("pos_embed", "embeddings.position_embeddings"),
        *_affine("blocks/{i}/norm1", f"{layer}.layernorm_before"),
        ("blocks/{i}/attn/qkv/kernel", tuple(f"{part}.weight" for part in parts), JOINED_LINEAR),
        ("blocks/{i}/attn/qkv/bias", tuple(f"{part}.bias" for part in parts), JOINED_BIAS),
        *_linear("blocks/{i}/attn/out", f"{layer}.{out}"),
        *_affine("blocks/{i}/norm2", f"{layer}.layernorm_after"),
        *_linear("blocks/{i}/mlp/fc1", f"{layer}.{fc1}"),
        *_linear("blocks/{i}/mlp/fc2", f"{layer}.{fc2}"),
        *_affine("norm", "layernorm", "token"),
        *_linear("head", "classifier"),
    )


def _jax_rules(attention, mlp, norm2, positions):
    """The original JAX code and big_vision differ in the numbers of the layers and in where the positions are."""
    block = "Transformer/encoderblock_{i}/"

    def same(path, name, *leaves):
        return [(f"{path}/{leaf}", f"{name}/{leaf}") for leaf in leaves]

    def parts(leaf):
        return tuple(f"{block}{attention}/{part}/{leaf}" for part in ("query", "key", "value"))

    return _rules(
        *same("patch_embed", "embedding", "kernel", "bias"),
        ("cls_token", "cls"),
        ("pos_embed", positions),
        *same("blocks/{i}/norm1", block + "LayerNorm_0", "scale", "bias"),
        ("blocks/{i}/attn/qkv/kernel", parts("kernel"), JAX_QKV),
        ("blocks/{i}/attn/qkv/bias", parts("bias"), JAX_QKV_BIAS),
        ("blocks/{i}/attn/out/kernel", f"{block}{attention}/out/kernel", JAX_OUT),
        ("blocks/{i}/attn/out/bias", f"{block}{attention}/out/bias"),
        *same("blocks/{i}/norm2", block + norm2, "scale", "bias"),
        *same("blocks/{i}/mlp/fc1", f"{block}{mlp}/Dense_0", "kernel", "bias"),
        *same("blocks/{i}/mlp/fc2", f"{block}{mlp}/Dense_1", "kernel", "bias"),
        *[(f"norm/{leaf}", f"Transformer/encoder_norm/{leaf}", SAME, "token") for leaf in ("scale", "bias")],
        *same("head", "head", "kernel", "bias"),
    )


_TORCH_NUMERICS = {"gelu": "erf", "eps": 1e-6}
_HF = {
    "renames": ((r"^(vit|model)\.", ""),),
    "ignored": (r"pooler\..*", r"embeddings\.mask_token", r"embeddings\.position_ids"),
    "fields": {"gelu": "erf", "eps": 1e-12},
}
_JAX = {
    "ignored": (r"pre_logits/(kernel|bias)", r"opt/state/.*"),
    "fields": {"eps": 1e-6},
    "doubt": {"gelu": "the JAX code runs these weights with the tanh GELU, timm with erf"},
}

OURS = Dialect(
    "vitplast",
    (r"patch_embed/kernel", r"blocks/0/norm1/scale"),
    tuple(Rule(path, (path,)) for path in dict.fromkeys(rule.path for rule in TIMM_RULES)),
)
TIMM = Dialect(
    "timm",
    (r"patch_embed\.proj\.weight", r"blocks\.0\.norm1\.weight"),
    TIMM_RULES,
    ignored=(r"pre_logits\..*", r"mask_token", r".*\.relative_position_index"),
    fields=_TORCH_NUMERICS,
)
DINO_HUB = dataclasses.replace(
    TIMM,
    name="dino hub",
    marks=(r"patch_embed\.proj\.weight", r"mask_token|register_tokens|blocks\.\d+\.\d+\.norm1\.weight"),
    # Chunked blocks carry their chunk's number before their own.
    renames=((r"^blocks\.\d+\.(\d+)\.", r"blocks.\1."), (r"^register_tokens$", "reg_token")),
)
HF_CLASSIC = Dialect(
    "transformers",
    (r"embeddings\.patch_embeddings\.projection\.weight", r"encoder\.layer\.0\.attention\.attention\.query\.weight"),
    _hf_rules(
        "encoder.layer.{i}",
        "attention.attention.query",
        "attention.attention.key",
        "attention.attention.value",
        "attention.output.dense",
        "intermediate.dense",
        "output.dense",
    ),
    **_HF,
)
HF_FIVE = Dialect(
    "transformers 5",
    (r"embeddings\.patch_embeddings\.projection\.weight", r"layers\.0\.attention\.q_proj\.weight"),
    _hf_rules(
        "layers.{i}",
        "attention.q_proj",
        "attention.k_proj",
        "attention.v_proj",
        "attention.o_proj",
        "mlp.fc1",
        "mlp.fc2",
    ),
    **_HF,
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
DIALECTS = (OURS, DINO_HUB, TIMM, HF_CLASSIC, HF_FIVE, JAX_ORIGINAL, BIG_VISION)
