"""LoRA (Hu et al., arXiv 2106.09685) on any Linear or on parts of a fused one; free, or AO (arXiv 2507.13260).

``y = x W + b + (alpha / rank) x down up``. All parts of a fused kernel are projected down in one product.
"""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from vitplast_jax.peft.pairs import make_pair
from vitplast_jax.peft.settings import Settings
from vitplast_jax.peft.slots import Additive


class LoraPart(nnx.Module):
    """One pair n -> rank -> m and its factor alpha / rank."""

    def __init__(self, n: int, m: int, rank: int, settings: Settings):
        self.pair = make_pair(n, m, rank, settings)
        self.factor = (settings.alpha or rank) / rank

    def factors(self):
        """left [n, k], right [k, m] and diagonal [rank - 1] (or None), alpha included; float32."""
        left, right, diagonal = self.pair.factors()
        return left, right * self.factor, None if diagonal is None else diagonal * self.factor

    def matrices(self):
        """down [n, k] and up [k, m] whose product is the delta: what other libraries can hold."""
        down, up = self.pair.matrices()
        return down, up * self.factor

    def merged(self, kernel, bias):
        left, right, diagonal = self.factors()
        kernel = kernel + jnp.matmul(left, right, precision="highest")
        if diagonal is not None:
            place = jnp.arange(1, 1 + diagonal.size)
            kernel = kernel.at[place, place].add(diagonal)
        return kernel, bias


class LoraSlot(Additive):
    """The parts of one Linear."""

    def deltas(self, x):
        factors = [part.factors() for part, _, _ in self.parts]
        narrow = x @ jnp.concatenate([left for left, _, _ in factors], axis=1).astype(x.dtype)
        ends = np.cumsum([left.shape[1] for left, _, _ in factors])
        results = []
        for (left, right, diagonal), end in zip(factors, ends, strict=True):
            delta = narrow[..., end - left.shape[1] : end] @ right.astype(x.dtype)
            if diagonal is not None:
                row = diagonal.astype(x.dtype).reshape((1,) * (x.ndim - 1) + diagonal.shape)
                block = x[..., 1 : 1 + diagonal.size] * row
                beside = [(0, 0)] * (x.ndim - 1)
                delta = delta + jnp.pad(block, [*beside, (1, delta.shape[-1] - 1 - diagonal.size)])
            results.append(delta)
        return results
