"""From a model with adapters to a plain one that computes the same, and back.

In: a model. Out: a new one; kernels are merged in float32 and stay float32, because a 16-bit kernel would round most of
a small change away. float32 logits agree to 1e-5; where the compute dtype is bfloat16, to its own rounding.
"""

import jax.numpy as jnp

from vitplast_jax import components, models, trees
from vitplast_jax.errors import UserError
from vitplast_jax.peft.attach import Origin


def merge(model: models.ViT) -> models.ViT:
    """A plain model, without anything in its slots; a model that has nothing there is returned as it is.

    Raises:
      UserError: what is in the slots cannot be written as plain kernels (prompts, adapters with a GELU or in parallel).
    """
    if model.slots is None:
        return model
    if model.slots.method.startswith("vpt"):
        raise UserError("prompts cannot be merged: they are tokens, not a change of kernels")
    flat = trees.flatten(models.parameters(model))
    merged = {path: leaf for path, leaf in flat.items() if components.locate(path).component != "peft"}
    for index, block in enumerate(model.blocks):
        for path, layer, weight in layers_of(block, index):
            if layer.slot is not None:
                _put(merged, path, weight, *layer.slot.merged(merged[f"{path}/{weight}"], merged.get(f"{path}/bias")))
        for adapter, inner, outer in (
            (block.adapter_mha, ("attn/qkv",), "attn/out"),
            (block.adapter_ffn, ("mlp/fc1", "mlp/gate"), "mlp/fc2"),
        ):
            if adapter is not None:
                _merge_adapter(merged, f"blocks/{index}/", adapter, inner, outer)
    plain = models.build(model.spec, trees.unflatten(merged))
    plain.origin = Origin(unmerged=model)
    return plain


def unmerge(model: models.ViT) -> models.ViT:
    """The model that :func:`merge` was given: its base kernels are those that were kept, bit for bit.

    Raises:
      UserError: the model was not made by merge.
    """
    if model.slots is not None:
        return model
    if model.origin is None or model.origin.unmerged is None:
        raise UserError("this model was not made by peft.merge: there is nothing to go back to")
    return model.origin.unmerged


def layers_of(block, index: int):
    """(path, layer, name of its weight) of what has a slot in a block."""
    for name in ("norm1", "norm2"):
        yield f"blocks/{index}/{name}", getattr(block, name), "scale"
    for owner, names in (("attn", ("qkv", "out")), ("mlp", ("fc1", "gate", "fc2"))):
        for name in names:
            layer = getattr(getattr(block, owner), name, None)
            if layer is not None:
                yield f"blocks/{index}/{owner}/{name}", layer, "kernel"


def _put(merged: dict, path: str, weight: str, kernel, bias):
    merged[f"{path}/{weight}"] = kernel
    if bias is not None:
        if f"{path}/bias" not in merged:
            raise UserError(f"{path} has no bias that an adapter's shift could be merged into")
        merged[f"{path}/bias"] = bias


def _merge_adapter(merged: dict, prefix: str, adapter, inner: tuple[str, ...], outer: str):
    matrix, shift = adapter.matrix()
    for path in (prefix + name for name in (inner if adapter.position == "before" else (outer,))):
        if f"{path}/kernel" not in merged:
            continue
        kernel, bias = merged[f"{path}/kernel"].astype(jnp.float32), merged.get(f"{path}/bias")
        bias = None if bias is None else bias.astype(jnp.float32)
        if adapter.position == "before":  # (x M + s) W + b
            added = None if shift is None else _times(shift, kernel)
            kernel = _times(matrix, kernel)
        else:  # (x W + b) M + s
            added = shift
            kernel, bias = _times(kernel, matrix), None if bias is None else _times(bias, matrix)
        if bias is not None and added is not None:
            added = bias + added
        _put(merged, path, "kernel", kernel, bias if added is None else added)


def _times(a, b):
    return jnp.matmul(a, b, precision="highest")
