"""HTA: a change of a kernel whose left and right bases are Householder reflectors, with free values between them (Dong
et al., arXiv 2410.22952): ``delta = H(u) diag(s) H(w)``, ``H(u) = I - 2 u u^T / ||u||^2``.

In place of LoRA's fixed rank: s [min(n, m)] decides the rank and starts at 0. O(n + m) a token.
"""

import jax.numpy as jnp
from flax import nnx

from vitplast_jax.peft.ao import normalized
from vitplast_jax.peft.settings import Settings


class HtaPart(nnx.Module):
    """``left/reflector`` u [n], ``values`` s [min(n, m)] and ``right/reflector`` w [m]."""

    def __init__(self, n: int, m: int, rank: int, settings: Settings):
        self.left, self.right = Reflector(n), Reflector(m)
        self.values = nnx.Param(jnp.zeros((min(n, m),)))

    def delta(self, x):
        """x [..., n] -> [..., m]."""
        values = self.values[...].astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))
        middle = self.left(x)[..., : values.size] * values
        beside = self.right.reflector.shape[0] - values.size
        return self.right(jnp.pad(middle, [*[(0, 0)] * (x.ndim - 1), (0, beside)]))

    def merged(self, kernel, bias):
        return kernel + self.delta(jnp.eye(kernel.shape[0])), bias


class Reflector(nnx.Module):
    """``x -> x - 2 (x . u) u / ||u||^2``; a zero vector reflects nothing."""

    def __init__(self, n: int):
        self.reflector = nnx.Param(jnp.zeros((n,)))

    def __call__(self, x):
        unit = normalized(self.reflector[...]).astype(x.dtype)
        along = jnp.matmul(x, unit[:, None], precision="highest")
        return x - 2 * along * unit.reshape((1,) * (x.ndim - 1) + unit.shape)
