"""Visual prompts (VPT: Jia et al., arXiv 2203.12119), free or the rows of AO(q)^T (arXiv 2507.13260).

Prompts stand behind the prefix tokens (class token, registers) and before the patches; they get no position, and mean
pooling leaves them out. Shallow: they enter before the first block. Deep: each block replaces those of the block
before, so that the sequence keeps its length; blocks outside the chosen range carry them on.
"""

import jax.numpy as jnp
from flax import nnx

from vitplast_jax.errors import UserError
from vitplast_jax.models import layers
from vitplast_jax.peft import ao
from vitplast_jax.peft.settings import Settings


class Prompt(nnx.Module):
    """``count`` prompts of width d that enter (``inserts``) or replace those there are, behind ``prefix`` tokens."""

    def __init__(self, d: int, count: int, prefix: int, inserts: bool, settings: Settings, place: int):
        if settings.ao and count > d:
            raise UserError(f"peft.rank is {count}; AO makes at most {d} prompts of width {d}")
        self.count, self.prefix, self.inserts = count, prefix, inserts
        self.normalize, self.multiplier = settings.normalize, settings.multiplier
        self.prompt = nnx.data(None) if settings.ao else nnx.Param(jnp.zeros((count, d)))
        self.prompt_vector = nnx.Param(jnp.zeros((d,))) if settings.ao else nnx.data(None)
        self.scales = nnx.Param(jnp.zeros((count,))) if settings.scales else nnx.data(None)
        self.dropout, self.place = settings.dropout, place

    @property
    def inserted(self) -> int:
        """By how many tokens the sequence grows here."""
        return self.count if self.inserts else 0

    def tokens(self):
        """[count, d], float32."""
        if self.prompt is not None:
            tokens = self.prompt[...]
        else:
            q = self.prompt_vector[...]
            tokens = self.multiplier * ao.ao_matrix(ao.normalized(q) if self.normalize else q, self.count).T
        return tokens if self.scales is None else self.scales[...][:, None] * tokens

    def __call__(self, x, keys=None):
        """x [b, n, d] -> [b, n + inserted, d]."""
        tokens = jnp.broadcast_to(self.tokens().astype(x.dtype), (x.shape[0], self.count, x.shape[-1]))
        tokens = layers.dropout(tokens, keys, self.place, self.dropout)
        rest = x[:, self.prefix + (0 if self.inserts else self.count) :]
        return jnp.concatenate([x[:, : self.prefix], tokens, rest], axis=1)
