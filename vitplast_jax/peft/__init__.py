"""Parameter-efficient finetuning: what sits in the slots of a model, and the AO matrix that makes it from vectors.

In: a model. Out: a new model with LoRA, adapters, prompts or one of their relatives attached; merged again; adapter
files of kilobytes.

The functions `attach` and `merge` hide the modules of the same names: import what else is in those from them.
"""

from vitplast_jax.peft import geometry
from vitplast_jax.peft.ao import ao_expand, ao_matrix, ao_project
from vitplast_jax.peft.attach import attach
from vitplast_jax.peft.hf import save_hf_peft
from vitplast_jax.peft.merge import merge, unmerge
from vitplast_jax.peft.saving import load, save
from vitplast_jax.peft.settings import Settings

__all__ = [
    "Settings",
    "ao_expand",
    "ao_matrix",
    "ao_project",
    "attach",
    "geometry",
    "load",
    "merge",
    "save",
    "save_hf_peft",
    "unmerge",
]
