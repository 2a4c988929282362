"""Orthogonal finetuning: what a Linear is given is rotated first. OFT (Qiu et al., arXiv 2306.07280), and BOFT (Liu et
al., arXiv 2311.06243), whose rotation is a product of butterfly factors.

A block of size k is the Cayley transform of a skew-symmetric matrix S, ``R = (I + S)(I - S)^-1``, so that it is exactly
orthogonal and the identity at S = 0. ``rank`` is the block size. Merged, the kernel is ``R @ kernel``.
"""

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx

from vitplast_jax.errors import UserError
from vitplast_jax.peft.settings import Settings
from vitplast_jax.peft.slots import plain


def cayley(upper, size: int):
    """[..., size (size - 1) / 2] entries above the diagonal, row by row -> orthogonal matrices [..., size, size]."""
    rows, columns = np.triu_indices(size, 1)
    skew = jnp.zeros((*upper.shape[:-1], size, size), upper.dtype).at[..., rows, columns].set(upper)
    skew = skew - skew.swapaxes(-1, -2)
    eye = jnp.eye(size, dtype=upper.dtype)
    # (I + S)(I - S)^-1 = (I - S)^-1 (I + S): both factors are polynomials in S.
    return jnp.linalg.solve(eye - skew, jnp.broadcast_to(eye, skew.shape) + skew)


class OftPart(nnx.Module):
    """``x -> x R`` with R block-diagonal: n / rank blocks [rank, rank]."""

    def __init__(self, n: int, m: int, rank: int, settings: Settings):
        if rank < 2 or n % rank:
            raise UserError(f"peft.rank is {rank}; OFT's block size is at least 2 and divides the width {n}")
        self.size = rank
        self.skew = nnx.Param(jnp.zeros((n // rank, rank * (rank - 1) // 2)))

    def rotate(self, x):
        """x [..., n] -> [..., n]."""
        blocks = cayley(self.skew[...].astype(jnp.float32), self.size).astype(x.dtype)
        cut = rearrange(x, "... (g i) -> ... g i", i=self.size)
        return rearrange(jnp.einsum("...gi,gij->...gj", cut, blocks), "... g j -> ... (g j)")

    def __call__(self, x, kernel, bias):
        return plain(self.rotate(x), kernel, bias)

    def merged(self, kernel, bias):
        with jax.default_matmul_precision("highest"):
            return self.rotate(jnp.eye(kernel.shape[0])) @ kernel, bias


class BoftPart(nnx.Module):
    """``x -> x B_k ... B_2 B_1`` and a scale for each output.

    A factor is block-diagonal after a permutation, as the stages of a fast Fourier transform are: B_i turns together
    half-blocks (``rank / 2`` neighbours) that stand 2^(i-1) half-blocks apart, so B_1 is OFT's rotation. There are as
    many factors as the width allows, at most four. (HF peft's order is the same up to two factors; from the third on it
    pairs the same half-blocks again.)
    """

    def __init__(self, n: int, m: int, rank: int, settings: Settings):
        if rank < 2 or rank % 2 or n % rank:
            raise UserError(f"peft.rank is {rank}; BOFT's block size is even and divides the width {n}")
        self.size, factors = rank, 1
        while n % (rank * 2**factors) == 0 and factors < 4:
            factors += 1
        self.factors = factors
        self.skew = nnx.Param(jnp.zeros((factors, n // rank, rank * (rank - 1) // 2)))
        self.scale = nnx.Param(jnp.ones((m,)))

    def rotate(self, x):
        """x [..., n] -> [..., n]."""
        blocks = cayley(self.skew[...].astype(jnp.float32), self.size).astype(x.dtype)
        for factor in reversed(range(self.factors)):
            apart = {"p": 2, "s": 2**factor, "u": self.size // 2}
            cut = rearrange(x, "... (g p s u) -> ... (g s) (p u)", **apart)
            turned = jnp.einsum("...gi,gij->...gj", cut, blocks[factor])
            x = rearrange(turned, "... (g s) (p u) -> ... (g p s u)", **apart)
        return x

    def __call__(self, x, kernel, bias):
        y = (self.rotate(x) @ kernel) * self.scale[...].astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))
        return y if bias is None else y + bias

    def merged(self, kernel, bias):
        with jax.default_matmul_precision("highest"):
            return (self.rotate(jnp.eye(kernel.shape[0])) @ kernel) * self.scale[...][None, :], bias
