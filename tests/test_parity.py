"""Live peers at full width, five of them at full depth too: their logits, at two sizes, through both layouts and back.

The differences are printed (`-s`), for the table in the README.
"""

import dataclasses
import json

import goldens
import jax
import numpy as np
import pytest

from vitplast_jax import models, trees
from vitplast_jax.errors import UserError
from vitplast_jax.models import specs
from vitplast_jax.weights import convert, export, readers, verify

pytestmark = pytest.mark.parity
TOLERANCE = 1e-5

# timm's name -> its arguments, a second image size. Two blocks where `depth` is not told; twelve are the whole model.
TIMM = {
    "vit_base_patch16_224": ({"depth": 12, "img_size": 224}, (160, 192)),
    "deit_small_distilled_patch16_224": ({"depth": 12, "img_size": 224}, (160, 192)),
    "vit_small_patch14_reg4_dinov2": ({"depth": 12, "img_size": 518, "num_classes": 0}, (224, 280)),
    "vit_small_patch16_dinov3_qkvb": ({"depth": 12, "num_classes": 0, "global_pool": "token"}, (160, 192)),
    "vit_small_patch14_dinov2": ({"img_size": 70, "num_classes": 0}, (42, 84)),
    "vit_giant_patch14_reg4_dinov2": ({"img_size": 42, "num_classes": 0, "depth": 1}, None),
    "vit_small_plus_patch16_dinov3": ({"num_classes": 10, "global_pool": "avg"}, (48, 80)),
    "vit_huge_plus_patch16_dinov3": ({"num_classes": 0, "global_pool": "token", "depth": 1}, None),
    "vit_base_patch16_siglip_gap_224": ({"img_size": 64, "num_classes": 10, "depth": 1}, (48, 80)),
}
# model_type -> class, arguments of its config, a second image size
HF = {
    "vit": ("ViTForImageClassification", {"image_size": 64, "num_labels": 10}, 96),
    "deit": ("DeiTForImageClassificationWithTeacher", {"image_size": 64, "num_labels": 10}, 96),
    "vit_mae": ("ViTMAEModel", {"image_size": 64, "mask_ratio": 0.0}, None),
    "dinov2": (
        "Dinov2ForImageClassification",
        {"image_size": 70, "patch_size": 14, "mlp_ratio": 4, "num_labels": 10},
        98,
    ),
    "dinov2_with_registers": ("Dinov2WithRegistersModel", {"image_size": 70, "patch_size": 14}, 98),
    "dinov3_vit": ("DINOv3ViTModel", {"image_size": 64, "num_register_tokens": 4}, 96),
    "dinov3_vit gated": (
        "DINOv3ViTModel",
        {"image_size": 64, "num_register_tokens": 4, "use_gated_mlp": True, "hidden_act": "silu"},
        96,
    ),
    "gpt2": ("GPT2LMHeadModel", {}, 48),  # words
}


def drawn(torch, model):
    """Every parameter at random, so that a part that was skipped shows."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = parameter.shape[1] ** -0.5 if parameter.ndim == 2 and "token" not in name else 0.2
            one = 1.0 if parameter.ndim == 1 and name.endswith("weight") else 0.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale + one)
    return model.eval()


_apply = jax.jit(models.apply, static_argnums=0)


def ours(spec, tree, x):
    with jax.default_matmul_precision("highest"):
        return np.asarray(_apply(models.structure(spec), tree, {}, x))


def check(what, answer, expected):
    found = float(np.abs(answer - expected).max() / np.abs(expected).max())
    print(f"\nPARITY {what}: {found:.2e}")
    assert found < TOLERANCE


def scale_of(spec):
    """What a file's LayerScale was initialised with is not in it; only that there is one counts."""
    return {"layer_scale": spec.layer_scale} if isinstance(spec, specs.ViTSpec) else {}


