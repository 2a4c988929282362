"""The goldens of tests/data/weights (made by tools/make_golden.py): their inputs, answers and structures."""

import json
import pathlib

import jax
import numpy as np

from vitplast_jax.models import ViTSpec
from vitplast_jax.weights import readers

DATA = pathlib.Path(__file__).parent / "data" / "weights"


def golden(name):
    return json.loads((DATA / f"{name}.golden.json").read_text())


def small(**changes):
    """The spec of make_golden.SMALL."""
    fields = {
        "name": "small",
        "img_size": (16, 16),
        "patch_size": (4, 4),
        "width": 16,
        "depth": 2,
        "heads": 2,
        "hidden": 48,
        "num_classes": 7,
        "preprocessing": None,
    }
    return ViTSpec(**fields | changes)


SPECS = {
    "token": small(),
    "avg": small(pool="avg"),
    "registers": small(registers=3, pos_prefix=False, layer_scale=0.1),
    "oblong": small(img_size=(12, 20), registers=2, qkv_bias=False, in_chans=1),
    "classless": small(class_token=False, pool="avg", pos_prefix=False),
    "jax": small(),
    "hf": small(eps=1e-12, antialias=False),
}
FILES = {name: DATA / {"jax": "jax.npz", "hf": "hf"}.get(name, f"{name}.safetensors") for name in SPECS}


def tensors_of(name):
    """A golden's tensors as writable copies."""
    return {key: np.array(value) for key, value in readers.read_tensors(FILES[name]).items()}


def images(shape, seed=20261130):
    """What make_golden.images draws."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def answer(model, x):
    """The model's logits at the highest precision, compiled as one program (quicker than op by op)."""
    with jax.default_matmul_precision("highest"):
        return np.asarray(jax.jit(lambda x: model(x))(x))


def difference(model, name):
    """The largest difference of a model's logits from the golden's, relative to the largest logit."""
    told = golden(name)
    ours = answer(model, images(told["input"]))
    expected = np.array(told["logits"])
    return np.abs(ours - expected).max() / np.abs(expected).max()
