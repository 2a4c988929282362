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
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from vitplast_jax import models, trees
from vitplast_jax.errors import UserError
from vitplast_jax.files import replacing, write_json
from vitplast_jax.models import specs
from vitplast_jax.weights import convert, dialects, readers, transformers_layout

_TILE = 128  # of a transposed matrix: both sides of a copy stay in the cache
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
    result, parts = {}, {}
    for path in expected:
        rule = _written(dialect.rules_for(path, getattr(spec, "norm_on", "tokens")), spec)
        if rule is None:
            raise UserError(
                f"{path} has no place in the {dialect.name} layout; models of {spec.name} cannot be written so"
            )
        arrays = rule.layout.write(np.asarray(flat[path]), len(rule.names))
        if rule.part:
            parts.setdefault(rule.names[0], {})[rule.part[0]] = arrays[0]
        result.update((name, array) for name, array in zip(rule.names, arrays, strict=True) if name)
    for name, found in parts.items():
        result[name] = np.concatenate([found[k] for k in sorted(found)])
    return result


def _written(rules, spec):
    """The first rule that can be written; one that leaves the keys' bias out only where it is not used."""
    for rule in rules:
        if rule.layout.write is not None and (None not in rule.names or not spec.key_bias):
            return rule
    return None


def timm_dialect(spec):
    """Whose names timm's class for this model has: VisionTransformer's or Eva's (DINOv3), packed gates or not."""
    if isinstance(spec, specs.GPT2Spec):
        raise UserError(f"{spec.name}: timm has no language models; export with --layout hf")
    if spec.num_classes and spec.pool == "token+avg":
        raise UserError(f"{spec.name}: timm has no head that reads class token and mean; export with num_classes=0")
    if spec.rope:
        return dialects.TIMM_EVA_GATED if spec.gated else dialects.TIMM_EVA
    return dialects.TIMM_GATED if spec.gated else dialects.TIMM


def timm_tensors(params, spec):
    """(name -> array in timm's names, the spec of what timm then has).

    timm has no row of positions for the class token of models with registers: it is added to the token.
    """
    dialect = timm_dialect(spec)
    if spec.pos_embed and spec.pos_prefix == "class" and spec.prefix > 1:
        flat = dict(trees.flatten(params))
        table = np.asarray(flat["pos_embed"])
        flat["cls_token"], flat["pos_embed"] = np.asarray(flat["cls_token"]) + table[:, :1], table[:, 1:]
        params, spec = trees.unflatten(flat), specs.replace(spec, pos_prefix="none")
    return to_dialect(params, spec, dialect), spec


def save_timm(params, spec, path, class_names=None):
    """Writes safetensors with timm's names, which `timm.create_model(NAME, checkpoint_path=path)` loads strictly.

    The file's metadata carries our spec, so that it can be loaded here without naming the model.
    """
    tensors, spec = timm_tensors(params, spec)
    metadata = {"format": "pt", "vitplast_jax": json.dumps(describe(spec, class_names))}
    write_safetensors(tensors, path, metadata)


def save_hf(params, spec, folder, class_names=None):
    """Writes a folder for `from_pretrained` of the class that transformers has for it (config.json names it)."""
    tensors = transformers_layout.tensors(params, spec, to_dialect)
    config = transformers_layout.config(spec, class_names)
    os.makedirs(folder, exist_ok=True)
    processor = _processor(spec)
    if processor:
        write_json(os.path.join(folder, "preprocessor_config.json"), processor)
    write_safetensors(tensors, os.path.join(folder, "model.safetensors"), {"format": "pt"})
    write_json(os.path.join(folder, "config.json"), config)


def _processor(spec):
    """preprocessor_config.json, None where the preprocessing is unknown or cannot be said so."""
    told = spec.preprocessing
    if told is None:
        return None
    size = {"height": spec.img_size[0], "width": spec.img_size[1]}
    result = {
        "image_processor_type": "ViTImageProcessor" if told.resize == "squash" else "BitImageProcessor",
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": told.mean,
        "image_std": told.std,
        "resample": {"bilinear": 2, "bicubic": 3}[told.interpolation],
        "size": size,
    }
    if told.resize == "squash":
        return result
    edge = round(spec.img_size[0] / told.crop_pct)
    return result | {"do_center_crop": True, "size": {"shortest_edge": edge}, "crop_size": size}


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
        # Without compression and without Orbax's copies a leaf is held once beside the mapped source.
        kinds = ocp.type_handlers
        arrays = kinds.create_type_handler_registry((np.ndarray, kinds.NumpyHandler(deepcopy_host_arrays=False)))
        handler = ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=arrays)
        flat = trees.flatten(params)
        with ThreadPoolExecutor() as pool:  # copies of arrays release the interpreter's lock
            leaves = pool.map(lambda leaf: contiguous(np.asarray(leaf)), flat.values())
            tree = trees.unflatten(dict(zip(flat, leaves, strict=True)))
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
            file.write(contiguous(tensors[name]).reshape(-1).view(np.uint8))


def contiguous(array):
    """The array in C order, itself where it is already; matrices tile by tile, twice as fast as numpy copies them."""
    if array.flags.c_contiguous or array.ndim != 2:
        return np.ascontiguousarray(array)
    result = np.empty(array.shape, array.dtype)
    for top in range(0, array.shape[0], _TILE):
        for left in range(0, array.shape[1], _TILE):
            tile = slice(top, top + _TILE), slice(left, left + _TILE)
            result[tile] = array[tile]
    return result
