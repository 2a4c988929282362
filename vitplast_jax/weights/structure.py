"""Which model do these tensors belong to?

In: a `View` of a file's tensors and what is told about the model. Out: the file's `ViTSpec` and how its position table
is laid out. What neither names, shapes nor the known sizes decide is asked for, never guessed.
"""

import dataclasses
import math

import ml_dtypes
import numpy as np

from vitplast_jax.errors import UserError
from vitplast_jax.models import names, specs
from vitplast_jax.weights import dialects
from vitplast_jax.weights.view import ShapeError

LAYER_SCALE = 1e-5  # stands for "has LayerScale"; the values come from the file


@dataclasses.dataclass(frozen=True)
class Positions:
    """`prefix`: rows before the grid's; `grid`: (height, width) in patches."""

    prefix: int
    grid: tuple[int, int]


def infer(view, told, source, img_size=None):
    """The spec of a file's model.

    Args:
        view: the file's tensors.
        told: fields of `ViTSpec` known from elsewhere (a spec, a name, a config beside the file); they win.
        source: for messages.
        img_size: (height, width) that was asked for; tells the grid of a table that is not square.
    Returns: (ViTSpec with the image size the table was made for, Positions).
    """
    fields = dict(told)
    positioned = not any(known.get("pos_embed") is False for known in (view.dialect.fields, told))
    positioned = positioned and not (told.get("rope") and not view.has("pos_embed"))
    for path in ("patch_embed/kernel", "pos_embed", "blocks/0/mlp/fc1/kernel")[:: 1 if positioned else 2]:
        if not view.has(path):
            wanted = " or ".join(str(rule.names[0]) for rule in view.dialect.rules_for(path, view.norm_on))
            raise UserError(
                f"{source}: {view.dialect.name} weights without {wanted or path}; not a ViT that is known here"
            )
    if fields.get("rope") and view.has("pos_embed"):
        raise UserError(f"{source}: holds a table of positions, {fields.get('name', 'the model')} has rotary ones")
    try:
        kernel = view.read("patch_embed/kernel").shape
        table = view.read("pos_embed").shape if positioned else None
        fields.setdefault("hidden", view.read("blocks/0/mlp/fc1/kernel").shape[-1])
        registers = view.read("reg_token").shape[-2] if view.has("reg_token") else 0
        features, classes = view.read("head/kernel").shape if view.has("head/kernel") else (0, 0)
    except (ShapeError, IndexError, ValueError) as error:
        raise UserError(f"{source}: {error}") from error
    if len(kernel) != 4 or 0 in kernel:
        raise UserError(f"{source}: the patch kernel has shape {kernel}, expected four sizes above 0")
    fields.setdefault("patch_size", kernel[:2])
    fields.setdefault("in_chans", kernel[2])
    fields.setdefault("width", kernel[3])
    fields.setdefault("depth", _depth(view))
    fields.setdefault("class_token", view.has("cls_token"))
    fields.setdefault("distilled", view.has("dist_token"))
    fields.setdefault("registers", registers)
    fields.setdefault("pos_embed", positioned)
    fields.setdefault("qkv_bias", view.has("blocks/0/attn/qkv/bias"))
    fields.setdefault("gated", view.has("blocks/0/mlp/gate/kernel"))
    fields.setdefault("layer_scale", LAYER_SCALE if view.has("blocks/0/ls1/gamma") else None)
    fields.setdefault("pool", _pool(view, fields, features, classes))
    fields.setdefault("fc_norm", view.norm_on == "pooled" or fields["class_token"])
    fields["num_classes"] = classes
    fields.setdefault("preprocessing", None)
    if fields["gated"] and positioned and view.has_name("blocks.0.attn.q_bias"):
        raise UserError(f"{source}: looks like EVA02, whose rotary positions are not in its file; not known here")
    if fields["pool"] == "token" and not fields["class_token"]:
        raise UserError(f"{source}: has no class token, so its head cannot read one")
    if view.dialect is dialects.OURS and not fields["class_token"] and "fc_norm" not in told:
        raise UserError(f"{source}: mean pooling before or after the final norm? name the model (a ViTSpec)")
    _numerics(fields, view, source)
    if not positioned:
        fields.setdefault("pos_prefix", "none")
        fields["img_size"] = _free_size(told, img_size, fields["patch_size"])
        fields.setdefault("name", _name(fields, view.dialect.family))
        return specs.ViTSpec(**fields), Positions(0, (0, 0))
    if len(table) != 3 or table[0] != 1:
        raise UserError(f"{source}: the position table has shape {table}, expected [1, rows, width]")
    positions = _positions(table[1], fields, told, source, img_size)
    fields["pos_prefix"] = told.get("pos_prefix", _pos_prefix(positions.prefix, fields))
    fields["img_size"] = tuple(g * p for g, p in zip(positions.grid, fields["patch_size"], strict=True))
    fields.setdefault("name", _name(fields, view.dialect.family))
    return specs.ViTSpec(**fields), positions


def infer_gpt2(view, told, source):
    """The `GPT2Spec` of a language model's file."""
    fields = dict(told)
    try:
        fields["vocabulary"], fields["width"] = view.read("wte").shape
        fields["context"] = view.read("wpe").shape[0]
        fields["hidden"] = view.read("blocks/0/mlp/fc1/kernel").shape[-1]
    except (ShapeError, IndexError, ValueError, AttributeError) as error:
        raise UserError(f"{source}: no GPT-2 that is known here ({error})") from error
    fields.setdefault("depth", _depth(view))
    _numerics(fields, view, source)
    fields.setdefault("name", f"gpt2_{fields['width']}x{fields['depth']}")
    fields["num_classes"] = fields["vocabulary"]
    known = {field.name for field in dataclasses.fields(specs.GPT2Spec)}
    return specs.GPT2Spec(**{key: value for key, value in fields.items() if key in known})


