"""What sits in the slot of a Linear: one part for each range of columns, such as q and v of a fused qkv kernel.

In: the Linear's input, its kernel and bias. Out: the Linear's output, or a merged kernel and bias. Columns that no part
covers come out bit for bit as they would without the slot.
"""

import jax.numpy as jnp
from flax import nnx

from vitplast_jax.errors import UserError
from vitplast_jax.models import layers

# Draws of the slots, apart from those of the data and of the base model (models/layers.py).
FIRST_PLACE = 2**16
PLACES_PER_BLOCK = 16


class Slot(nnx.Module):
    """Holds parts by name. A subclass says how they act; a part has ``merged(kernel, bias) -> (kernel, bias)``.

    Args:
      ranges: (name, first column, end) of each part, in the order of the columns.
      parts: a part for each.
      place, dropout: of the one draw of this slot.
    """

    def __init__(self, ranges, parts, place: int = 0, dropout: float = 0.0):
        self.ranges, self.place, self.dropout = tuple(ranges), place, dropout
        for (name, _, _), part in zip(self.ranges, parts, strict=True):
            setattr(self, name, part)

    @property
    def parts(self):
        """(part, first column, end) of each."""
        return [(getattr(self, name), first, end) for name, first, end in self.ranges]

    def merged(self, kernel, bias):
        """The plain kernel [d_in, d_out] and bias [d_out] (or None) that do the same, in float32."""
        kernel = kernel.astype(jnp.float32)
        bias = None if bias is None else bias.astype(jnp.float32)
        for part, first, end in self.parts:
            columns, offset = part.merged(kernel[:, first:end], None if bias is None else bias[first:end])
            kernel = kernel.at[:, first:end].set(columns)
            if bias is not None:
                bias = bias.at[first:end].set(offset)
            elif offset is not None:
                raise UserError("this adapter shifts the output of a layer without a bias: it cannot be merged")
        return kernel, bias


class Additive(Slot):
    """``y = x @ kernel + bias + delta(x)``; a part has ``delta(x)`` -> [..., its columns]."""

    def __call__(self, x, kernel, bias, keys=None):
        y = plain(x, kernel, bias)
        deltas = self.deltas(layers.dropout(x, keys, self.place, self.dropout))
        return replaced(y, [(y[..., a:b] + delta, a, b) for (_, a, b), delta in zip(self.parts, deltas, strict=True)])

    def deltas(self, x):
        """One delta for each part."""
        return [part.delta(x) for part, _, _ in self.parts]


class Multiplicative(Slot):
    """A part computes its columns itself: ``part(x, kernel, bias)``."""

    def __call__(self, x, kernel, bias, keys=None):
        outputs, at = [], 0
        for part, first, end in (*self.parts, (None, kernel.shape[1], kernel.shape[1])):
            if at < first:
                outputs.append(plain(x, kernel[:, at:first], None if bias is None else bias[at:first]))
            if part is not None:
                outputs.append(part(x, kernel[:, first:end], None if bias is None else bias[first:end]))
            at = end
        return outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, axis=-1)


def plain(x, kernel, bias):
    """What a Linear without a slot computes."""
    y = x @ kernel
    return y if bias is None else y + bias


def replaced(y, columns):
    """y with ranges of its last axis replaced: ``columns`` are (values, first, end), in order."""
    pieces, at = [], 0
    for values, first, end in columns:
        pieces += [y[..., at:first], values] if at < first else [values]
        at = end
    if at < y.shape[-1]:
        pieces.append(y[..., at:])
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=-1)
