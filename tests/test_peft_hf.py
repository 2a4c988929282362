"""Real timm and transformers with real peft against ours, with the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vitplast_jax import components, models, peft, trees
from vitplast_jax.errors import UserError
from vitplast_jax.models import specs

SPEC = specs.ViTSpec("vit_test", (16, 16), (8, 8), width=16, depth=2, heads=2, hidden=32, num_classes=3)
IMAGES = np.random.RandomState(0).randn(2, 16, 16, 3).astype(np.float32)


def moved(model):
    """Every leaf elsewhere; of the base only head, final norm and the first LayerNorms, as if they had been trained."""
    params = models.parameters(model)
    mask = trees.flatten(components.mask(params, ("peft", "head", "final_norm", "ln1@1")))
    moved = {
        path: leaf + 0.1 * mask[path] * jax.random.normal(jax.random.key(len(path)), leaf.shape)
        for path, leaf in trees.flatten(params).items()
    }
    return models.with_parameters(model, trees.unflatten(moved))


def logits_of(net, call):
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        return call(net.eval(), torch.from_numpy(np.ascontiguousarray(IMAGES.transpose(0, 3, 1, 2)))).numpy()


def timm_net(model):
    timm, torch = pytest.importorskip("timm"), pytest.importorskip("torch")
    from vitplast_jax.weights import dialects, export

    net = timm.models.vision_transformer.VisionTransformer(
        img_size=16, patch_size=8, embed_dim=16, depth=2, num_heads=2, mlp_ratio=2, num_classes=3
    )
    tensors = export.to_dialect(models.parameters(model), model.spec, dialects.TIMM)
    net.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in tensors.items()})
    return net


LORAS = {
    "free": {"rank": 4, "alpha": 8.0, "targets": ("q", "v", "fc2@0")},
    "everything": {"ranks": (2, 5), "targets": ("qkv", "out", "fc1", "fc2")},
    "ao from zero": {"rank": 4, "projection": "ao"},
    "ao scales": {"rank": 4, "projection": "ao", "scales": True, "targets": ("k", "fc1")},
    "ao plain": {"rank": 16, "projection": "ao", "start": "plain", "targets": ("v",)},
}


@pytest.mark.parity
@pytest.mark.parametrize("name", LORAS)
def test_lora_on_timm(name, tmp_path):
    hf = pytest.importorskip("peft")
    base = models.create_model(SPEC)
    model = moved(peft.attach(base, **LORAS[name]))
    peft.save_hf_peft(model, tmp_path)
    net = hf.PeftModel.from_pretrained(timm_net(base), tmp_path)
    assert sum("lora" in path for path, _ in net.named_parameters()) > 0
    np.testing.assert_allclose(logits_of(net, lambda n, x: n(x)), model(jnp.asarray(IMAGES)), atol=1e-5)
    assert np.abs(np.asarray(model(jnp.asarray(IMAGES)) - base(jnp.asarray(IMAGES)))).max() > 1e-2


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft uses an old name
@pytest.mark.parametrize("name", ["free", "ao from zero"])
def test_lora_on_transformers(name, tmp_path):
    hf, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    from vitplast_jax.weights import export

    spec = specs.replace(SPEC, eps=1e-12)
    base = models.create_model(spec)
    export.save_hf(models.parameters(base), spec, tmp_path / "base")
    model = moved(peft.attach(base, **LORAS[name]))
    major = int(transformers.__version__.split(".")[0])
    peft.save_hf_peft(model, tmp_path / "adapter", base="hf" if major >= 5 else "hf4")
    net = transformers.ViTForImageClassification.from_pretrained(tmp_path / "base")
    net = hf.PeftModel.from_pretrained(net, tmp_path / "adapter")
    np.testing.assert_allclose(
        logits_of(net, lambda n, x: n(pixel_values=x).logits), model(jnp.asarray(IMAGES)), atol=1e-5
    )


def leaf_of(model, block, name):
    return np.array(getattr(model.blocks[block].attn.qkv.slot.qkv, name)[...])


@pytest.mark.parity
@pytest.mark.parametrize("method, leaf", [("oft", "skew"), ("hra", "reflections")])
def test_oft_and_hra_on_timm(method, leaf):
    hf, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    base = models.create_model(SPEC)
    model = moved(peft.attach(base, method=method, rank=4))
    plain = models.with_parameters(base, components_of_base(model))
    told = {"target_modules": ["qkv"]}
    if method == "oft":  # their Neumann series, taken far enough, is the exact Cayley transform
        config = hf.OFTConfig(r=0, oft_block_size=4, use_cayley_neumann=True, num_cayley_neumann_terms=60, **told)
    else:
        config = hf.HRAConfig(r=4, **told)
    net = hf.get_peft_model(timm_net(plain), config)
    with torch.no_grad():
        for index in range(SPEC.depth):
            qkv = net.base_model.model.blocks[index].attn.qkv
            target = qkv.oft_R["default"].weight if method == "oft" else qkv.hra_u["default"]
            target.copy_(torch.from_numpy(leaf_of(model, index, leaf)))
    np.testing.assert_allclose(logits_of(net, lambda n, x: n(x)), model(jnp.asarray(IMAGES)), atol=1e-5)


@pytest.mark.parity
def test_boft_on_timm(monkeypatch):
    """Two factors, which HF peft takes only with its CUDA kernel: that one function is replaced by torch's own."""
    hf, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    layer = pytest.importorskip("peft.tuners.boft.layer")

    class BlockDiagonal:
        @staticmethod
        def apply(factors):
            return torch.stack([torch.block_diag(*torch.unbind(blocks)) for blocks in factors])

    monkeypatch.setattr(layer, "get_fbd_cuda", lambda: True)
    monkeypatch.setattr(layer, "FastBlockDiag", BlockDiagonal)
    base = models.create_model(SPEC)
    model = moved(peft.attach(base, method="boft", rank=8))
    told = {"boft_block_size": 8, "boft_n_butterfly_factor": 2, "target_modules": ["qkv"]}
    net = hf.get_peft_model(timm_net(models.with_parameters(base, components_of_base(model))), hf.BOFTConfig(**told))
    rows, columns = np.triu_indices(8, 1)
    for index in range(SPEC.depth):
        qkv = net.base_model.model.blocks[index].attn.qkv
        upper = leaf_of(model, index, "skew")
        assert qkv.boft_R["default"].shape[:2] == upper.shape[:2] == (2, 2)
        # Their Cayley transform is (I - S)(I + S)^-1 of the skew part of a full matrix.
        skew = np.zeros((2, 2, 8, 8), np.float32)
        skew[..., rows, columns] = -upper
        with torch.no_grad():
            qkv.boft_R["default"].copy_(torch.from_numpy(skew - skew.swapaxes(-1, -2)))
            qkv.boft_s["default"].copy_(torch.from_numpy(leaf_of(model, index, "scale"))[:, None])
    np.testing.assert_allclose(logits_of(net, lambda n, x: n(x)), model(jnp.asarray(IMAGES)), atol=1e-5)
    assert np.abs(np.asarray(model(jnp.asarray(IMAGES)) - base(jnp.asarray(IMAGES)))).max() > 1e-2


def components_of_base(model):
    flat = trees.flatten(models.parameters(model))
    return trees.unflatten({path: leaf for path, leaf in flat.items() if components.locate(path).component != "peft"})


def test_what_the_format_cannot_hold_is_said(tmp_path):
    base = models.create_model(SPEC)
    with pytest.raises(UserError, match="holds LoRA; the model has adapter"):
        peft.save_hf_peft(peft.attach(base, method="adapter"), tmp_path)
    model = peft.attach(base, rank=2)
    params = trees.map_paths(lambda path, x: x + 1.0 if path.endswith("qkv/bias") else x, models.parameters(model))
    with pytest.raises(UserError, match=r"blocks.0.attn.qkv was trained besides its LoRA"):
        peft.save_hf_peft(models.with_parameters(model, params), tmp_path)
    params = trees.map_paths(lambda path, x: x + 1.0 if path == "pos_embed" else x, models.parameters(model))
    with pytest.raises(UserError, match="pos_embed was trained, which the peft layout cannot hold"):
        peft.save_hf_peft(models.with_parameters(model, params), tmp_path)
    assert not list(tmp_path.iterdir())
