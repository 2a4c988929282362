"""Parameter-efficient finetuning: what sits in the slots of a model, and the AO matrix that makes it from vectors.

In: a model. Out: a new model with LoRA, adapters, prompts or one of their relatives attached; merged again; adapter
files of kilobytes.
"""

import importlib

_FUNCTIONS = {  # public name -> the module that defines it
    "ao_matrix": "ao",
    "ao_project": "ao",
    "ao_expand": "ao",
}


def __getattr__(name):
    if name in _FUNCTIONS:
        return getattr(importlib.import_module(f"{__name__}.{_FUNCTIONS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *_FUNCTIONS})
