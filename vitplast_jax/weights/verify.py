"""Does the converted model answer as the peer that the weights come from?

In: a source, the spec and tree that came out of its conversion. Out: a `Verification`: the largest difference of the
logits relative to the largest logit. The peer (timm or transformers, on PyTorch) reads the source by its own means.
Matrix products run at the highest precision whatever JAX's default is set to.
"""

import dataclasses
import functools
import os
import tempfile

import numpy as np

from vitplast_jax import models, trees
from vitplast_jax.errors import UserError
from vitplast_jax.files import write_json
from vitplast_jax.weights import dialects, export, places, readers

TOLERANCES = {"cpu": 1e-5}  # of the backend; accelerators round differently even at highest precision
OTHER_TOLERANCE = 1e-4
PRECISION = "highest"


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
        spec, params: what came out of it.
    Raises: UserError: the peer is not installed, or cannot take these weights.
    """
    import jax
    import jax.numpy as jnp

    x = np.random.default_rng(seed).standard_normal((images, *spec.img_size, spec.in_chans)).astype(np.float32)
    name, answer = _peer(source, spec, params, report)
    expected = answer(x)
    with jax.default_matmul_precision(PRECISION):
        model = models.build(spec, trees.map_paths(lambda _, leaf: jnp.asarray(leaf, jnp.float32), params))
        ours = np.asarray(jax.jit(lambda x: model(x))(x))
    backend = jax.default_backend()
    tolerance = TOLERANCES.get(backend, OTHER_TOLERANCE)
    difference = float(np.abs(ours - expected).max() / np.abs(expected).max())
    return Verification(name, difference, tolerance, x.shape, backend)


def _peer(source, spec, params, report):
    """(the peer's name and version, a function from images to its logits)."""
    path = places.resolve(source)
    try:
        if report.dialect in (dialects.HF_CLASSIC.name, dialects.HF_FIVE.name):
            return _transformers(path, spec, report)
        return _timm(path, spec, params, report)
    except ImportError as error:
        raise UserError(
            f"--verify compares with the peer, but {error.name} is not installed: pip install '.[parity]'"
        ) from None


def _timm(path, spec, params, report):
    import timm
    import torch
    from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn

    model = VisionTransformer(**timm_arguments(spec)).eval()
    if report.dialect in (dialects.JAX_ORIGINAL.name, dialects.BIG_VISION.name):
        model.load_pretrained(path)
    else:
        if report.dialect == dialects.OURS.name:
            state = export.to_dialect(params, spec, dialects.TIMM)
        else:
            state = readers.read_tensors(path)
            state = {
                name.removeprefix(report.prefix): array for name, array in state.items() if name not in report.ignored
            }
        state = {name: _tensor(torch, array) for name, array in state.items()}
        if report.dialect == dialects.DINO_HUB.name:
            state.setdefault("mask_token", torch.zeros(1))  # by which timm knows these files
        if spec.num_classes == 0:
            state = {name: value for name, value in state.items() if not name.startswith("head.")}
        try:
            model.load_state_dict(checkpoint_filter_fn(state, model), strict=True)
        except RuntimeError as error:
            raise UserError(
                f"timm does not take the weights of {path}: {' '.join(str(error).split())[:300]}"
            ) from error
    return f"timm {timm.__version__}", _torch_answer(torch, model, lambda y: y)


def timm_arguments(spec):
    """The arguments of timm's VisionTransformer that give the same structure and numerics."""
    import torch

    return {
        "img_size": spec.img_size,
        "patch_size": spec.patch_size,
        "in_chans": spec.in_chans,
        "num_classes": spec.num_classes,
        "global_pool": spec.pool,
        "embed_dim": spec.width,
        "depth": spec.depth,
        "num_heads": spec.heads,
        "mlp_ratio": spec.hidden / spec.width,
        "qkv_bias": spec.qkv_bias,
        "init_values": spec.layer_scale,
        "class_token": spec.class_token,
        "no_embed_class": not spec.pos_prefix,
        "reg_tokens": spec.registers,
        "norm_layer": functools.partial(torch.nn.LayerNorm, eps=spec.eps),
        "act_layer": {"erf": torch.nn.GELU, "tanh": functools.partial(torch.nn.GELU, approximate="tanh")}[spec.gelu],
    }


def _transformers(path, spec, report):
    import torch
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        if not os.path.isdir(path):  # a bare file: the peer wants a config beside it
            config = export.hf_config(spec, None)
            write_json(os.path.join(folder, "config.json"), config)
            export.write_safetensors(
                readers.read_tensors(path), os.path.join(folder, "model.safetensors"), {"format": "pt"}
            )
            path = folder
        kind = transformers.ViTForImageClassification if spec.num_classes else transformers.ViTModel
        options = {} if spec.num_classes else {"add_pooling_layer": False}
        model = kind.from_pretrained(path, dtype=torch.float32, **options).eval()
    pick = (lambda y: y.logits) if spec.num_classes else (lambda y: y.last_hidden_state[:, 0])
    return f"transformers {transformers.__version__}", _torch_answer(torch, model, pick)


def _tensor(torch, array):
    """A float32 tensor; 16-bit types widen exactly."""
    wide = array.astype(np.float32) if array.dtype.itemsize <= 4 else array
    return torch.from_numpy(np.array(wide))


def _torch_answer(torch, model, pick):
    def answer(x):
        with torch.no_grad():
            return pick(model(torch.from_numpy(x).permute(0, 3, 1, 2))).float().numpy()

    return answer
