"""Plasticity: how strongly each component reacts to a change of its input, its bounds, and what to train.

`bounds` is both a module and its function; the function is what the name means here. It is imported at once (NumPy
alone), the rest, which needs jax, on first use.
"""

import importlib

from vitplast_jax.plasticity.bounds import bounds

_FUNCTIONS = {
    "measure": "protocol",
    "pairwise_rates": "rates",
    "matched_rates": "rates",
    "pairwise_distances": "rates",
    "matched_distances": "rates",
    "recommend": "select",
    "choose": "select",
    "measure_gradients": "gradients",
    "step_flops": "costs",
}

__all__ = ["bounds", *_FUNCTIONS]


def __getattr__(name: str):
    if name in _FUNCTIONS:
        return getattr(importlib.import_module(f"{__name__}.{_FUNCTIONS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *_FUNCTIONS})
