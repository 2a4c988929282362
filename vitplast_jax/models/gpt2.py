"""GPT-2 (Radford et al. 2019): the same blocks as the ViT's, causal, over words instead of patches.

In: words [b, n], whole numbers below the vocabulary. Out: logits [b, n, vocabulary] in float32 whose head is the table
of words itself, or the normed tokens [b, n, d].
"""

import jax.numpy as jnp
from flax import nnx

from vitplast_jax.errors import UserError
from vitplast_jax.models import layers
from vitplast_jax.models.specs import GPT2Spec


class GPT2(nnx.Module):
    """GPT-2; computes in ``dtype`` of the call. Parameters are zeros until filled.

    Build one with :func:`vitplast_jax.create_model` or :func:`vitplast_jax.load_model`.
    """

    def __init__(self, spec: GPT2Spec):
        self.spec = spec
        self.slots = self.origin = None  # as in ViT
        self.wte = nnx.Param(jnp.zeros((spec.vocabulary, spec.width)))
        self.wpe = nnx.Param(jnp.zeros((spec.context, spec.width)))
        self.blocks = nnx.List(
            layers.Block(
                index,
                spec.width,
                spec.hidden,
                spec.heads,
                gelu=spec.gelu,
                eps=spec.eps,
                drop=spec.drop_rate,
                drop_path=rate,
                causal=True,
            )
            for index, rate in enumerate(layers.drop_path_rates(spec))
        )
        self.norm = layers.LayerNorm(spec.width, spec.eps)

    def embed(self, words, keys=None, dtype=jnp.float32):
        """Returns the embedding output [b, n, d]: the words' and the positions' rows."""
        if words.ndim != 2 or words.shape[1] > self.spec.context or not jnp.issubdtype(words.dtype, jnp.integer):
            raise UserError(
                f"{self.spec.name} takes whole numbers [b, n], n at most {self.spec.context}, "
                f"not {words.dtype} {words.shape}"
            )
        x = (self.wte[...][words] + self.wpe[...][: words.shape[1]]).astype(dtype)
        return layers.dropout(x, keys, layers.FIRST_PLACE, self.spec.drop_rate)

    def __call__(self, words, key=None, *, intermediates: bool = False, remat: str = "none", dtype=jnp.float32):
        """Returns logits [b, n, vocabulary] in float32 (tokens [b, n, d] without a head), or (logits, out).

        Args:
          words: [b, n] of an integer type.
          key: None for a deterministic pass; else a key, or [b] keys, for dropout and drop-path.
          intermediates: also return ``out``: "embedding", "blocks" (a list with every component's output) and "norm".
          remat: what the backward pass recomputes instead of keeping it, a name in :data:`layers.REMAT`.
          dtype: to compute in.
        """
        keys = layers.example_keys(key, words.shape[0])
        x = self.embed(words, keys, dtype)
        x, out = layers.run_blocks(self.blocks, x, keys, intermediates, remat)
        out["norm"] = x = self.norm(x)
        if self.spec.num_classes:
            x = jnp.einsum("bnd,vd->bnv", x, self.wte[...].astype(x.dtype), preferred_element_type=jnp.float32)
        x = x.astype(jnp.float32)
        return (x, out) if intermediates else x
