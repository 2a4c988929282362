"""Where do the weights of this name lie, which bytes are they, and what stands beside them about the model?

In: a file, a folder, a shipped name ("vit_pico_...") or "hf-hub:ID". Out: a path; its sha256; a `Description`.
"""

import dataclasses
import glob
import hashlib
import json
import os

from vitplast_jax import files
from vitplast_jax.errors import UserError
from vitplast_jax.models import specs

ASSETS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "assets")
HUB = "hf-hub:"
_GELUS = {"gelu": "erf", "gelu_python": "erf", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu_fast": "tanh"}


@dataclasses.dataclass(frozen=True)
class Description:
    """What is known of a model from outside its tensors. `spec`: all of it, or None; `fields`: single fields of a
    `ViTSpec`; `class_names`: tuple or None; `origin`: which file said so."""

    spec: specs.ViTSpec | None = None
    fields: dict = dataclasses.field(default_factory=dict)
    class_names: tuple | None = None
    origin: str = ""


def resolve(name):
    """The path of a source of weights: an existing path, a shipped name, or a downloaded hf-hub:ID."""
    name = os.fspath(name)
    if name.startswith(HUB):
        return _download(name.removeprefix(HUB))
    if files.in_bucket(name):
        return files.fetched(name)
    if os.path.exists(name):
        return name
    shipped = os.path.join(ASSETS, name + ".safetensors")
    if os.path.basename(name) == name and os.path.isfile(shipped):
        return shipped
    names = sorted(os.path.basename(path)[: -len(".safetensors")] for path in glob.glob(f"{ASSETS}/*.safetensors"))
    known = ", ".join(names) or "none here"
    raise UserError(f"{name}: no such weights; give a file, a folder, hf-hub:ID or a shipped name ({known})")


def _download(identifier):
    try:
        import huggingface_hub
    except ImportError:
        raise UserError(f"{HUB}{identifier} needs the package huggingface_hub (pip install huggingface_hub)") from None
    patterns = ["*.json", "*.safetensors"]
    try:
        folder = huggingface_hub.snapshot_download(identifier, allow_patterns=patterns)
        if not glob.glob(f"{folder}/*.safetensors"):
            folder = huggingface_hub.snapshot_download(identifier, allow_patterns=["*.json", "pytorch_model*.bin"])
    except Exception as error:  # the hub's client raises errors of many libraries; all mean that it did not arrive
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:160]
        raise UserError(
            f"{HUB}{identifier}: not in the cache and not to be had ({reason}); give a local file"
        ) from error
    return folder


def identity(name):
    """{"source", "sha256"} of the bytes that a source holds now; of a folder, all its weights in the order of names."""
    path = resolve(name)
    files = [path]
    if os.path.isdir(path):
        found = glob.glob(f"{path}/**/*", recursive=True)
        files = sorted(f for f in found if os.path.isfile(f) and not f.endswith((".json", ".md")))
    digest = hashlib.sha256()
    for file in files:
        with open(file, "rb") as stream:
            while block := stream.read(2**22):
                digest.update(block)
    return {"source": os.fspath(name), "sha256": digest.hexdigest()}


def describe(path, metadata):
    """What the files beside the weights, or the weights file's own metadata, say of the model."""
    try:
        return _describe(path, metadata)
    except UserError:
        raise
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:160]
        raise UserError(f"{path}: what describes its model is damaged ({reason}); get its JSON files again") from error


def _describe(path, metadata):
    if os.path.isdir(path):
        own = os.path.join(path, "model.json")
        if os.path.isfile(own):
            return _own(own)
        config = os.path.join(path, "config.json")
        if os.path.isfile(config):
            return _foreign(config)
    beside = os.path.splitext(path)[0] + ".json"
    if os.path.isfile(beside) and "spec" in _read_json(beside):
        return _own(beside)
    if "vitplast_jax" in metadata:
        return _own_text(metadata["vitplast_jax"], f"the metadata of {path}")
    return Description()


def _read_json(path):
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds a {type(content).__name__}, expected an object")
    return content


def _own(path):
    return _own_fields(_read_json(path), path)


def _own_text(text, origin):
    try:
        return _own_fields(json.loads(text), origin)
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{origin}: cannot be read as JSON ({error})") from error


