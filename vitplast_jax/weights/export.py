"""Our parameters as files that others load.

In: a tree (ours, any float dtype) and its spec. Out: safetensors in timm's names; transformers' folder; a folder of
ours (Orbax and model.json). All are written beside their place and moved there: of a file a kill leaves the old or the
new one, of a folder that is replaced the old one may be left under the name FOLDER.old.*.
"""

import json
import os
import shutil
import struct
import tempfile

import numpy as np

from vitplast_jax import models, trees
from vitplast_jax.errors import UserError
from vitplast_jax.files import replacing, write_json
from vitplast_jax.models import specs
from vitplast_jax.weights import convert, dialects, readers

_NAMES = {np.dtype(dtype): name for name, dtype in readers.SAFETENSORS_DTYPES.items()}


def to_dialect(params, spec, dialect):
    """name -> numpy array in a dialect's names and layout; the inverse of what `convert.load_tree` does.

    Args:
        params: the tree of a model of `spec`.
        dialect: one of `dialects.DIALECTS` whose layouts can be written.
    """
    flat = trees.flatten(params)
    expected = trees.flatten(models.abstract_parameters(spec))
    odd = sorted(flat.keys() ^ expected.keys())
    if odd:
        raise UserError(f"parameters do not belong to {spec.name}: {len(odd)} paths differ, e.g. {', '.join(odd[:5])}")
    result = {}
    for path in expected:
        rules = dialect.rules_for(path, spec.pool)
        if not rules or rules[0].layout.write is None:
            raise UserError(
                f"{path} has no place in the {dialect.name} layout; models of {spec.name} cannot be written so"
            )
        names = rules[0].names
        arrays = rules[0].layout.write(np.asarray(flat[path]), len(names))
        result.update(zip(names, arrays, strict=True))
    return result


def save_timm(params, spec, path, class_names=None):
    """Writes safetensors with timm's names, which `timm.create_model(NAME, checkpoint_path=path)` loads strictly.

    The file's metadata carries our spec, so that it can be loaded here without naming the model.
    """
    metadata = {"format": "pt", "vitplast_jax": json.dumps(describe(spec, class_names))}
    write_safetensors(to_dialect(params, spec, dialects.TIMM), path, metadata)


def save_hf(params, spec, folder, class_names=None):
    """Writes a folder for `transformers.ViTForImageClassification.from_pretrained` (`ViTModel` without a head)."""
    if not spec.class_token or spec.registers or spec.pool != "token" or spec.layer_scale or not spec.pos_prefix:
        raise UserError(
            f"{spec.name}: transformers' ViT has a class token, no registers, no LayerScale, no mean pooling"
        )
    if any(height != width for height, width in (spec.img_size, spec.patch_size)):
        raise UserError(f"{spec.name}: transformers' ViT takes square images and patches")
    tensors = to_dialect(params, spec, dialects.HF_CLASSIC)
    if spec.num_classes:  # the classifier stands beside the backbone, which then has a prefix
        tensors = {n if n.startswith("classifier") else f"vit.{n}": a for n, a in tensors.items()}
    config = hf_config(spec, class_names)
    os.makedirs(folder, exist_ok=True)
    told = spec.preprocessing
    if told is not None and told.resize == "squash":
        processor = {
            "image_processor_type": "ViTImageProcessor",
            "do_normalize": True,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": told.mean,
            "image_std": told.std,
            "resample": {"bilinear": 2, "bicubic": 3}[told.interpolation],
            "size": {"height": spec.img_size[0], "width": spec.img_size[1]},
        }
        write_json(os.path.join(folder, "preprocessor_config.json"), processor)
    write_safetensors(tensors, os.path.join(folder, "model.safetensors"), {"format": "pt"})
    write_json(os.path.join(folder, "config.json"), config)


def hf_config(spec, class_names):
    """config.json of transformers' ViT with this structure and these numerics."""
    names = class_names or [f"LABEL_{i}" for i in range(spec.num_classes)]
    return {
        "architectures": ["ViTForImageClassification" if spec.num_classes else "ViTModel"],
        "model_type": "vit",
        "hidden_size": spec.width,
        "num_hidden_layers": spec.depth,
        "num_attention_heads": spec.heads,
        "intermediate_size": spec.hidden,
        "hidden_act": {"erf": "gelu", "tanh": "gelu_pytorch_tanh"}[spec.gelu],
        "layer_norm_eps": spec.eps,
        "qkv_bias": spec.qkv_bias,
        "num_channels": spec.in_chans,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "image_size": spec.img_size[0],
        "patch_size": spec.patch_size[0],
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
    }


def save_folder(params, spec, folder, class_names=None, source=None):
    """Writes a folder of ours: `checkpoint/` (Orbax) and `model.json`, which `convert.load_tree` reads.

    Refuses to replace a folder that holds anything else.
    """
    import orbax.checkpoint as ocp

    folder = os.path.abspath(folder)
    if os.path.isdir(folder) and set(os.listdir(folder)) - {convert.CHECKPOINT, "model.json"}:
        raise UserError(f"{folder}: holds other files; give a new or an empty folder")
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    working, aside = (
        tempfile.mkdtemp(prefix=f"{os.path.basename(folder)}.{kind}.", dir=os.path.dirname(folder))
        for kind in ("new", "old")
    )
    try:
        tree = trees.map_paths(lambda _, leaf: np.ascontiguousarray(leaf), params)
        handler = ocp.PyTreeCheckpointHandler(use_compression=False)  # half the memory and twice as fast (FACTS)
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(os.path.join(working, convert.CHECKPOINT), _string_keys(tree))
        write_json(
            os.path.join(working, "model.json"), describe(spec, class_names) | ({"source": source} if source else {})
        )
        os.chmod(working, 0o755)
        former = os.path.join(aside, "old")
        if os.path.isdir(folder):
            os.rename(folder, former)
        try:
            os.replace(working, folder)
        except OSError:
            if os.path.isdir(former):
                os.rename(former, folder)
            raise
    finally:
        shutil.rmtree(working, ignore_errors=True)
        shutil.rmtree(aside, ignore_errors=True)


def describe(spec, class_names=None):
    """What model.json holds: the spec, with its preprocessing, and the classes' names."""
    return {"spec": specs.to_dict(spec), "class_names": list(class_names) if class_names else None}


def _string_keys(tree):
    return {str(key): _string_keys(value) if isinstance(value, dict) else value for key, value in tree.items()}


def write_safetensors(tensors, path, metadata):
    """Writes name -> array as safetensors, in the order of the names, one tensor in memory at a time."""
    header, place = {"__metadata__": metadata}, 0
    for name in sorted(tensors):
        array = tensors[name]
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [place, place + array.nbytes],
        }
        place += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    with replacing(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in sorted(tensors):
            file.write(np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8))
