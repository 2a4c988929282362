"""The Vision Transformer (arXiv 2010.11929) in the variants of DeiT, MAE, DINOv2 and DINOv3.

Class token, distillation token, registers or none; learned or rotary positions; LayerScale; SwiGLU; four ways to pool.

In: images [b, height, width, c], float, normalised. Out: logits [b, classes] in float32, or pooled features.
"""

import zlib

import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx

from vitplast_jax import trees
from vitplast_jax.errors import UserError
from vitplast_jax.models import layers
from vitplast_jax.models.specs import Spec, ViTSpec


class PatchEmbed(nnx.Module):
    """Cuts images into patches and projects each; kernel [patch height, patch width, c, d], as a convolution's."""

    def __init__(self, spec: ViTSpec):
        self.kernel = nnx.Param(jnp.zeros((*spec.patch_size, spec.in_chans, spec.width)))
        self.bias = nnx.Param(jnp.zeros((spec.width,)))

    def __call__(self, images):
        kernel = self.kernel[...]
        height, width = kernel.shape[:2]
        patches = rearrange(images, "b (i p) (j q) c -> b (i j) (p q c)", p=height, q=width)
        return layers.product(patches, rearrange(kernel, "p q c d -> (p q c) d"), self.bias[...])


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
        self.dist_token = nnx.Param(jnp.zeros((1, 1, d))) if spec.distilled else nnx.data(None)
        self.reg_token = nnx.Param(jnp.zeros((1, spec.registers, d))) if spec.registers else nnx.data(None)
        self.pos_embed = nnx.Param(jnp.zeros((1, spec.positions, d))) if spec.pos_embed else nnx.data(None)
        self.blocks = nnx.List(
            layers.Block(
                index,
                d,
                spec.hidden,
                spec.heads,
                gelu=spec.gelu,
                eps=spec.eps,
                drop=spec.drop_rate,
                drop_path=rate,
                layer_scale=spec.layer_scale,
                gated=spec.gated,
                qkv_bias=spec.qkv_bias,
                key_bias=spec.key_bias,
                rope=spec.rope,
                grid=spec.grid,
            )
            for index, rate in enumerate(layers.drop_path_rates(spec))
        )
        self.norm = layers.LayerNorm(d, spec.eps)
        self.head = layers.Linear(spec.features, spec.num_classes) if spec.num_classes else nnx.data(None)
        two = spec.num_classes and spec.pool == "distilled"
        self.head_dist = layers.Linear(d, spec.num_classes) if two else nnx.data(None)

    def embed(self, images, keys=None):
        """Returns the embedding output [b, n, d]: class and distillation token, registers, patches, plus positions."""
        expected = (*self.spec.img_size, self.spec.in_chans)
        if images.ndim != 4 or images.shape[1:] != expected:
            raise UserError(f"{self.spec.name} takes images [b, {', '.join(map(str, expected))}], not {images.shape}")
        x = self.patch_embed(images)
        prefix = [
            layers.repeated(token[...], x.shape[0], x.dtype)
            for token in (self.cls_token, self.dist_token, self.reg_token)
            if token is not None
        ]
        x = jnp.concatenate([*prefix, x], axis=1)
        if self.pos_embed is not None:
            # Tokens before the patches that have no row of their own get zeros.
            rows, bare = self.spec.prefix_rows, self.spec.prefix - self.spec.prefix_rows
            positions = self.pos_embed[...]
            if bare:
                none = jnp.zeros((1, bare, positions.shape[-1]), positions.dtype)
                positions = jnp.concatenate([positions[:, :rows], none, positions[:, rows:]], axis=1)
            x = x + layers.repeated(positions, x.shape[0], x.dtype)
        return layers.dropout(x, keys, layers.FIRST_PLACE, self.spec.drop_rate)

    def __call__(self, images, key=None, *, intermediates: bool = False, remat: str = "none", loops=()):
        """Returns logits [b, classes] in float32 (features [b, d] without a head), or (logits, out).

        Args:
          images: [b, height, width, c], normalised, in the dtype to compute in.
          key: None for a deterministic pass; else a key, or [b] keys (one an example), for dropout and drop-path.
          intermediates: also return ``out``: "embedding", "blocks" (a list with every component's output), "norm" and
            "pooled".
          remat: what the backward pass recomputes instead of keeping it, a name in :data:`layers.REMAT`.
          loops: as of :func:`layers.run_blocks`; without intermediates.
        """
        keys = layers.example_keys(key, images.shape[0])
        x, out = layers.run_blocks(self.blocks, self.embed(images, keys), keys, intermediates, remat, loops)
        norm, pooled = self._pool(x, whole=intermediates)
        out |= {"norm": norm, "pooled": pooled}
        if self.head is None:
            logits = pooled
        elif self.head_dist is None:
            logits = self.head(pooled)
        else:
            logits = (self.head(norm[:, 0]) + self.head_dist(norm[:, 1])) / 2
        logits = logits.astype(jnp.float32)
        return (logits, out) if intermediates else logits

    def _pool(self, x, whole: bool):
        """(the final norm's output, what the head reads [b, features]); ``whole``: the norm of unread tokens too."""
        spec, start = self.spec, x.shape[1] - self.spec.patches
        if spec.norm_on == "pooled":
            norm = self.norm(x[:, start:].mean(1))
            return norm, norm
        if not whole and spec.pool in ("token", "distilled"):
            x = x[:, : 1 + spec.distilled]
        norm = self.norm(x)
        if spec.pool == "token":
            return norm, norm[:, 0]
        if spec.pool == "distilled":
            return norm, norm[:, :2].mean(1)
        mean = norm[:, start:].mean(1)
        return norm, mean if spec.pool == "avg" else jnp.concatenate([norm[:, 0], mean], -1)


def initial_value(path: str, shape: tuple[int, ...], seed: int, spec: Spec) -> np.ndarray:
    """The initial value of one parameter, float32: a function of (seed, path, shape) alone.

    So the same seed gives the same head whatever else is loaded or trained. Kernels are Xavier-uniform (q, k and v each
    as a square matrix), the patch kernel is LeCun-normal, tokens and positions are N(0, 0.02^2), and the head is drawn
    as ``torch.nn.Linear`` draws it: kernel and bias uniform in +-1/sqrt(d). NumPy draws, because it compiles nothing.
    """
    draw = np.random.Generator(np.random.Philox(key=[seed, zlib.crc32(path.encode())]))
    name = path.rsplit("/", 1)[-1]
    if path.startswith("head"):
        fan_in = spec.width if path.startswith("head_dist") else spec.features
        value = draw.uniform(-(fan_in**-0.5), fan_in**-0.5, shape)
    elif path == "patch_embed/kernel":
        value = draw.normal(0.0, np.prod(shape[:3]) ** -0.5, shape)
    elif name == "kernel":
        fan_out = shape[1] // 3 if "/qkv/" in path else shape[1]
        limit = (6 / (shape[0] + fan_out)) ** 0.5
        value = draw.uniform(-limit, limit, shape)
    elif name in ("pos_embed", "cls_token", "dist_token", "reg_token", "wte", "wpe"):
        value = draw.normal(0.0, 0.02, shape)
    elif name == "scale":
        value = np.ones(shape)
    elif name == "gamma":
        value = np.full(shape, spec.layer_scale)
    else:
        value = np.zeros(shape)
    return value.astype(np.float32)


def initial_parameters(spec: Spec, shapes: trees.Tree, seed: int) -> trees.Tree:
    """Draws every parameter of a tree of shapes."""
    return trees.map_paths(lambda path, leaf: initial_value(path, leaf.shape, seed, spec), shapes)
