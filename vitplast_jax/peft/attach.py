"""From a model to the same model with something in its slots.

In: a model, or a spec, and settings. Out: a new model whose base parameters and their paths are as they were; what is
added lies below ``slot/``, ``adapter_*/`` and ``prompt/`` and is the component ``peft``. Leaves named ``start_*`` are
the frozen vectors of start="zero": no selector marks them.
"""

import dataclasses
import zlib
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from vitplast_jax import components, models, trees
from vitplast_jax.errors import UserError
from vitplast_jax.peft import hra, hta, lora, oft, slots, ssf
from vitplast_jax.peft.adapter import Adapter
from vitplast_jax.peft.prompt import Prompt
from vitplast_jax.peft.settings import Settings, make_settings

# target -> where its Linear is, and which thirds of its columns are meant (of a fused kernel).
_LINEARS = {
    "q": ("attn", "qkv", 0, 1),
    "k": ("attn", "qkv", 1, 2),
    "v": ("attn", "qkv", 2, 3),
    "qkv": ("attn", "qkv", 0, 3),
    "out": ("attn", "out", 0, 3),
    "fc1": ("mlp", "fc1", 0, 3),
    "gate": ("mlp", "gate", 0, 3),
    "fc2": ("mlp", "fc2", 0, 3),
}
_NORMS = {"ln1": "norm1", "ln2": "norm2"}
_PARTS = {
    "lora": (lora.LoraSlot, lora.LoraPart),
    "oft": (slots.Multiplicative, oft.OftPart),
    "boft": (slots.Multiplicative, oft.BoftPart),
    "hra": (slots.Multiplicative, hra.HraPart),
    "hta": (slots.Additive, hta.HtaPart),
    "ssf": (slots.Multiplicative, ssf.SsfPart),
}
VECTOR_SPREAD = 0.02  # of AO vectors around e0


@dataclasses.dataclass(frozen=True, eq=False)
class Origin:
    """What a model was made from, carried by the model itself: ``base``, the parameters before :func:`attach` (or what
    a run started from), and ``unmerged``, the model before ``merge``. All origins are equal, so that no compiled
    program depends on them."""

    base: Mapping | None = None
    unmerged: object | None = None

    def __eq__(self, other):
        return isinstance(other, Origin)

    def __hash__(self):
        return hash(Origin)


def attach(model: models.ViT, method: str = "lora", *, seed: int = 0, **settings) -> models.ViT:
    """A new model with a parameter-efficient method in its slots; the given one stays as it is.

    LoRA, adapters with their zero up projection, AOFT* (``scales=True``) and AO with ``start="zero"`` leave the output
    bit for bit as it was; so do OFT, BOFT, HRA, HTA and SSF but for rounding. Prompts change it.

    Args:
      model: without anything in its slots.
      method: "lora", "adapter", "vpt-shallow", "vpt-deep", "oft", "boft", "hra", "hta" or "ssf".
      seed: of what is drawn; a leaf's values depend on (seed, path) alone.
      **settings: fields of :class:`vitplast_jax.peft.settings.Settings`: ``rank``, ``targets``, ``projection``...
    Raises:
      UserError: settings that do not fit the method or the model.
    """
    if model.slots is not None:
        raise UserError(f"the model already has {model.slots.method} in its slots; merge it first")
    told = make_settings({"method": method, **settings})
    if told.method.startswith("vpt") and not isinstance(model.spec, models.ViTSpec):
        raise UserError(f"{model.spec.name} reads words from left to right: visual prompts are for Vision Transformers")
    base = models.parameters(model)
    new = models.build(model.spec, trees.combine(base, initial_parameters(model.spec, told, seed)), told)
    new.origin = Origin(base=base)
    return new


