"""Does the converted model answer as the peer that the weights come from?

In: a source, the spec and tree that came out of its conversion. Out: a `Verification`: the largest difference of the
logits relative to the largest logit. The peer (timm or transformers, on PyTorch) reads the source by its own means.
Matrix products run at the highest precision whatever JAX's default is set to.
"""

import dataclasses
import functools
import json
import os
import re
import tempfile

import numpy as np

from vitplast_jax import models, trees
from vitplast_jax.errors import UserError
from vitplast_jax.files import write_json
from vitplast_jax.models import specs
from vitplast_jax.weights import dialects, export, places, readers, transformers_layout

TOLERANCES = {"cpu": 1e-5}  # of the backend; accelerators round differently even at highest precision
OTHER_TOLERANCE = 1e-4
PRECISION = "highest"
_CHUNK = (r"^blocks\.\d+\.(\d+)\.", r"blocks.\1.")


@dataclasses.dataclass(frozen=True)
class Verification:
    """`difference`: max |ours - peer's| / max |peer's|."""

    peer: str
    difference: float
    tolerance: float
    images: tuple[int, ...]
    backend: str

    @property
    def passed(self):
        return self.difference <= self.tolerance  # False for NaN

    def line(self):
        word = "equal" if self.passed else "DIFFERENT"
        return (
            f"verification   {word}: {self.difference:.2e} of the largest logit from {self.peer} (tolerance "
            f"{self.tolerance:g}; {self.backend}, float32, matmul precision {PRECISION}, images {list(self.images)})"
        )


def verify(source, spec, params, report, images=2, seed=0):
    """Compares the model with its peer on fixed random images.

    Args:
        source: what was converted; `report`: the conversion's.
        spec, params: what came out of it. Of a language model `images` counts sequences of words.
    Raises: UserError: the peer is not installed, or cannot take these weights.
    """
    import jax
    import jax.numpy as jnp

    x = inputs(spec, images, seed)
    name, answer = _peer(source, spec, params, report)
    expected = answer(x)
    with jax.default_matmul_precision(PRECISION):
        wide = trees.map_paths(lambda _, leaf: jnp.asarray(leaf, jnp.float32), params)
        ours = np.asarray(jax.jit(models.apply, static_argnums=0)(models.structure(spec), wide, {}, x))
    backend = jax.default_backend()
    tolerance = TOLERANCES.get(backend, OTHER_TOLERANCE)
    difference = float(np.abs(ours - expected).max() / np.abs(expected).max())
    return Verification(name, difference, tolerance, x.shape, backend)


def inputs(spec, count, seed):
    """[count, ...] random images, or sequences of words."""
    rng = np.random.default_rng(seed)
    if isinstance(spec, specs.GPT2Spec):
        return rng.integers(0, spec.vocabulary, (count, min(spec.context, 32)), dtype=np.int32)
    return rng.standard_normal((count, *spec.img_size, spec.in_chans)).astype(np.float32)


def _peer(source, spec, params, report):
    """(the peer's name and version, a function from images to its logits)."""
    path = places.resolve(source)
    try:
        if report.dialect.startswith("transformers") or isinstance(spec, specs.GPT2Spec):
            return _transformers(path, spec, params, report)
        return _timm(path, spec, params, report)
    except ImportError as error:
        raise UserError(
            f"--verify compares with the peer, but {error.name} is not installed: pip install '.[parity]'"
        ) from None


def _timm(path, spec, params, report):
    import timm
    import torch

    timm_spec = export.timm_tensors(params, spec)[1]
    model, filtered = timm_model(timm_spec)
    if report.dialect in (dialects.JAX_ORIGINAL.name, dialects.BIG_VISION.name):
        model.load_pretrained(path)
    else:
        if report.dialect == dialects.OURS.name:
            state = export.timm_tensors(params, spec)[0]
        else:
            state = readers.read_tensors(path)
            kept = {name: array for name, array in state.items() if name not in report.ignored}
            # timm knows the hub's names, but neither prefixes nor chunks.
            state = {re.sub(*_CHUNK, name.removeprefix(report.prefix)): array for name, array in kept.items()}
        state = {name: _tensor(torch, array) for name, array in state.items()}
        if report.dialect.startswith(dialects.DINO_HUB.name):
            state.setdefault("mask_token", torch.zeros(1))  # by which timm knows these files
        if spec.num_classes == 0:
            state = {name: value for name, value in state.items() if not name.startswith(("head.", "head_dist."))}
        try:
            model.load_state_dict(filtered(state, model), strict=True)
        except RuntimeError as error:
            raise UserError(
                f"timm does not take the weights of {path}: {' '.join(str(error).split())[:300]}"
            ) from error
    return f"timm {timm.__version__}", _torch_answer(torch, model, lambda y: y)


