"""The Vision Transformer (arXiv 2010.11929) in timm's variants: class token or mean pooling, registers, LayerScale.

In: images [b, height, width, c], float, normalised. Out: logits [b, classes] in float32, or pooled features.
"""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx

from vitplast_jax import trees
from vitplast_jax.errors import UserError
from vitplast_jax.models import layers
from vitplast_jax.models.specs import ViTSpec


class PatchEmbed(nnx.Module):
    """Cuts images into patches and projects each; kernel [patch height, patch width, c, d], as a convolution's."""

    def __init__(self, spec: ViTSpec):
        self.kernel = nnx.Param(jnp.zeros((*spec.patch_size, spec.in_chans, spec.width)))
        self.bias = nnx.Param(jnp.zeros((spec.width,)))

    def __call__(self, images):
        kernel = self.kernel[...].astype(images.dtype)
        height, width = kernel.shape[:2]
        patches = rearrange(images, "b (i p) (j q) c -> b (i j) (p q c)", p=height, q=width)
        return patches @ rearrange(kernel, "p q c d -> (p q c) d") + self.bias[...].astype(images.dtype)


class ViT(nnx.Module):
    """A Vision Transformer whose dtype of computation is that of the images; parameters are zeros until filled.

    Build one with :func:`vitplast_jax.create_model` or :func:`vitplast_jax.load_model`.
    """

    def __init__(self, spec: ViTSpec):
        d = spec.width
        self.spec = spec
        self.slots = self.origin = None  # what peft/attach.py put into the slots, and what it was made from
        self.patch_embed = PatchEmbed(spec)
        self.cls_token = nnx.Param(jnp.zeros((1, 1, d))) if spec.class_token else nnx.data(None)
        self.reg_token = nnx.Param(jnp.zeros((1, spec.registers, d))) if spec.registers else nnx.data(None)
        self.pos_embed = nnx.Param(jnp.zeros((1, spec.positions, d)))
        # Stochastic depth rises linearly from 0 at the first block to its full rate at the last.
        rates = [spec.drop_path_rate * i / max(spec.depth - 1, 1) for i in range(spec.depth)]
        self.blocks = nnx.List(
            layers.Block(
                index,
                d,
                spec.hidden,
                spec.heads,
                qkv_bias=spec.qkv_bias,
                gelu=spec.gelu,
                eps=spec.eps,
                layer_scale=spec.layer_scale,
                drop=spec.drop_rate,
                drop_path=rate,
            )
            for index, rate in enumerate(rates)
        )
        self.norm = layers.LayerNorm(d, spec.eps)
        self.head = layers.Linear(d, spec.num_classes) if spec.num_classes else nnx.data(None)

    def embed(self, images, keys=None):
        """Returns the embedding output [b, n, d]: class token, registers, patches, plus positions."""
        expected = (*self.spec.img_size, self.spec.in_chans)
        if images.ndim != 4 or images.shape[1:] != expected:
            raise UserError(f"{self.spec.name} takes images [b, {', '.join(map(str, expected))}], not {images.shape}")
        x = self.patch_embed(images)
        prefix = [
            jnp.broadcast_to(token[...].astype(x.dtype), (x.shape[0], *token.shape[1:]))
            for token in (self.cls_token, self.reg_token)
            if token is not None
        ]
        positions = self.pos_embed[...].astype(x.dtype)
        if self.spec.pos_prefix:
            x = jnp.concatenate([*prefix, x], axis=1) + positions
        else:
            x = jnp.concatenate([*prefix, x + positions], axis=1)
        return layers.dropout(x, keys, layers.FIRST_PLACE, self.spec.drop_rate)

    def __call__(self, images, key=None, *, intermediates: bool = False, remat: bool = False):
        """Returns logits [b, classes] in float32 (features [b, d] without a head), or (logits, out).

        Args:
          images: [b, height, width, c], normalised, in the dtype to compute in.
          key: None for a deterministic pass; else a key, or [b] keys (one an example), for dropout and drop-path.
          intermediates: also return ``out``: "embedding", "blocks" (a list with every component's output), "norm" and
            "pooled".
          remat: recompute each block in the backward pass instead of keeping its activations.
        """
        keys = key
        if key is not None and key.ndim == 0:
            keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(images.shape[0]))
        x = self.embed(images, keys)
        out = {"embedding": x, "blocks": []}
        for block in self.blocks:
            if intermediates:
                x, parts = block(x, keys, intermediates=True)
                out["blocks"].append(parts)
            elif remat:
                x = jax.checkpoint(lambda x, block=block: block(x, keys))(x)
            else:
                x = block(x, keys)
        if self.spec.pool == "avg":
            # The patches alone are averaged, before the final norm (timm's fc_norm).
            prompts = sum(block.prompt.inserted for block in self.blocks if block.prompt is not None)
            pooled = out["norm"] = self.norm(x[:, self.spec.prefix + prompts :].mean(1))
        elif intermediates:
            out["norm"] = self.norm(x)
            pooled = out["norm"][:, 0]
        else:
            pooled = self.norm(x[:, 0])
        out["pooled"] = pooled
        logits = (pooled if self.head is None else self.head(pooled)).astype(jnp.float32)
        return (logits, out) if intermediates else logits


def initial_value(path: str, shape: tuple[int, ...], seed: int, spec: ViTSpec) -> np.ndarray:
    """The initial value of one parameter, float32: a function of (seed, path, shape) alone.

    So the same seed gives the same head whatever else is loaded or trained. Kernels are Xavier-uniform (q, k and v each
    as a square matrix), the patch kernel is LeCun-normal, tokens and positions are N(0, 0.02^2), and the head is drawn
    as ``torch.nn.Linear`` draws it: kernel and bias uniform in +-1/sqrt(d). NumPy draws, because it compiles nothing.
    """
    draw = np.random.Generator(np.random.Philox(key=[seed, zlib.crc32(path.encode())]))
    name = path.rsplit("/", 1)[-1]
    if path.startswith("head"):
        value = draw.uniform(-(spec.width**-0.5), spec.width**-0.5, shape)
    elif path == "patch_embed/kernel":
        value = draw.normal(0.0, np.prod(shape[:3]) ** -0.5, shape)
    elif name == "kernel":
        fan_out = shape[1] // 3 if "/qkv/" in path else shape[1]
        limit = (6 / (shape[0] + fan_out)) ** 0.5
        value = draw.uniform(-limit, limit, shape)
    elif name in ("pos_embed", "reg_token", "cls_token"):
        value = draw.normal(0.0, 0.02, shape)
    elif name == "scale":
        value = np.ones(shape)
    elif name == "gamma":
        value = np.full(shape, spec.layer_scale)
    else:
        value = np.zeros(shape)
    return value.astype(np.float32)


def initial_parameters(spec: ViTSpec, shapes: trees.Tree, seed: int) -> trees.Tree:
    """Draws every parameter of a tree of shapes."""
    return trees.map_paths(lambda path, leaf: initial_value(path, leaf.shape, seed, spec), shapes)
