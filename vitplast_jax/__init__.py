"""vitplast_jax: which part of a Vision Transformer to finetune, and then finetuning it.

`import vitplast_jax as vp` takes a fraction of a second: what needs jax loads on first use.
"""

import importlib

__version__ = "0.1.0"

_ROOMS = ("trees", "components", "sharding", "models", "weights", "peft", "data", "training", "plasticity", "reports")
_FUNCTIONS = {  # public name -> the module that defines it
    "create_model": "models",
    "parameters": "models",
    "with_parameters": "models",
    "load_model": "weights.convert",
    "UserError": "errors",
}


def __getattr__(name: str):
    if name in _ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _FUNCTIONS:
        return getattr(importlib.import_module(f"{__name__}.{_FUNCTIONS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *_ROOMS, *_FUNCTIONS})
