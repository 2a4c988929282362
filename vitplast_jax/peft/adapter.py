"""Adapters at the MHA or the FFN of a block (Houlsby et al., arXiv 1902.00751; parallel: He et al., arXiv 2110.04366).

``a(x) = act(x down + b) up + c``. With f the sublayer (what the LayerNorm feeds, without LayerScale and residual):
after: f(x) + a(f(x)); before: f(x + a(x)); parallel: f(x) + a(x).
"""

import jax
import jax.numpy as jnp
from flax import nnx

from vitplast_jax.errors import UserError
from vitplast_jax.models import layers
from vitplast_jax.peft.pairs import make_pair
from vitplast_jax.peft.settings import Settings


class Adapter(nnx.Module):
    """One adapter of width d and hidden width ``rank``; GELU is the exact one."""

    def __init__(self, d: int, rank: int, settings: Settings, place: int):
        self.pair = make_pair(d, d, rank, settings)
        self.down_bias = nnx.Param(jnp.zeros((rank,))) if settings.bias else nnx.data(None)
        self.up_bias = nnx.Param(jnp.zeros((d,))) if settings.bias else nnx.data(None)
        self.position, self.activation = settings.position, settings.activation
        self.dropout, self.place = settings.dropout, place

    def __call__(self, x, keys=None):
        """What is added: x [b, n, d] -> [b, n, d]."""

        def activate(hidden):
            hidden = hidden if self.activation == "none" else jax.nn.gelu(hidden, approximate=False)
            return layers.dropout(hidden, keys, self.place, self.dropout)

        delta = self.pair.branch(x, None if self.down_bias is None else self.down_bias[...], activate)
        return delta if self.up_bias is None else delta + self.up_bias[...].astype(x.dtype)

    def before(self, x, keys=None):
        """What the sublayer is given instead of x."""
        return x + self(x, keys) if self.position == "before" else x

    def after(self, x, y, keys=None):
        """What stands for the sublayer's result y on x."""
        if self.position == "before":
            return y
        return y + self(y if self.position == "after" else x, keys)

    def matrix(self):
        """The matrix [d, d] and the shift [d] (or None) that this adapter multiplies with and adds, in float32.

        Raises:
          UserError: it is not linear, or in parallel to a sublayer that is not.
        """
        if self.activation != "none":
            raise UserError("an adapter with a GELU cannot be merged into plain kernels: it is not linear")
        if self.position == "parallel":
            raise UserError("a parallel adapter cannot be merged: what it stands beside is not linear")
        left, right, diagonal = self.pair.factors()
        matrix = jnp.eye(left.shape[0]) + jnp.matmul(left, right, precision="highest")
        if diagonal is not None:
            place = jnp.arange(1, 1 + diagonal.size)
            matrix = matrix.at[place, place].add(diagonal)
        if self.up_bias is None:
            return matrix, None
        down, up = self.pair.matrices()
        return matrix, self.up_bias[...] + jnp.matmul(self.down_bias[...], up[: self.down_bias.shape[0]])