def _pool(view, fields, features, classes):
    """How the head is fed, from the names and from its shape."""
    if view.norm_on == "pooled" or not fields["class_token"]:
        return "avg"
    if classes and features == 2 * fields["width"]:
        return "token+avg"
    # transformers' classifier of a distilled model reads the class token alone, timm's never does.
    torch_names = view.dialect.name.startswith("transformers")
    return "distilled" if fields["distilled"] and (view.has("head_dist/kernel") or not torch_names) else "token"


def _pos_prefix(rows, fields):
    """Which prefix tokens the table's rows are for."""
    if rows == 0:
        return "none"
    return "all" if rows == _prefix(fields) else "class"


def _free_size(told, img_size, patch):
    """The image size of a model without a table of positions: what is asked for or told, else about 224 pixels."""
    for size in (told.get("img_size"), img_size):
        if size is not None:
            return specs.pair(size)
    return tuple(max(round(224 / side), 1) * side for side in patch)


def _depth(view):
    depth = 0
    while view.has(f"blocks/{depth}/norm1/scale"):
        depth += 1
    return depth


def _prefix(fields):
    return int(fields["class_token"]) + int(fields["distilled"]) + fields["registers"]


def _numerics(fields, view, source):
    """GELU, epsilon and heads: from the source's code where it has one answer, else they must be told."""
    known = dict(view.dialect.fields)
    if not fields.get("registers"):
        known |= view.dialect.without_registers
    for field, value in known.items():
        fields.setdefault(field, value)
    if "rope_embed.periods" in view.dropped and _rounded(view.dropped["rope_embed.periods"], fields):
        fields["rope"] = dataclasses.replace(fields["rope"], periods="bfloat16")
    if "heads" not in fields:
        fields["heads"] = _heads(view, fields["width"])
    open_fields = [field for field in ("heads", "gelu", "eps") if not fields.get(field)]
    if open_fields:
        reasons = [view.dialect.doubt[field] for field in open_fields if field in view.dialect.doubt]
        if "heads" in open_fields:
            reasons.append(f"no known model has width {fields['width']}")
        raise UserError(
            f"{source}: the tensors do not say {', '.join(open_fields)} ({'; '.join(reasons) or 'nothing known'}); "
            "name the model (--model NAME, model=NAME or a ViTSpec)"
        )


def _heads(view, width):
    """From the JAX code's kernels, which keep heads apart, or from the known models of this width."""
    rule = view.rule("blocks/0/attn/qkv/kernel")
    if rule and rule.layout.heads_axis is not None and view.tensors[rule.names[0]].ndim == rule.layout.rank:
        return view.tensors[rule.names[0]].shape[rule.layout.heads_axis]
    return names.heads_of(view.dialect.family, width) or names.heads_of("vit", width)


def _rounded(periods, fields):
    """Whether a file's rotary periods are those of the formula in bfloat16."""
    heads = fields.get("heads") or names.heads_of("dinov3", fields["width"])
    if not heads:
        return False
    k = fields["width"] // heads
    exact = np.float32(100) ** (np.arange(k // 4, dtype=np.float32) * np.float32(4 / k))
    rounded = exact.astype(ml_dtypes.bfloat16).astype(np.float32)
    return periods.shape == exact.shape and np.array_equal(periods.astype(np.float32), rounded)


def _positions(rows, fields, told, source, img_size):
    """Splits the table's rows into prefix and grid.

    Tokens before the patches and rows for them are two facts: none, all of them, or (DINO with registers) only the
    class token may have a row.
    """
    whole = _prefix(fields)
    choices = {"all": {whole}, "class": {1}, "none": {0}}.get(told.get("pos_prefix"), {whole, 0})
    if fields["class_token"] and whole > 1 and told.get("pos_prefix") != "all":
        choices.add(1)
    if told.get("pos_prefix") == "class":  # timm's files have none: they are in the class token
        choices.add(0)
    grids = []
    for size in (told.get("img_size"), img_size):
        if size is not None:
            grids.append(tuple(side // patch for side, patch in zip(size, fields["patch_size"], strict=True)))
    for grid in grids:  # a grid that is told wins over a square one
        fitting = [prefix for prefix in sorted(choices) if rows - prefix == grid[0] * grid[1]]
        if len(fitting) == 1:
            return Positions(fitting[0], grid)
    square = [prefix for prefix in sorted(choices) if rows > prefix and math.isqrt(rows - prefix) ** 2 == rows - prefix]
    if len(square) == 1:
        side = math.isqrt(rows - square[0])
        return Positions(square[0], (side, side))
    problem = "more than one square grid" if square else "no square grid"
    raise UserError(
        f"{source}: its position table has {rows} rows, which is {problem} with {whole} prefix tokens; "
        "tell the size it was made for (img_size=(height, width) or a ViTSpec)"
    )


def _name(fields, family):
    known = names.FAMILIES["dinov2" if family == "vit" and fields["gated"] else family]
    sizes = [
        n
        for n, s in known.items()
        if (s.width, s.depth, s.gated) == tuple(fields[key] for key in ("width", "depth", "gated"))
    ]
    size = sizes[0] if sizes else f"{fields['width']}x{fields['depth']}"
    if fields.get("rope"):
        return f"vit_{size}_patch{fields['patch_size'][0]}_dinov3"
    return f"vit_{size}_patch{fields['patch_size'][0]}_{fields['img_size'][0]}"