def same_tree(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def same_bytes(a, b):
    assert a.keys() == b.keys()
    differing = [name for name in a if a[name].tobytes() != b[name].tobytes()]
    assert [name for name in differing if not name.endswith("mask_token")] == []


def through_layouts(name, spec, tree, x, expected, tmp_path, source, native):
    """Exports in each layout that can hold the model; the peer reads it, and we; the native one keeps its bytes."""
    for layout, save in (("timm", export.save_timm), ("hf", export.save_hf)):
        out = tmp_path / layout
        try:
            save(tree, spec, out)
        except UserError as error:
            assert layout != native
            print(f"\nPARITY {name} -> {layout}: {error}")
            continue
        again, params, report = convert.load_tree(out)
        result = verify.verify(out, again, params, report, images=len(x))
        print(f"\nPARITY {name} -> {layout} read by {result.peer}: {result.difference:.2e}")
        assert result.passed
        if dataclasses.replace(again, name=spec.name, **scale_of(spec)) != spec or not same_tree(params, tree):
            check(f"{name} -> {layout} -> ours", ours(again, params, x), expected)
        if layout == native:
            same_bytes(readers.read_tensors(source), readers.read_tensors(out))


@pytest.mark.parametrize("name", TIMM)
def test_timm(name, tmp_path):
    timm = pytest.importorskip("timm")
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    arguments, other = TIMM[name]
    arguments = {"depth": 2, "num_classes": 1000} | arguments
    peer = drawn(torch, timm.create_model(name, **arguments))
    path = tmp_path / "source.safetensors"
    safetensors.save_file(peer.state_dict(), path)
    rope = "dinov3" in name
    size = peer.patch_embed.img_size[0]
    if "gap" in name:  # its own names and norm say it all but the heads
        spec, tree, _ = convert.load_tree(path)
        assert not spec.fc_norm and spec.pool == "avg"
    else:
        told = {"depth": arguments["depth"], "num_classes": arguments["num_classes"], "img_size": size}
        told |= {"pool": "avg", "fc_norm": False} if arguments.get("global_pool") == "avg" else {}
        spec, tree, _ = convert.load_tree(path, spec=specs.spec(name, **told))
        found, bare, _ = convert.load_tree(path, img_size=size)  # what the file alone says
        assert (found.heads, found.gated, found.rope, found.hidden) == (spec.heads, spec.gated, spec.rope, spec.hidden)
        assert same_tree(bare, tree)
    count = 1 if arguments["depth"] == 12 else 2
    x = goldens.images((count, size, size, 3))

    def answer(model, x):
        with torch.no_grad():
            return model(torch.from_numpy(x).permute(0, 3, 1, 2)).numpy()

    expected = answer(peer, x)
    check(name, ours(spec, tree, x), expected)
    if other:
        bigger = peer if rope else timm.create_model(name, **arguments | {"img_size": other}).eval()
        if not rope:
            prepare = timm.models.vision_transformer.checkpoint_filter_fn
            bigger.load_state_dict(prepare(safetensors.load_file(path), bigger), strict=True)
        wide, params, _ = convert.load_tree(path, spec=spec, img_size=other)
        x2 = goldens.images((count, *other, 3))
        check(f"{name} at {other}", ours(wide, params, x2), answer(bigger, x2))
    through_layouts(name, spec, tree, x, expected, tmp_path, path, "timm")


@pytest.mark.parametrize("name", HF)
def test_transformers(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    kind, arguments, other = HF[name]
    kind = getattr(transformers, kind)
    common = {"hidden_size": 384, "num_hidden_layers": 2, "num_attention_heads": 6}
    common |= {} if "dinov2" in name else {"intermediate_size": 1536}
    config = kind.config_class(**({} if name == "gpt2" else common) | arguments)
    peer = drawn(torch, kind(config))
    path = tmp_path / "source"
    peer.save_pretrained(path)
    spec, tree, report = convert.load_tree(path)
    options = {"noise": torch.arange(16.0)[None].repeat(2, 1)} if name == "vit_mae" else {}

    def answer(x, **more):
        tensor = torch.from_numpy(x)
        with torch.no_grad():
            y = peer(tensor.permute(0, 3, 1, 2) if x.ndim == 4 else tensor.long(), **options, **more)
        return (y.logits if hasattr(y, "logits") else y.last_hidden_state[:, 0]).numpy()

    x = verify.inputs(spec, 2, 0)
    expected = answer(x)
    check(name, ours(spec, tree, x), expected)
    if other and name == "gpt2":
        x2 = np.random.default_rng(1).integers(0, spec.vocabulary, (2, other), dtype=np.int32)
        check(f"{name}, {other} words", ours(spec, tree, x2), answer(x2))
    elif other:
        wide, params, _ = convert.load_tree(path, img_size=other)
        x2 = goldens.images((2, other, other, 3))
        more = {"interpolate_pos_encoding": True} if name in ("vit", "deit") else {}
        check(f"{name} at {other}", ours(wide, params, x2), answer(x2, **more))
    if name != "vit_mae":  # written as the plain ViT that its encoder is
        through_layouts(name, spec, tree, x, expected, tmp_path, path / "model.safetensors", "hf")
    else:
        export.save_hf(tree, spec, tmp_path / "hf")
        same_bytes(readers.read_tensors(path), readers.read_tensors(tmp_path / "hf"))


def test_snapshot_of_the_hub_in_its_cache(tmp_path, monkeypatch):
    """hf-hub:ID finds a folder of real transformers where huggingface_hub keeps it, and asks nobody."""
    transformers = pytest.importorskip("transformers")
    constants = pytest.importorskip("huggingface_hub.constants")
    config = transformers.ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    config.image_size, config.patch_size = 16, 4
    peer = transformers.ViTModel(config, add_pooling_layer=False)
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--owner--name"
    snapshot = repository / "snapshots" / commit
    peer.save_pretrained(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    spec, tree, report = convert.load_tree("hf-hub:owner/name")
    assert report.dialect == "transformers" and spec.eps == 1e-12 and spec.heads == 2
    assert trees.count(tree) == sum(p.numel() for p in peer.parameters())
    told = json.loads((snapshot / "config.json").read_text())
    assert told["model_type"] == "vit"
