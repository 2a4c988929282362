"""LoRA in the adapter format of Hugging Face's peft: a folder that ``peft.PeftModel.from_pretrained`` takes.

In: a model with LoRA in its slots, free or AO (as its materialised factors). Out: ``adapter_model.safetensors`` and
``adapter_config.json``, in the names of the base model that it is to be put on: timm's, whose qkv is fused, or
transformers'. Alpha is multiplied into the up projections, so that peft's own factor is 1.
"""

import os

import numpy as np

from vitplast_jax import components, models, trees
from vitplast_jax.errors import UserError
from vitplast_jax.files import write_json
from vitplast_jax.peft.merge import layers_of
from vitplast_jax.peft.saving import trained_leaves
from vitplast_jax.weights import dialects, export

BASES = {"timm": dialects.TIMM, "hf": dialects.HF_FIVE, "hf4": dialects.HF_CLASSIC}
_PREFIX = "base_model.model."


def save_hf_peft(model: models.ViT, folder: str | os.PathLike, base: str = "timm"):
    """Writes the LoRA of a model, and every other module that was trained (the head, norms) whole.

    Args:
      model: with LoRA in its slots, from ``attach`` or from a run.
      folder: to write.
      base: whose model it is for: "timm", "hf" (transformers 5 or later) or "hf4" (before).
    Raises:
      UserError: another method, or trained parameters that the format cannot hold.
    """
    if model.slots is None or model.slots.method != "lora":
        what = "nothing" if model.slots is None else model.slots.method
        raise UserError(
            f"the peft layout holds LoRA; the model has {what} in its slots (timm and hf hold what can be merged)"
        )
    if base not in BASES:
        raise UserError(f"the base is {base!r}; expected {', '.join(BASES)}")
    tensors: dict[str, np.ndarray] = {}
    ranks: dict[str, int] = {}
    for index, block in enumerate(model.blocks):
        for path, layer, _ in layers_of(block, index):
            if layer.slot is not None:
                for module, down, up in _factors(path, layer, _names(model, base, f"{path}/kernel")):
                    ranks[module] = down.shape[1]
                    tensors[f"{_PREFIX}{module}.lora_A.weight"] = np.ascontiguousarray(down.T)
                    tensors[f"{_PREFIX}{module}.lora_B.weight"] = np.ascontiguousarray(up.T)
    saved = _whole_modules(model, base)
    if both := sorted(saved.keys() & ranks.keys()):
        raise UserError(f"{both[0]} was trained besides its LoRA, which the peft layout cannot hold (export it merged)")
    for module in saved:
        tensors |= {f"{_PREFIX}{name}": array for name, array in saved[module].items()}
    rank = max(ranks.values())
    config = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": model.spec.name,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": model.slots.dropout,
        "target_modules": sorted(ranks),
        "rank_pattern": {module: own for module, own in ranks.items() if own != rank},
        "alpha_pattern": {module: own for module, own in ranks.items() if own != rank},
        "modules_to_save": sorted(saved) or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    os.makedirs(folder, exist_ok=True)
    export.write_safetensors(tensors, os.path.join(folder, "adapter_model.safetensors"), {"format": "pt"})
    write_json(os.path.join(folder, "adapter_config.json"), config)


def _names(model: models.ViT, base: str, path: str) -> tuple[str, ...]:
    """The base model's names of a parameter; three for a fused one that it keeps apart."""
    names = BASES[base].rules_for(path, model.spec.norm_on)[0].names
    within = base != "timm" and model.spec.num_classes  # the classifier stands beside the backbone, which has a prefix
    return tuple(f"vit.{name}" if within and not name.startswith("classifier") else name for name in names)


def _factors(path: str, layer, names: tuple[str, ...]):
    """(module, down [n, r], up [r, m]) of one Linear of ours, for each module of the base that holds a part of it."""
    n, m = layer.kernel.shape
    parts = [(*map(np.asarray, part.matrices()), first, end) for part, first, end in layer.slot.parts]
    share = m // len(names)
    for third, name in enumerate(names):
        at = third * share
        inside = [part for part in parts if part[2] < at + share and part[3] > at]
        if not inside:
            continue
        up = np.zeros((sum(part[0].shape[1] for part in inside), share), np.float32)
        row = 0
        for _, own, first, end in inside:
            low, high = max(first, at), min(end, at + share)
            up[row : row + len(own), low - at : high - at] = own[:, low - first : high - first]
            row += len(own)
        yield name.removesuffix(".weight"), np.concatenate([part[0] for part in inside], axis=1), up


def _whole_modules(model: models.ViT, base: str) -> dict[str, dict[str, np.ndarray]]:
    """{module: its tensors} of every module with a base leaf that was trained."""
    also = ("head",) if model.spec.num_classes else ()
    changed = [path for path in trained_leaves(model, also) if components.locate(path).component != "peft"]
    flat = trees.flatten(models.parameters(model))
    if alone := [path for path in changed if "/" not in path]:
        raise UserError(f"{alone[0]} was trained, which the peft layout cannot hold: it belongs to no module")
    modules: dict[str, dict[str, np.ndarray]] = {}
    for module in dict.fromkeys(path.rpartition("/")[0] for path in changed):
        for path, leaf in flat.items():
            if path.rpartition("/")[0] == module:
                rule, names = BASES[base].rules_for(path, model.spec.norm_on)[0], _names(model, base, path)
                for name, array in zip(names, rule.layout.write(np.asarray(leaf, np.float32), len(names)), strict=True):
                    modules.setdefault(name.rpartition(".")[0], {})[name] = np.ascontiguousarray(array)
    return modules
