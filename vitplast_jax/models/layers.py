"""The layers that every family shares: Linear and LayerNorm with one slot each, Attention, Mlp, Block.

In and out: token tensors [b, n, d]. The compute dtype is the dtype of the tokens: parameters are cast to it where they
are used, while LayerNorm and the softmax work in float32. Each layer can be called alone.

A slot is empty (None) or a module with ``__call__(x, kernel, bias, keys=None) -> y`` (keys, one an example, where
something is drawn) and ``merged(kernel, bias) -> (kernel, bias)``; that of qkv also gives y in thirds by ``pieces``.
Parameter-efficient methods sit there, and the paths of the base parameters stay as they are.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx

from vitplast_jax.models import scan
from vitplast_jax.models.attention import attend
from vitplast_jax.models.specs import Rope

# Where a random draw happens is part of its key: fold_in(example's key, place). Places below 16 belong to the data.
FIRST_PLACE = 16
_PLACES_PER_BLOCK = 8


# What the backward pass recomputes. "block": everything within a block; "dots": all but the products of a block.
REMAT = {
    "none": None,
    "block": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


def rematerialised(function, policy: str):
    """The function, with the activations of its backward pass kept or recomputed as a name in :data:`REMAT` says."""
    return function if REMAT[policy] is None else jax.checkpoint(function, policy=REMAT[policy])


def product(x, kernel, bias=None, axes: int = 1):
    """``x @ kernel + bias`` in the dtype of x [..., d_in]; ``axes`` of x and the kernel are summed over.

    The gradients of kernel and bias are summed, over tokens, images and devices, in the parameters' own dtype: float32
    for what trains (decision 8), where plain differentiation would sum them in bfloat16 if x is.
    """
    if x.dtype == kernel.dtype:  # nothing to do by hand; and forward-mode derivatives stay possible
        y = jnp.tensordot(x, kernel, axes)
        return y if bias is None else y + bias.astype(x.dtype)
    return _mixed_product(x, kernel, bias, axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _mixed_product(x, kernel, bias, axes):
    y = jnp.tensordot(x, kernel.astype(x.dtype), axes)
    return y if bias is None else y + bias.astype(x.dtype)


def _mixed_forward(x, kernel, bias, axes):
    return _mixed_product(x, kernel, bias, axes), (x, kernel, bias)


def _mixed_backward(axes, kept, gradient):
    x, kernel, bias = kept
    places, made = tuple(range(x.ndim - axes)), kernel.ndim - axes
    after = tuple(range(gradient.ndim - made, gradient.ndim)), tuple(range(axes, kernel.ndim))
    of_x = jnp.tensordot(gradient, kernel.astype(gradient.dtype), after)
    of_kernel = jnp.tensordot(x, gradient, (places, places), preferred_element_type=kernel.dtype)
    of_bias = None if bias is None else gradient.astype(bias.dtype).sum(places)
    return of_x, of_kernel, of_bias


_mixed_product.defvjp(_mixed_forward, _mixed_backward)


def repeated(table, rows: int, dtype):
    """A table [1, ...] in this dtype for each of so many rows; its gradient is summed in its own dtype, as above."""
    if table.dtype == dtype:
        return jnp.broadcast_to(table, (rows, *table.shape[1:]))
    return _repeated(table, rows, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _repeated(table, rows, dtype):
    return jnp.broadcast_to(table.astype(dtype), (rows, *table.shape[1:]))


_repeated.defvjp(
    lambda table, rows, dtype: (_repeated(table, rows, dtype), table[:0]),
    lambda rows, dtype, kept, gradient: (gradient.astype(kept.dtype).sum(0, keepdims=True),),
)


class Linear(nnx.Module):
    """``y = x @ kernel + bias``, kernel [d_in, d_out].

    ``bias_mask``: a 0 or 1 for each of as many equal parts of the bias; the parts at 0 are not used (and get no
    gradient).
    """

    def __init__(self, d_in: int, d_out: int, use_bias: bool = True, bias_mask: tuple[int, ...] | None = None):
        self.kernel = nnx.Param(jnp.zeros((d_in, d_out)))
        self.bias = nnx.Param(jnp.zeros((d_out,))) if use_bias else nnx.data(None)
        self.bias_mask = bias_mask
        self.slot = nnx.data(None)

    def used_bias(self):
        """The bias [d_out] without its masked parts; None where there is none."""
        bias = None if self.bias is None else self.bias[...]
        if bias is None or self.bias_mask is None:
            return bias
        return jnp.where(np.repeat(self.bias_mask, len(bias) // len(self.bias_mask)), bias, jnp.zeros((), bias.dtype))

    def __call__(self, x, keys=None):
        kernel, bias = self.kernel[...], self.used_bias()
        if self.slot is not None:
            kernel, bias = kernel.astype(x.dtype), None if bias is None else bias.astype(x.dtype)
            return self.slot(x, kernel, bias) if keys is None else self.slot(x, kernel, bias, keys)
        return product(x, kernel, bias)

    def of_heads(self, x):
        """The same for x [..., h, k] whose two last axes make d_in; for an empty slot."""
        return product(x, rearrange(self.kernel[...], "(h k) d -> h k d", h=x.shape[-2]), self.used_bias(), 2)


class LayerNorm(nnx.Module):
    """Layer normalisation over the last axis, its statistics in float32 whatever the dtype of ``x``.

    The variance takes two passes. Of a 16-bit ``x`` one will do, which spares a TPU a reading of all tokens: where the
    mean is so large that float32 loses the variance of its square, the rounding of ``x`` itself has changed it more.
    """

    def __init__(self, d: int, eps: float):
        self.scale = nnx.Param(jnp.ones((d,)))
        self.bias = nnx.Param(jnp.zeros((d,)))
        self.eps = eps
        self.slot = nnx.data(None)

    def __call__(self, x):
        x32 = x.astype(jnp.float32)
        mean = x32.mean(-1, keepdims=True)
        centred = x32 - mean
        if x.dtype.itemsize == 2:
            variance = jnp.maximum(jnp.square(x32).mean(-1, keepdims=True) - jnp.square(mean), 0)
        else:
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
    """Multi-head self-attention with its output projection; the fused kernel's columns are q | k | v, head-major.

    Args:
      key_bias: False leaves the keys' third of the bias unused.
      causal: a token sees those before it and itself (GPT-2).
      rope, grid: rotary positions of the last ``grid[0] * grid[1]`` tokens, the patches; tokens before are not turned.
    """

    def __init__(
        self,
        d: int,
        heads: int,
        qkv_bias: bool = True,
        *,
        key_bias: bool = True,
        causal: bool = False,
        rope: Rope | None = None,
        grid: tuple[int, int] | None = None,
    ):
        self.heads, self.causal, self.rope, self.grid = heads, causal, rope, grid
        self.qkv = Linear(d, 3 * d, qkv_bias, None if key_bias else (1, 0, 1))
        self.out = Linear(d, d)

    def project(self, x, keys=None):
        """Queries, keys and values of tokens [..., n, d]: three of [..., n, h, k]."""
        # Three products with the thirds of the kernel: cutting up the result of one costs a TPU copies of it.
        kernels = jnp.split(self.qkv.kernel[...], 3, axis=-1)
        biases = [None] * 3 if self.qkv.bias is None else jnp.split(self.qkv.used_bias(), 3)
        if self.qkv.slot is None and x.dtype.itemsize == 2:
            # Straight into heads, so that the TPU compiler lays out what the products give as attention reads it.
            kernels = [rearrange(kernel, "d (h k) -> d h k", h=self.heads) for kernel in kernels]
            biases = [None if bias is None else rearrange(bias, "(h k) -> h k", h=self.heads) for bias in biases]
            return [product(x, kernel, bias) for kernel, bias in zip(kernels, biases, strict=True)]
        if self.qkv.slot is None:
            parts = [product(x, kernel, bias) for kernel, bias in zip(kernels, biases, strict=True)]
        else:
            kernels, biases = jax.tree.map(lambda leaf: leaf.astype(x.dtype), (kernels, biases))
            parts = self.qkv.slot.pieces(x, kernels, biases, keys)
        return [rearrange(part, "... n (h k) -> ... n h k", h=self.heads) for part in parts]

    def __call__(self, x, keys=None):
        q, k, v = self.project(x, keys)
        if self.rope is not None:
            q, k = (turn_patches(part, *rope_table(self.rope, self.grid, part.shape[-1])) for part in (q, k))
        q = q * q.shape[-1] ** -0.5
        if x.dtype.itemsize == 2:
            mixed = attend(q, k, v, self.causal)
            if self.out.slot is None:
                return self.out.of_heads(mixed)
        else:
            # Heads first, in memory too: the CPU's products of strided heads take up to three times as long.
            q, k, v = jax.lax.optimization_barrier([rearrange(part, "... n h k -> ... h n k") for part in (q, k, v)])
            scores = jnp.einsum("...nk,...mk->...nm", q, k)
            if self.causal:
                scores = jnp.where(np.tri(x.shape[-2], dtype=bool), scores, -jnp.inf)
            weights = jax.nn.softmax(scores, axis=-1)
            mixed = rearrange(jnp.einsum("...nm,...mk->...nk", weights, v), "... h n k -> ... n h k")
        return self.out(rearrange(mixed, "... n h k -> ... n (h k)"), keys)


@functools.lru_cache(maxsize=8)
def rope_table(rope: Rope, grid: tuple[int, int], k: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine [grid patches, k] float32 of every patch and channel of a head of width k; see :class:`Rope`."""
    dtype = np.dtype(rope.dtype)
    periods = np.asarray(rope.theta, np.float32) ** (np.arange(k // 4, dtype=np.float32) * np.float32(4 / k))
    periods = periods.astype(rope.periods).astype(dtype)
    middles = [
        (2 * ((np.arange(side) + 0.5).astype(dtype) / np.asarray(side, dtype)) - np.asarray(1, dtype)) for side in grid
    ]
    places = np.stack(np.meshgrid(*middles, indexing="ij"), -1).reshape(-1, 2, 1)
    angles = (np.asarray(2 * np.pi, dtype) * places / periods).reshape(len(places), k // 2).astype(dtype)
    return tuple(np.tile(turn(angles).astype(np.float32), (1, 2)) for turn in (np.cos, np.sin))


def turn_patches(x, cosine, sine):
    """Rotary positions for the last tokens of x [..., n, h, k], as many as the tables [patches, k] have; in float32."""
    before, patches = x[..., : -len(sine), :, :], x[..., -len(sine) :, :, :].astype(jnp.float32)
    first, second = jnp.split(patches, 2, axis=-1)
    turned = patches * cosine[:, None] + jnp.concatenate([-second, first], -1) * sine[:, None]
    return jnp.concatenate([before, turned.astype(x.dtype)], axis=-3)


class Mlp(nnx.Module):
    """``fc2(gelu(fc1(x)))``, or SwiGLU (arXiv 2002.05202): ``fc2(silu(gate(x)) * fc1(x))``.

    ``gelu`` is "erf" (timm, HF) or "tanh" (the original JAX code, GPT-2).
    """

    def __init__(self, d: int, hidden: int, gelu: str, gated: bool = False):
        self.gate = Linear(d, hidden) if gated else nnx.data(None)
        self.fc1 = Linear(d, hidden)
        self.fc2 = Linear(hidden, d)
        self.gelu = gelu

    def activate(self, fc1, x=None):
        """What fc2 receives, from fc1's output and (for the gate) the input of the whole."""
        if self.gate is not None:
            return jax.nn.silu(self.gate(x)) * fc1
        return jax.nn.gelu(fc1, approximate=self.gelu == "tanh")

    def __call__(self, x):
        return self.fc2(self.activate(self.fc1(x), x))


class Block(nnx.Module):
    """A pre-norm Transformer block: ``x += ls1(mha(ln1(x)))``, then ``x += ls2(mlp(ln2(x)))``.

    ``attention``: further arguments of :class:`Attention`.
    """

    def __init__(
        self,
        index: int,
        d: int,
        hidden: int,
        heads: int,
        *,
        gelu,
        eps,
        drop,
        drop_path,
        layer_scale=None,
        gated=False,
        **attention,
    ):
        self.norm1 = LayerNorm(d, eps)
        self.attn = Attention(d, heads, **attention)
        self.ls1 = nnx.data(None) if layer_scale is None else LayerScale(d, layer_scale)
        self.norm2 = LayerNorm(d, eps)
        self.mlp = Mlp(d, hidden, gelu, gated)
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
        received = norm2 if adapter is None else adapter.before(norm2, keys)
        fc1 = self.mlp.fc1(received, keys)
        act = self._dropped(self.mlp.activate(fc1, received), keys, 2)
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


def drop_path_rates(spec) -> list[float]:
    """Stochastic depth rises linearly from 0 at the first block to its full rate at the last."""
    return [spec.drop_path_rate * index / max(spec.depth - 1, 1) for index in range(spec.depth)]


def example_keys(key, count: int):
    """A key for each of ``count`` examples: of one key, of as many as there are, or None of None."""
    if key is None or key.ndim:
        return key
    return jax.vmap(lambda index: jax.random.fold_in(key, index))(jnp.arange(count))


def run_blocks(blocks, x, keys, intermediates: bool, remat: str, loops: tuple[int, ...] = ()):
    """Returns (tokens after the last block, {"embedding": x, "blocks": what every component gave, if asked for}).

    ``loops``: of :func:`vitplast_jax.models.scan.loops`, lengths of runs of blocks each of which becomes a loop.
    """
    out = {"embedding": x, "blocks": []}
    if loops:
        remaining = iter(blocks)
        for length in loops:
            run = list(itertools.islice(remaining, length))
            x = scan.run_loop(run, x, keys, lambda function: rematerialised(function, remat))
        return x, out
    for block in blocks:
        if intermediates:
            x, parts = block(x, keys, intermediates=True)
            out["blocks"].append(parts)
        else:
            x = rematerialised(lambda x, block=block: block(x, keys), remat)(x)
    return x, out


def dropout(x, keys, place: int, rate: float, shape: tuple[int, ...] | None = None):
    """Zeroes entries of x [b, ...] with probability ``rate`` and rescales the rest.

    Args:
      x: [b, ...].
      keys: [b], one key an example, so that the draw does not depend on how a batch is cut up; None switches it off.
      place: which draw of the example this is.
      shape: of one example's mask, by default ``x.shape[1:]``; ones there give drop-path.
    """
    if keys is None or (isinstance(rate, float) and rate == 0.0):  # in a loop over blocks the rate is an array
        return x
    shape = x.shape[1:] if shape is None else shape
    keep = jax.vmap(lambda key: jax.random.bernoulli(jax.random.fold_in(key, place), 1.0 - rate, shape))(keys)
    return jnp.where(keep, x / jnp.asarray(1.0 - rate, x.dtype), jnp.zeros((), x.dtype))
