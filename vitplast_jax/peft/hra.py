"""HRA: a chain of Householder reflections in front of a Linear (Yuan et al., arXiv 2405.17484).

``x -> x H_r ... H_2 H_1`` with ``H_i = I - 2 u_i u_i^T / ||u_i||^2``; ``rank`` is r, an even number, and the
reflections start in equal pairs, which cancel. A zero vector reflects nothing.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from vitplast_jax.errors import UserError
from vitplast_jax.peft.ao import normalized
from vitplast_jax.peft.settings import Settings
from vitplast_jax.peft.slots import plain


class HraPart(nnx.Module):
    """``reflections`` [n, rank], one vector a column."""

    def __init__(self, n: int, m: int, rank: int, settings: Settings):
        if rank % 2:
            raise UserError(f"peft.rank is {rank}; HRA starts with pairs of reflections: take an even number")
        self.reflections = nnx.Param(jnp.zeros((n, rank)))

    def reflect(self, x):
        """x [..., n] -> [..., n]."""
        units = jax.vmap(normalized, in_axes=1)(self.reflections[...]).astype(x.dtype)
        for unit in units[::-1]:
            along = x @ unit[:, None]
            x = x - 2 * along * unit.reshape((1,) * (x.ndim - 1) + unit.shape)
        return x

    def __call__(self, x, kernel, bias):
        return plain(self.reflect(x), kernel, bias)

    def merged(self, kernel, bias):
        with jax.default_matmul_precision("highest"):
            return self.reflect(jnp.eye(kernel.shape[0])) @ kernel, bias
