"""Down and up projections: two free matrices, or two that one vector each makes (AO).

In: widths n and m, a rank, settings. Out: ``x @ down @ diag(scales) @ up`` as factors, for LoRA, or with biases and an
activation between, for adapters. Parameters are zeros until :mod:`vitplast_jax.peft.attach` fills them.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from vitplast_jax.errors import UserError
from vitplast_jax.peft import ao
from vitplast_jax.peft.settings import Settings


def make_pair(n: int, m: int, rank: int, settings: Settings) -> "FreePair | AoPair":
    """A pair n -> rank -> m; tied pairs are for n = m alone."""
    return (AoPair if settings.ao else FreePair)(n, m, rank, settings)


class FreePair(nnx.Module):
    """``down_kernel`` [n, rank] and ``up_kernel`` [rank, m]; a tied pair has the first alone."""

    def __init__(self, n: int, m: int, rank: int, settings: Settings):
        self.down_kernel = nnx.Param(jnp.zeros((n, rank)))
        self.up_kernel = nnx.data(None) if settings.tied else nnx.Param(jnp.zeros((rank, m)))
        self.scales = nnx.Param(jnp.zeros((rank,))) if settings.scales else nnx.data(None)

    def factors(self):
        """left [n, r], right [r, m] and no diagonal block; float32."""
        down = self.down_kernel[...].astype(jnp.float32)
        up = down.T if self.up_kernel is None else self.up_kernel[...].astype(jnp.float32)
        return down, up if self.scales is None else self.scales[...][:, None] * up, None

    def matrices(self):
        """The same product as plain factors: what an export to other libraries holds."""
        left, right, _ = self.factors()
        return left, right

    def branch(self, x, bias, activate):
        """``activate(x @ down + bias) @ up``: x [..., n] -> [..., m] in the dtype of x."""
        left, right, _ = self.factors()
        hidden = x @ left.astype(x.dtype)
        hidden = activate(hidden if bias is None else hidden + bias.astype(x.dtype))
        return hidden @ right.astype(x.dtype)


class AoPair(nnx.Module):
    """``AO(p) diag(scales) AO(q)^T`` from two vectors, p ``down_vector`` [n] and q ``up_vector`` [m].

    With start="zero" what it does is the difference to the same of the frozen ``start_*`` vectors: exactly zero first.
    """

    def __init__(self, n: int, m: int, rank: int, settings: Settings):
        if not 1 <= rank <= min(n, m):
            raise UserError(f"peft.rank is {rank}; AO from {n} to {m} has a rank of 1 to {min(n, m)}")
        self.rank, self.normalize, self.multiplier = rank, settings.normalize, settings.multiplier
        self.down_vector = nnx.Param(jnp.zeros((n,)))
        self.up_vector = nnx.data(None) if settings.tied else nnx.Param(jnp.zeros((m,)))
        self.scales = nnx.Param(jnp.zeros((rank,))) if settings.scales else nnx.data(None)
        self.start_down_vector = nnx.Param(jnp.zeros((n,))) if settings.from_zero else nnx.data(None)
        self.start_up_vector = (
            nnx.Param(jnp.zeros((m,))) if settings.from_zero and not settings.tied else nnx.data(None)
        )

    def _vectors(self):
        """p and q."""
        vectors = (self.down_vector, self.down_vector if self.up_vector is None else self.up_vector)
        return tuple(ao.normalized(vector[...]) if self.normalize else vector[...] for vector in vectors)

    def _changes(self):
        """(p0, p - p0) and (q0, q - q0)."""
        down = (self.start_down_vector, self.down_vector)
        up = down if self.up_vector is None else (self.start_up_vector, self.up_vector)
        pairs = ((start[...], vector[...] - start[...]) for start, vector in (down, up))
        return tuple(ao.normalized_change(*pair) if self.normalize else pair for pair in pairs)

    def factors(self):
        """left [n, k], right [k, m] with k = 3 or, from zero, 6, and a diagonal block [rank - 1] or None; float32."""
        if self.start_down_vector is not None:
            (p0, dp), (q0, dq) = self._changes()
            left, right = ao.ao_pair_difference(p0, q0, dp, dq, self.rank)
            return left, right, None
        scales = None if self.scales is None else self.scales[...]
        left, right, diagonal = ao.ao_pair(*self._vectors(), self.rank, scales)
        return left, right * self.multiplier, diagonal * self.multiplier

    def matrices(self):
        """The same product as plain factors: AO(p) and AO(q), and from zero the frozen ones beside them."""
        down, up = (ao.ao_matrix(vector, self.rank).astype(jnp.float32) for vector in self._vectors())
        if self.start_down_vector is not None:
            start_down, start_up = (ao.ao_matrix(start, self.rank).astype(jnp.float32) for start, _ in self._changes())
            return jnp.concatenate([down, -start_down], axis=1), jnp.concatenate([up, start_up], axis=1).T
        if self.scales is not None:
            up = up * self.scales[...][None, :]
        return down, self.multiplier * up.T

    def branch(self, x, bias, activate):
        """``activate(x AO(p) + bias) diag(scales) AO(q)^T``; from zero, less the same of the start vectors."""
        if self.start_down_vector is None:
            p, q = self._vectors()
            hidden = ao.ao_project(x, p, self.rank)
            hidden = activate(hidden if bias is None else hidden + bias.astype(x.dtype))
            if self.scales is not None:
                hidden = hidden * _row(self.scales[...].astype(x.dtype), hidden)
            return ao.ao_expand(hidden, q) * jnp.asarray(self.multiplier, x.dtype)
        (p0, dp), (q0, dq) = self._changes()
        start = ao.ao_project(x, p0, self.rank).astype(jnp.float32)
        change = ao.project_difference(x, p0, dp, self.rank)
        if bias is not None:
            change = change + _row(bias.astype(jnp.float32), change)
        # activate(start + change) - activate(start) may round to something else than 0 where change is 0; the tangent
        # is 0 there and has the right derivative.
        before, tangent = jax.jvp(activate, (start,), (change,))
        moved = jnp.where(change == 0, tangent, activate(start + change) - before)
        # One product at the end: sums of rows would be drawn by XLA into every loop that reads the result, which
        # computes them again and again, and cuts the base model's own loops so that they round differently.
        change_of_up = ao.expand_difference(jnp.eye(self.rank), q0, dq)
        up = jnp.concatenate([ao.ao_matrix(q0 + dq, self.rank).T, change_of_up])
        return jnp.concatenate([moved, before], axis=-1).astype(x.dtype) @ up.astype(x.dtype)


def _row(vector, like):
    return vector.reshape((1,) * (like.ndim - 1) + vector.shape)