def _own_fields(content, origin):
    try:
        spec = specs.from_dict(content["spec"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{origin}: its spec cannot be read ({type(error).__name__}: {error})") from error
    names = content.get("class_names")
    return Description(spec, class_names=tuple(names) if names else None, origin=origin)


def _foreign(path):
    """config.json of a transformers or a timm folder."""
    config = _read_json(path)
    try:
        if "architecture" in config:
            return _timm(config, path)
        if config.get("model_type") in ("vit", "deit", "vit_mae", "dinov2", "dinov2_with_registers", "dinov3_vit"):
            return _transformers(config, path)
        if config.get("model_type") == "gpt2":
            return _gpt2(config, path)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: cannot be understood ({type(error).__name__}: {error})") from error
    raise UserError(
        f"{path}: describes {config.get('model_type')!r}; known: model_type vit, deit, vit_mae, dinov2, "
        "dinov2_with_registers, dinov3_vit, gpt2, or timm's architecture"
    )


def _timm(config, path):
    told = config.get("pretrained_cfg", {})
    fields = {}
    try:
        fields = named_fields(specs.spec(config["architecture"]))
        fields["name"] = config["architecture"]
    except UserError:
        pass  # a name of timm's that is not ours: the structure then comes from the tensors
    fields["preprocessing"] = None
    resize = {"center": "shorter", "squash": "squash"}.get(told.get("crop_mode", "center"))
    if "mean" in told and "std" in told and resize:
        fields["preprocessing"] = specs.Preprocessing(
            tuple(told["mean"]),
            tuple(told["std"]),
            told.get("interpolation", "bicubic"),
            float(told.get("crop_pct", 0.875)),
            resize,
        )
    if config.get("global_pool") == "avg":
        fields["pool"] = "avg"
    if "input_size" in told and not told.get("global_pool") == "map":
        fields["img_size"] = tuple(told["input_size"][1:])
    names = told.get("label_names") or config.get("label_names")
    return Description(fields=fields, class_names=tuple(names) if names else None, origin=path)


def _transformers(config, path):
    kind = config["model_type"]
    activation = config.get("hidden_act", "gelu")
    gated = config.get("use_gated_mlp") or config.get("use_swiglu_ffn")
    if kind == "dinov3_vit" and gated and activation != "silu":
        raise UserError(f"{path}: hidden_act {activation!r} with a gated MLP; only 'silu' (SwiGLU) is known here")
    if not gated and activation not in _GELUS:
        raise UserError(f"{path}: hidden_act {activation!r} is not among {', '.join(_GELUS)}")
    # The defaults of each config class of transformers.
    epsilon = {"dinov2": 1e-6, "dinov2_with_registers": 1e-6, "dinov3_vit": 1e-5}.get(kind, 1e-12)
    size = config.get("image_size", 224)
    fields = {
        "gelu": _GELUS.get(activation, "erf"),
        "eps": float(config.get("layer_norm_eps", epsilon)),
        "heads": int(config.get("num_attention_heads", 6 if kind == "dinov3_vit" else 12)),
        "img_size": specs.pair(size if isinstance(size, int) else tuple(size)),
        "preprocessing": _transformers_preprocessing(os.path.join(os.path.dirname(path), "preprocessor_config.json")),
    }
    if kind == "dinov3_vit":
        fields["rope"] = specs.Rope(theta=float(config.get("rope_theta", 100.0)))
    labels = config.get("id2label") or {}
    names = tuple(labels[key] for key in sorted(labels, key=int))
    generic = all(name == f"LABEL_{i}" for i, name in enumerate(names))
    return Description(fields=fields, class_names=None if generic else names, origin=path)


def _gpt2(config, path):
    activation = config.get("activation_function", "gelu_new")
    odd = [key for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention") if config.get(key)]
    odd += (
        []
        if config.get("tie_word_embeddings", True) and config.get("scale_attn_weights", True)
        else ["its head or scale"]
    )
    if activation not in _GELUS or odd:
        raise UserError(f"{path}: {', '.join(odd) or activation} is not what GPT-2 has here")
    fields = {
        "gelu": _GELUS[activation],
        "eps": float(config.get("layer_norm_epsilon", 1e-5)),
        "heads": int(config.get("n_head", 12)),
    }
    return Description(fields=fields, origin=path)


def _transformers_preprocessing(path):
    """What transformers' image processor does, or None where it does something else than ours."""
    if not os.path.isfile(path):
        return None
    told = _read_json(path)
    interpolation = {2: "bilinear", 3: "bicubic"}.get(told.get("resample", 2))
    if not (interpolation and told.get("do_normalize", True) and told.get("do_resize", True)):
        return None
    if "image_mean" not in told or "image_std" not in told:
        return None
    size, crop = told.get("size", 224), told.get("crop_size")
    if not told.get("do_center_crop", False):
        if not (isinstance(size, int) or {"height", "width"} <= set(size)):
            return None
        resize, crop_pct = "squash", 1.0
    else:
        sides = {crop} if isinstance(crop, int) else set((crop or {}).values())
        if isinstance(size, int) or set(size) != {"shortest_edge"} or len(sides) != 1:
            return None
        resize, crop_pct = "shorter", sides.pop() / size["shortest_edge"]
    return specs.Preprocessing(tuple(told["image_mean"]), tuple(told["image_std"]), interpolation, crop_pct, resize)


def named_fields(spec):
    """The fields that a model's name fixes; tokens, pooling, biases and classes are left to the tensors."""
    fixed = ("name", "img_size", "patch_size", "width", "depth", "heads", "hidden", "gelu", "eps", "preprocessing")
    fixed += ("antialias", "pos_offset", "rope", "key_bias")
    return {field: getattr(spec, field) for field in fixed if hasattr(spec, field)}
