"""SSF: every output of a layer is scaled and shifted (Lian et al., arXiv 2210.08823): ``y scale + shift``.

Behind a Linear or a LayerNorm; merged into its weight and bias, so that it costs nothing afterwards.
"""

import jax.numpy as jnp
from flax import nnx

from vitplast_jax.peft.settings import Settings
from vitplast_jax.peft.slots import plain


class SsfPart(nnx.Module):
    """``scale`` and ``shift`` [m], 1 and 0 at the start."""

    def __init__(self, n: int, m: int, rank: int, settings: Settings):
        self.scale = nnx.Param(jnp.ones((m,)))
        self.shift = nnx.Param(jnp.zeros((m,)))

    def __call__(self, x, kernel, bias):
        row = (1,) * (x.ndim - 1) + (-1,)
        scale, shift = (leaf[...].astype(x.dtype).reshape(row) for leaf in (self.scale, self.shift))
        return plain(x, kernel, bias) * scale + shift

    def merged(self, kernel, bias):
        shift = self.shift[...] if bias is None else bias * self.scale[...] + self.shift[...]
        return kernel * self.scale[...][None, :], shift


class SsfNorm(nnx.Module):
    """The same behind a LayerNorm: ``(normal scale_ln + bias_ln) scale + shift`` in float32."""

    def __init__(self, d: int):
        self.scale = nnx.Param(jnp.ones((d,)))
        self.shift = nnx.Param(jnp.zeros((d,)))

    def __call__(self, normal, scale, bias):
        row = (1,) * (normal.ndim - 1) + (-1,)
        scale, bias = self.merged(scale, bias)
        return normal * scale.reshape(row) + bias.reshape(row)

    def merged(self, scale, bias):
        """The LayerNorm's own scale and bias that do the same."""
        return scale * self.scale[...], bias * self.scale[...] + self.shift[...]
