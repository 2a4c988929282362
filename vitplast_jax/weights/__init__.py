"""Weights in and out: files of any known naming become our parameter tree, and our tree becomes such files again.

In: a path, a shipped name or `hf-hub:ID`. Out: (spec, tree, report) from `load_tree`, a model from `load_model`, files
from `save_timm`, `save_hf` and `save_folder`. Nothing here runs code from a file, and only `verify` imports torch.
"""

import importlib

_FUNCTIONS = {  # public name -> the module that defines it
    "load_tree": "convert",
    "load_model": "convert",
    "read_tensors": "readers",
    "resolve": "places",
    "identity": "places",
    "save_timm": "export",
    "save_hf": "export",
    "save_folder": "export",
}


def __getattr__(name):
    if name in _FUNCTIONS:
        return getattr(importlib.import_module(f"{__name__}.{_FUNCTIONS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *_FUNCTIONS})
