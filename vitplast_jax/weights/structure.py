"""Which model do these tensors belong to?

In: a `View` of a file's tensors and what is told about the model. Out: the file's `ViTSpec` and how its position table
is laid out. What neither names, shapes nor the known sizes decide is asked for, never guessed.
"""

import dataclasses
import math

from vitplast_jax.errors import UserError
from vitplast_jax.models import specs
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
    for path in ("patch_embed/kernel", "pos_embed", "blocks/0/mlp/fc1/kernel"):
        if not view.has(path):
            names = " or ".join(str(rule.names[0]) for rule in view.dialect.rules_for(path, view.pool))
            raise UserError(f"{source}: {view.dialect.name} weights without {names}; not a ViT that is known here")
    try:
        kernel, table = view.read("patch_embed/kernel").shape, view.read("pos_embed").shape
        fields.setdefault("hidden", view.read("blocks/0/mlp/fc1/kernel").shape[-1])
        registers = view.read("reg_token").shape[-2] if view.has("reg_token") else 0
        classes = view.read("head/kernel").shape[-1] if view.has("head/kernel") else 0
    except (ShapeError, IndexError) as error:
        raise UserError(f"{source}: {error}") from error
    if len(kernel) != 4 or 0 in kernel:
        raise UserError(f"{source}: the patch kernel has shape {kernel}, expected four sizes above 0")
    fields.setdefault("patch_size", kernel[:2])
    fields.setdefault("in_chans", kernel[2])
    fields.setdefault("width", kernel[3])
    fields.setdefault("depth", _depth(view))
    fields.setdefault("class_token", view.has("cls_token"))
    fields.setdefault("registers", registers)
    fields.setdefault("qkv_bias", view.has("blocks/0/attn/qkv/bias"))
    fields.setdefault("layer_scale", LAYER_SCALE if view.has("blocks/0/ls1/gamma") else None)
    fields.setdefault("pool", view.pool)
    fields["num_classes"] = classes
    fields.setdefault("preprocessing", None)
    if len(table) != 3 or table[0] != 1:
        raise UserError(f"{source}: the position table has shape {table}, expected [1, rows, width]")
    if fields["pool"] == "token" and not fields["class_token"]:
        raise UserError(f"{source}: neither a class token nor timm's fc_norm; this kind of pooling is not supported")
    _numerics(fields, view, source)
    positions = _positions(table[1], fields, told, source, img_size)
    fields["pos_prefix"] = told.get("pos_prefix", positions.prefix == _prefix(fields) and positions.prefix > 0)
    fields["img_size"] = tuple(g * p for g, p in zip(positions.grid, fields["patch_size"], strict=True))
    fields.setdefault("name", _name(fields))
    return specs.ViTSpec(**fields), positions


def _depth(view):
    depth = 0
    while view.has(f"blocks/{depth}/norm1/scale"):
        depth += 1
    return depth


def _prefix(fields):
    return int(fields["class_token"]) + fields["registers"]


def _numerics(fields, view, source):
    """GELU, epsilon and heads: from the source's code where it has one answer, else they must be told."""
    for field, value in view.dialect.fields.items():
        fields.setdefault(field, value)
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
    found = {size.heads for size in specs.SIZES.values() if size.width == width}
    return found.pop() if len(found) == 1 else None


def _positions(rows, fields, told, source, img_size):
    """Splits the table's rows into prefix and grid.

    Tokens before the patches and rows for them are two facts: none, all of them, or (DINO with registers) only the
    class token may have a row.
    """
    whole = _prefix(fields)
    if "pos_prefix" in told:
        choices = {whole if told["pos_prefix"] else 0}
    else:
        choices = {whole, 0}
    if fields["class_token"] and fields["registers"] and not told.get("pos_prefix"):
        choices.add(1)
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


def _name(fields):
    sizes = [n for n, s in specs.SIZES.items() if (s.width, s.depth) == (fields["width"], fields["depth"])]
    size = sizes[0] if sizes else f"{fields['width']}x{fields['depth']}"
    return f"vit_{size}_patch{fields['patch_size'][0]}_{fields['img_size'][0]}"