def fill(model: models.ViT, settings: Settings):
    """Fills the slots of a model in place; parameters are zeros."""
    places, first_prompt = settings.places(len(model.blocks)), True
    if settings.method == "vpt-shallow":
        places = {0: ["prompt"]}
    for index, names in places.items():
        block, place, rank = model.blocks[index], _place(index), settings.rank_of(index)
        if settings.method == "adapter":
            for offset, name in enumerate(("mha", "ffn")):
                if name in names:
                    setattr(block, f"adapter_{name}", Adapter(model.spec.width, rank, settings, place + offset))
        elif settings.method.startswith("vpt"):
            block.prompt = Prompt(model.spec.width, rank, model.spec.prefix, first_prompt, settings, place)
            first_prompt = False
        else:
            _fill_layers(block, index, names, rank, settings, place)
    model.slots = settings


def _place(block: int) -> int:
    return slots.FIRST_PLACE + slots.PLACES_PER_BLOCK * block


def _fill_layers(block, index: int, names: list[str], rank: int, settings: Settings, place: int):
    slot_class, part_class = _PARTS[settings.method]
    layers = dict.fromkeys(_LINEARS[name][:2] for name in names if name in _LINEARS)
    for offset, (owner, attribute) in enumerate(layers):
        linear = getattr(getattr(block, owner), attribute, None)
        chosen = sorted(
            (name for name in names if _LINEARS.get(name, ())[:2] == (owner, attribute)), key=lambda n: _LINEARS[n][2]
        )
        if linear is None:
            raise UserError(f"peft.targets: block {index} of this model has no {chosen[0]}")
        n, m = linear.kernel.shape
        ranges = [(name, m * _LINEARS[name][2] // 3, m * _LINEARS[name][3] // 3) for name in chosen]
        parts = [part_class(n, end - first, rank, settings) for _, first, end in ranges]
        linear.slot = slot_class(ranges, parts, place + offset, settings.dropout)
    for name in names:
        if name in _NORMS:
            getattr(block, _NORMS[name]).slot = ssf.SsfNorm(block.norm1.scale.shape[0])


def initial_parameters(spec: models.ViTSpec, settings: Settings, seed: int) -> trees.Tree:
    """What is added to the parameters of a model, freshly drawn: float32."""
    flat = trees.flatten(models.abstract_parameters(spec, settings))
    added = {path: leaf.shape for path, leaf in flat.items() if components.locate(path).component == "peft"}
    values = {path: initial_value(path, shape, seed, spec, settings) for path, shape in added.items()}
    return trees.unflatten({path: jnp.asarray(value) for path, value in values.items()})


def initial_value(path: str, shape: tuple[int, ...], seed: int, spec: models.ViTSpec, settings: Settings) -> np.ndarray:
    """The initial value of one leaf, float32: a function of (seed, path, shape); a start vector's is its vector's own.

    Down kernels are uniform in +-1/sqrt(n), as torch draws LoRA's; AO vectors are e0 + N(0, 0.02^2); prompts are
    Xavier-uniform over a patch, as in VPT; HRA's reflections come in equal pairs, which cancel; all else is such that
    nothing changes: scales of AO and of tied pairs 0, other scales 1, up kernels, shifts, biases and rotations 0.
    """
    *parents, name = path.split("/")
    path = "/".join([*parents, name.removeprefix("start_")])
    draw = np.random.Generator(np.random.Philox(key=[seed, zlib.crc32(path.encode())]))
    if name.endswith("_vector"):
        value = draw.normal(0.0, VECTOR_SPREAD, shape)
        value[0] += 1.0
    elif name == "down_kernel":
        limit = shape[0] ** -0.5
        value = draw.uniform(-limit, limit, shape)
    elif name == "prompt":
        limit = (6 / (spec.in_chans * spec.patch_size[0] * spec.patch_size[1] + shape[1])) ** 0.5
        value = draw.uniform(-limit, limit, shape)
    elif name == "scales":
        value = np.zeros(shape) if settings.ao or settings.tied else np.ones(shape)
    elif name == "scale":
        value = np.ones(shape)
    elif name == "reflections":
        value = np.repeat(draw.normal(0.0, shape[0] ** -0.5, (shape[0], -(-shape[1] // 2))), 2, axis=1)[:, : shape[1]]
    elif name == "reflector":
        value = draw.normal(0.0, shape[0] ** -0.5, shape)
    else:
        value = np.zeros(shape)
    return value.astype(np.float32)
