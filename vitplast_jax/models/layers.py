"""The layers that every family shares: Linear and LayerNorm with one slot each, Attention, Mlp, Block.

In and out: token tensors [b, n, d]. The compute dtype is the dtype of the tokens: parameters are cast to it where they
are used, while LayerNorm and the softmax work in float32. Each layer can be called alone.

A slot is empty (None) or a module with ``__call__(x, kernel, bias, keys=None) -> y`` (keys, one an example, where
something is drawn) and ``merged(kernel, bias) -> (kernel, bias)``; parameter-efficient methods sit there, and the paths
of the base parameters stay as they are.
"""

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx

# Where a random draw happens is part of its key: fold_in(example's key, place). Places below 16 belong to the data.
FIRST_PLACE = 16
_PLACES_PER_BLOCK = 8


class Linear(nnx.Module):
    """``y = x @ kernel + bias``, kernel [d_in, d_out]."""

    def __init__(self, d_in: int, d_out: int, use_bias: bool = True):
        self.kernel = nnx.Param(jnp.zeros((d_in, d_out)))
        self.bias = nnx.Param(jnp.zeros((d_out,))) if use_bias else nnx.data(None)
        self.slot = nnx.data(None)

    def __call__(self, x, keys=None):
        kernel = self.kernel[...].astype(x.dtype)
        bias = None if self.bias is None else self.bias[...].astype(x.dtype)
        if self.slot is not None:
            return self.slot(x, kernel, bias) if keys is None else self.slot(x, kernel, bias, keys)
        y = x @ kernel
        return y if bias is None else y + bias


class LayerNorm(nnx.Module):
    """Layer normalisation over the last axis, two-pass variance in float32 whatever the dtype of ``x``."""

    def __init__(self, d: int, eps: float):
        self.scale = nnx.Param(jnp.ones((d,)))
        self.bias = nnx.Param(jnp.zeros((d,)))
        self.eps = eps
        self.slot = nnx.data(None)

    def __call__(self, x):
        x32 = x.astype(jnp.float32)
        centred = x32 - x32.mean(-1, keepdims=True)
        variance = jnp.square(centred).mean(-1, keepdims=True)
        normal = centred * jax.lax.rsqrt(variance + self.eps)
        scale, bias = self.scale[...].astype(jnp.float32), self.bias[...].astype(jnp.float32)
        y = self.slot(normal, scale, bias) if self.slot is not None else normal * scale + bias
        return y.astype(x.dtype)


class LayerScale(nnx.Module):
    """``gamma * x``, one factor a channel."""

    def __init__(self, d: int, value: float):
        self.gamma = nnx.Param(jnp.full((d,), value))

    def __call__(self, x):
        return x * self.gamma[...].astype(x.dtype)


class Attention(nnx.Module):
    """Multi-head self-attention with its output projection; the fused kernel's columns are q | k | v, head-major."""

    def __init__(self, d: int, heads: int, qkv_bias: bool = True):
        self.heads = heads
        self.qkv = Linear(d, 3 * d, qkv_bias)
        self.out = Linear(d, d)

    def __call__(self, x, keys=None):
        q, k, v = rearrange(self.qkv(x, keys), "... n (three h k) -> three ... n h k", three=3, h=self.heads)
        scale = q.shape[-1] ** -0.5
        scores = jnp.einsum("...nhk,...mhk->...hnm", q * scale, k, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
        mixed = jnp.einsum("...hnm,...mhk->...nhk", weights, v)
        return self.out(rearrange(mixed, "... n h k -> ... n (h k)"), keys)


class Mlp(nnx.Module):
    """``fc2(gelu(fc1(x)))``; ``gelu`` is "erf" (timm, HF) or "tanh" (the original JAX code, GPT-2)."""

    def __init__(self, d: int, hidden: int, gelu: str):
        self.fc1 = Linear(d, hidden)
        self.fc2 = Linear(hidden, d)
        self.gelu = gelu

    def activate(self, x):
        return jax.nn.gelu(x, approximate=self.gelu == "tanh")

    def __call__(self, x):
        return self.fc2(self.activate(self.fc1(x)))


class Block(nnx.Module):
    """A pre-norm Transformer block: ``x += ls1(mha(ln1(x)))``, then ``x += ls2(fc2(gelu(fc1(ln2(x)))))``."""

    def __init__(
        self, index: int, d: int, hidden: int, heads: int, *, qkv_bias, gelu, eps, layer_scale, drop, drop_path
    ):
        self.norm1 = LayerNorm(d, eps)
        self.attn = Attention(d, heads, qkv_bias)
        self.ls1 = nnx.data(None) if layer_scale is None else LayerScale(d, layer_scale)
        self.norm2 = LayerNorm(d, eps)
        self.mlp = Mlp(d, hidden, gelu)
        self.ls2 = nnx.data(None) if layer_scale is None else LayerScale(d, layer_scale)
        self.prompt, self.adapter_mha, self.adapter_ffn = nnx.data(None), nnx.data(None), nnx.data(None)  # slots
        self.drop, self.drop_path = drop, drop_path
        self.first_place = FIRST_PLACE + _PLACES_PER_BLOCK * (1 + index)

    def __call__(self, x, keys=None, intermediates: bool = False):
        """Returns y, or (y, out) with every component's output; ``keys`` [b] switch dropout and drop-path on."""
        if self.prompt is not None:
            x = self.prompt(x, keys)
        norm1 = self.norm1(x)
        adapter = self.adapter_mha
        mha = self.attn(norm1 if adapter is None else adapter.before(norm1, keys), keys)
        mha = mha if adapter is None else adapter.after(norm1, mha, keys)
        branch = mha if self.ls1 is None else self.ls1(mha)
        mid = x + self._dropped_path(self._dropped(branch, keys, 0), keys, 1)
        norm2 = self.norm2(mid)
        adapter = self.adapter_ffn
        fc1 = self.mlp.fc1(norm2 if adapter is None else adapter.before(norm2, keys), keys)
        act = self._dropped(self.mlp.activate(fc1), keys, 2)
        fc2 = self.mlp.fc2(act, keys)
        fc2 = fc2 if adapter is None else adapter.after(norm2, fc2, keys)
        branch = fc2 if self.ls2 is None else self.ls2(fc2)
        y = mid + self._dropped_path(self._dropped(branch, keys, 3), keys, 4)
        if not intermediates:
            return y
        out = {"input": x, "norm1": norm1, "mha": mha, "mid": mid, "norm2": norm2, "fc1": fc1, "act": act, "fc2": fc2}
        return y, out | {"output": y}

    def _dropped(self, x, keys, place):
        return dropout(x, keys, self.first_place + place, self.drop)

    def _dropped_path(self, x, keys, place):
        return dropout(x, keys, self.first_place + place, self.drop_path, shape=(1, 1))


def dropout(x, keys, place: int, rate: float, shape: tuple[int, ...] | None = None):
    """Zeroes entries of x [b, ...] with probability ``rate`` and rescales the rest.

    Args:
      x: [b, ...].
      keys: [b], one key an example, so that the draw does not depend on how a batch is cut up; None switches it off.
      place: which draw of the example this is.
      shape: of one example's mask, by default ``x.shape[1:]``; ones there give drop-path.
    """
    if keys is None or rate == 0.0:
        return x
    shape = x.shape[1:] if shape is None else shape
    keep = jax.vmap(lambda key: jax.random.bernoulli(jax.random.fold_in(key, place), 1.0 - rate, shape))(keys)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros((), x.dtype))