def timm_model(spec):
    """(timm's model of this structure and numerics, in evaluation mode; its function that prepares a state dict)."""
    import torch
    from timm.layers import LayerNorm, SwiGLUPacked
    from timm.models import deit, eva, vision_transformer

    common = {
        "img_size": spec.img_size,
        "patch_size": spec.patch_size,
        "in_chans": spec.in_chans,
        "num_classes": spec.num_classes,
        "global_pool": "avg" if spec.pool == "avg" else "token",
        "embed_dim": spec.width,
        "depth": spec.depth,
        "num_heads": spec.heads,
        "init_values": spec.layer_scale,
        "class_token": spec.class_token,
        "norm_layer": functools.partial(LayerNorm, eps=spec.eps),
        "qkv_bias": spec.qkv_bias,
    }
    # A hair above: timm rounds the product with the width down.
    ratio = (spec.hidden + 1e-3) / spec.width
    prepare = functools.partial(vision_transformer.checkpoint_filter_fn, antialias=spec.antialias)
    if spec.rope:
        model = eva.Eva(
            **common,
            mlp_ratio=ratio,
            swiglu_mlp=spec.gated,
            swiglu_align_to=1 if spec.gated else 0,
            num_reg_tokens=spec.registers,
            use_abs_pos_emb=False,
            use_rot_pos_emb=True,
            rope_type="dinov3",
            rope_temperature=spec.rope.theta,
            rope_rotate_half=True,
            use_fc_norm=spec.norm_on == "pooled",
        )
        return model.eval(), eva.checkpoint_filter_fn
    activation = {"erf": torch.nn.GELU, "tanh": functools.partial(torch.nn.GELU, approximate="tanh")}[spec.gelu]
    common |= {
        "no_embed_class": spec.prefix_rows == 0,
        "reg_tokens": spec.registers,
        "mlp_ratio": 2 * ratio if spec.gated else ratio,
        "act_layer": activation,
        "fc_norm": spec.norm_on == "pooled",
    }
    if spec.gated:
        common |= {"mlp_layer": SwiGLUPacked, "act_layer": torch.nn.SiLU}
    if spec.distilled:
        return deit.VisionTransformerDistilled(**common).eval(), prepare
    return vision_transformer.VisionTransformer(**common).eval(), prepare


def _transformers(path, spec, params, report):
    import torch
    import transformers

    told = transformers_layout.config(spec, None)
    with tempfile.TemporaryDirectory() as folder:
        foreign = report.dialect.startswith("transformers")
        if not foreign or not os.path.isdir(path) or _read_kind(path) != told["model_type"]:
            # A bare file (or ours, or MAE's encoder): the peer wants a config beside it.
            write_json(os.path.join(folder, "config.json"), told)
            tensors = (
                readers.read_tensors(path) if foreign else transformers_layout.tensors(params, spec, export.to_dialect)
            )
            export.write_safetensors(tensors, os.path.join(folder, "model.safetensors"), {"format": "pt"})
            path = folder
        kind = getattr(transformers, told["architectures"][0])
        options = {"add_pooling_layer": False} if told["architectures"][0] in ("ViTModel", "DeiTModel") else {}
        model = kind.from_pretrained(path, dtype=torch.float32, **options).eval()
    if isinstance(spec, specs.GPT2Spec):
        pick = (lambda y: y.logits) if spec.num_classes else (lambda y: y.last_hidden_state)
    else:
        pick = (lambda y: y.logits) if spec.num_classes else (lambda y: y.last_hidden_state[:, 0])
    return f"transformers {transformers.__version__}", _torch_answer(torch, model, pick)


def _read_kind(folder):
    try:
        with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
            return json.load(file).get("model_type")
    except OSError:
        return None


def _tensor(torch, array):
    """A float32 tensor; 16-bit types widen exactly."""
    wide = array.astype(np.float32) if array.dtype.itemsize <= 4 else array
    return torch.from_numpy(np.array(wide))


def _torch_answer(torch, model, pick):
    def answer(x):
        tensor = torch.from_numpy(x)
        with torch.no_grad():
            return pick(model(tensor.permute(0, 3, 1, 2) if x.ndim == 4 else tensor.long())).float().numpy()

    return answer
