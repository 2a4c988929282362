"""From files of other projects to our tree: the peers' logits, and every way in which a file can fail to fit."""

import json
import logging
import os
import shutil

import goldens
import ml_dtypes
import numpy as np
import pytest

from vitplast_jax import models, trees
from vitplast_jax.errors import UserError
from vitplast_jax.models import specs
from vitplast_jax.weights import convert, dialects, export, places, readers, structure, view


def written(tensors, path):
    export.write_safetensors(tensors, path, {})
    return path


def loaded(path, spec, **options):
    return convert.load_tree(path, spec=spec, **options)[1]


def assert_equal(a, b):
    a, b = trees.flatten(a), trees.flatten(b)
    assert a.keys() == b.keys()
    for path in a:
        np.testing.assert_array_equal(a[path], b[path], err_msg=path)


# ------------------------------------------------------------------------------------------------ the peers' logits


@pytest.mark.parametrize("name", goldens.SPECS)
def test_logits_of_the_peer(name):
    model = convert.load_model(goldens.FILES[name], model=goldens.SPECS[name])
    assert goldens.difference(model, name) < 1e-5


def test_logits_of_timm_at_another_size():
    model = convert.load_model(goldens.FILES["token"], model=goldens.SPECS["token"], img_size=(24, 12))
    assert model.spec.img_size == (24, 12)
    assert goldens.difference(model, "token_resized") < 1e-5


@pytest.mark.parametrize("name", goldens.SPECS)
def test_structure_comes_from_names_and_shapes(name, tmp_path):
    """Only what the tensors cannot say is told: heads and the JAX file's GELU; the grid where it is not square."""
    told = {"heads": 2, "gelu": "erf"} | ({"img_size": (12, 20)} if name == "oblong" else {})
    seen = view.View(readers.read_tensors(goldens.FILES[name]), name)
    spec, _ = structure.infer(seen, told, name)
    expected = goldens.SPECS[name]
    scale = structure.LAYER_SCALE if expected.layer_scale else None
    assert spec == specs.replace(expected, name=spec.name, layer_scale=scale)


# ------------------------------------------------------------------------------- one path for every source (R06, R13)


def test_every_container_gives_the_same_tree(tmp_path, monkeypatch):
    state = readers.read_tensors(goldens.DATA / "plain.safetensors")
    told = goldens.golden("plain")["arguments"]
    spec = goldens.small(img_size=(8, 8), width=8, depth=1, hidden=16, num_classes=3)
    assert told["embed_dim"] == 8 and told["depth"] == 1 and told["mlp_ratio"] == 2 and told["num_heads"] == 2
    np.savez(tmp_path / "weights.npz", **state)
    folder = tmp_path / "folder"
    folder.mkdir()
    written(state, folder / "model.safetensors")
    (folder / "model.json").write_text(json.dumps(export.describe(spec)))
    monkeypatch.setattr(places, "ASSETS", str(tmp_path / "assets"))
    export.save_timm(
        loaded(goldens.DATA / "plain.safetensors", spec), spec, tmp_path / "assets" / "shipped.safetensors"
    )
    options = {"img_size": (12, 8), "num_classes": 5, "seed": 3}
    expected = loaded(goldens.DATA / "plain.safetensors", spec, **options)
    assert expected["pos_embed"].shape == (1, 7, 8) and expected["head"]["kernel"].shape == (8, 5)
    for file in ("plain.pth", "legacy.pt", "wrapped.pth", "averaged.pth"):
        assert_equal(loaded(goldens.DATA / file, spec, **options), expected)
    assert_equal(loaded(tmp_path / "weights.npz", spec, **options), expected)
    assert_equal(loaded(folder, None, **options), expected)
    assert_equal(loaded("shipped", None, **options), expected)


def hf_names(state, five=False):
    """A timm state dict in transformers' names, written out by hand."""
    out = {
        "vit.embeddings.cls_token": state["cls_token"],
        "vit.embeddings.position_embeddings": state["pos_embed"],
        "vit.pooler.dense.weight": np.ones((2, 2), np.float32),
    }
    for leaf in ("weight", "bias"):
        out[f"vit.embeddings.patch_embeddings.projection.{leaf}"] = state[f"patch_embed.proj.{leaf}"]
        out[f"vit.layernorm.{leaf}"] = state[f"norm.{leaf}"]
        out[f"classifier.{leaf}"] = state[f"head.{leaf}"]
        for i in range(2):
            ours, theirs = f"blocks.{i}", f"vit.layers.{i}" if five else f"vit.encoder.layer.{i}"
            qkv = state[f"{ours}.attn.qkv.{leaf}"]
            names = ("q_proj", "k_proj", "v_proj") if five else ("attention.query", "attention.key", "attention.value")
            for part, name in enumerate(names):
                out[f"{theirs}.attention.{name}.{leaf}"] = qkv[part * 16 : part * 16 + 16]
            out[f"{theirs}.{'attention.o_proj' if five else 'attention.output.dense'}.{leaf}"] = state[
                f"{ours}.attn.proj.{leaf}"
            ]
            out[f"{theirs}.layernorm_before.{leaf}"] = state[f"{ours}.norm1.{leaf}"]
            out[f"{theirs}.layernorm_after.{leaf}"] = state[f"{ours}.norm2.{leaf}"]
            out[f"{theirs}.{'mlp.fc1' if five else 'intermediate.dense'}.{leaf}"] = state[f"{ours}.mlp.fc1.{leaf}"]
            out[f"{theirs}.{'mlp.fc2' if five else 'output.dense'}.{leaf}"] = state[f"{ours}.mlp.fc2.{leaf}"]
    return out


def chunked(state):
    """Two chunks of one block each, as DINO's hub files number them."""
    return {
        name.replace("blocks.0.", "blocks.0.0.").replace("blocks.1.", "blocks.1.1."): a for name, a in state.items()
    }


def test_one_model_in_six_namings(tmp_path):
    state, spec = goldens.tensors_of("token"), goldens.SPECS["token"]
    namings = {
        "timm": state,
        "dino hub": state | {"mask_token": np.zeros((1, 16), np.float32)},
        "dino hub ": chunked(state),
        "transformers": hf_names(state),
        "transformers 5": hf_names(state, five=True),
        "vitplast": trees.flatten(loaded(goldens.FILES["token"], spec)),
    }
    expected = loaded(goldens.FILES["token"], spec)
    for dialect, tensors in namings.items():
        path = written(
            {name: np.ascontiguousarray(a) for name, a in tensors.items()}, tmp_path / f"{dialect}.safetensors"
        )
        _, tree, report = convert.load_tree(path, spec=spec)
        assert report.dialect == dialect.strip()
        assert_equal(tree, expected)


def test_jax_npz_in_all_its_forms(tmp_path):
    state, spec = goldens.tensors_of("jax"), goldens.SPECS["jax"]
    expected = loaded(goldens.FILES["jax"], spec)
    np.savez(
        tmp_path / "opt.npz", **{f"opt/target/{n}": a for n, a in state.items()}, **{"opt/state/step": np.int32(5)}
    )
    big = {
        "params/"
        + name.replace("MultiHeadDotProductAttention_1", "MultiHeadDotProductAttention_0")
        .replace("MlpBlock_3", "MlpBlock_0")
        .replace("LayerNorm_2", "LayerNorm_1")
        .replace("Transformer/posembed_input/pos_embedding", "pos_embedding"): array
        for name, array in state.items()
    }
    np.savez(tmp_path / "big.npz", **big)
    first = [name for name in big if "encoderblock_0" in name]
    scanned = {name: array for name, array in big.items() if "encoderblock_" not in name} | {
        n.replace("encoderblock_0", "encoderblock"): np.stack([big[n], big[n.replace("block_0", "block_1")]])
        for n in first
    }
    np.savez(tmp_path / "scanned.npz", **scanned)
    for file, dialect in (("opt", "original JAX"), ("big", "big_vision"), ("scanned", "big_vision")):
        _, tree, report = convert.load_tree(tmp_path / f"{file}.npz", spec=spec)
        assert report.dialect == dialect
        assert_equal(tree, expected)


def test_prefixes_only_where_all_share_them(tmp_path):
    state, spec = goldens.tensors_of("token"), goldens.SPECS["token"]
    path = written({f"module.backbone.{name}": a for name, a in state.items()}, tmp_path / "all.safetensors")
    _, tree, report = convert.load_tree(path, spec=spec)
    assert report.prefix == "module.backbone."
    assert_equal(tree, loaded(goldens.FILES["token"], spec))
    mixed = {(name if name == "norm.bias" else f"module.{name}"): a for name, a in state.items()}
    with pytest.raises(UserError, match="no ViT naming that is known"):
        loaded(written(mixed, tmp_path / "mixed.safetensors"), spec)


def test_teacher_of_dino_leaves_its_projector_out():
    spec = goldens.small(img_size=(8, 8), width=8, depth=1, hidden=16, num_classes=0)
    _, tree, report = convert.load_tree(goldens.DATA / "teacher.pth", spec=spec)
    assert report.wrapper == "teacher" and report.prefix == "backbone."
    assert set(report.ignored) == {"head.mlp.0.weight", "head.last_layer.weight_v"}
    plain = loaded(goldens.DATA / "plain.safetensors", goldens.small(**{**vars(spec), "num_classes": 3}), num_classes=0)
    assert_equal(tree, plain)


# ----------------------------------------------------------------------------------------------------- the head (R07)


def test_another_number_of_classes_draws_a_head(caplog):
    spec = goldens.SPECS["token"]
    with caplog.at_level(logging.INFO):
        target, tree, report = convert.load_tree(goldens.FILES["token"], spec=spec, num_classes=3, seed=5)
    assert [record.message for record in caplog.records if "head" in record.message] == [
        f"{goldens.FILES['token']} has 7 classes: head drawn anew for 3 (seed 5)"
    ]
    assert target.num_classes == 3 and report.reinitialised == ("head/kernel", "head/bias")
    other = models.parameters(models.create_model(goldens.small(depth=1), num_classes=3, seed=5))["head"]
    assert_equal(tree["head"], other)
    assert np.abs(other["kernel"]).max() <= 0.25 < 1.1 * np.abs(other["kernel"]).max()  # torch's Linear: 1 / sqrt(16)
    tree.pop("head")
    expected = loaded(goldens.FILES["token"], spec)
    expected.pop("head")
    assert_equal(tree, expected)


def test_same_number_of_classes_keeps_the_head():
    spec = goldens.SPECS["token"]
    _, tree, report = convert.load_tree(goldens.FILES["token"], spec=spec, num_classes=7)
    assert report.reinitialised == ()
    assert_equal(tree, loaded(goldens.FILES["token"], spec))


def test_no_classes_no_head():
    model = convert.load_model(goldens.FILES["token"], model=goldens.SPECS["token"], num_classes=0)
    assert "head" not in models.parameters(model)
    assert goldens.answer(model, goldens.images((1, 16, 16, 3))).shape == (1, 16)


def test_head_of_another_size_is_an_error_unless_asked(tmp_path):
    spec = goldens.small(num_classes=9)
    with pytest.raises(UserError, match=r"2 of wrong shape: .*\(head.weight\) is \[16, 7\], the model's \[16, 9\]"):
        loaded(goldens.FILES["token"], spec)


def test_a_new_head_excuses_nothing_else(tmp_path):
    state = goldens.tensors_of("token")
    state["blocks.1.mlp.fc1.weight"] = state["blocks.1.mlp.fc1.weight"][:, :8]
    path = written({n: np.ascontiguousarray(a) for n, a in state.items()}, tmp_path / "a.safetensors")
    with pytest.raises(UserError) as error:
        loaded(path, goldens.SPECS["token"], num_classes=3)
    assert "blocks/1/mlp/fc1/kernel (blocks.1.mlp.fc1.weight) is [8, 48], the model's [16, 48]" in str(error.value)


def test_pre_logits(tmp_path):
    """in21k npz files: one layer more before a head of zeros."""
    extra = {"pre_logits/kernel": np.ones((16, 16), np.float32), "pre_logits/bias": np.ones(16, np.float32)}
    spec = goldens.SPECS["jax"]
    np.savez(tmp_path / "a.npz", **goldens.tensors_of("jax") | extra)
    with pytest.raises(UserError, match="pre_logits"):
        loaded(tmp_path / "a.npz", spec)
    assert set(convert.load_tree(tmp_path / "a.npz", spec=spec, num_classes=3)[2].ignored) == set(extra)
    zeros = {"head/kernel": np.zeros((16, 7), np.float32)}
    np.savez(tmp_path / "b.npz", **goldens.tensors_of("jax") | extra | zeros)
    assert "the source's head is all zeros" in convert.load_tree(tmp_path / "b.npz", spec=spec)[2].notes


# --------------------------------------------------------------------------- prefix tokens and position rows (R05)


def test_registers_whose_positions_are_only_the_class_tokens(tmp_path):
    """DINO with registers: one row for the class token. Moving it into the token changes nothing that timm computes."""
    state = goldens.tensors_of("registers")
    row = goldens.images((1, 1, 16), seed=1)
    state["pos_embed"] = np.concatenate([row, state["pos_embed"]], 1)
    state["cls_token"] = state["cls_token"] - row
    path = written(state, tmp_path / "a.safetensors")
    model = convert.load_model(path, model=goldens.SPECS["registers"])
    assert goldens.difference(model, "registers") < 1e-5
    bigger = convert.load_model(path, model=goldens.SPECS["registers"], img_size=24)
    assert goldens.answer(bigger, goldens.images((1, 24, 24, 3))).shape == (1, 7)
    seen = view.View(readers.read_tensors(path), path)
    spec, positions = structure.infer(seen, {"heads": 2}, path)
    assert (spec.pos_prefix, positions.prefix, spec.img_size) == ("class", 1, (16, 16))


def test_class_token_without_a_position_row(tmp_path):
    """timm's no_embed_class: the same as a row of zeros."""
    state, spec = goldens.tensors_of("token"), goldens.SPECS["token"]
    zeroed = state | {"pos_embed": np.concatenate([np.zeros((1, 1, 16), np.float32), state["pos_embed"][:, 1:]], 1)}
    shorter = state | {"pos_embed": np.ascontiguousarray(state["pos_embed"][:, 1:])}
    for size in (16, (24, 12)):
        a = convert.load_model(written(zeroed, tmp_path / "a.safetensors"), model=spec, img_size=size)
        b = convert.load_model(
            written(shorter, tmp_path / "b.safetensors"), model=specs.replace(spec, pos_prefix=False), img_size=size
        )
        images = goldens.images((2, *a.spec.img_size, 3))
        np.testing.assert_allclose(goldens.answer(a, images), goldens.answer(b, images), atol=1e-6)


def test_position_rows_that_fit_no_grid(tmp_path):
    state = goldens.tensors_of("token")
    state["pos_embed"] = np.zeros((1, 14, 16), np.float32)
    with pytest.raises(UserError, match="position table has 14 rows, which is no square grid with 1 prefix tokens"):
        loaded(written(state, tmp_path / "a.safetensors"), goldens.SPECS["token"])


# ------------------------------------------------------------------------------- biases and LayerScale (R09, R11)


def test_no_bias_for_the_keys(tmp_path):
    state, spec = goldens.tensors_of("token"), goldens.SPECS["token"]
    fused, split = dict(state), dict(state)
    for i in range(2):
        bias = split.pop(f"blocks.{i}.attn.qkv.bias").copy()
        split[f"blocks.{i}.attn.q_bias"], split[f"blocks.{i}.attn.v_bias"] = bias[:16].copy(), bias[32:].copy()
        bias[16:32] = 0
        fused[f"blocks.{i}.attn.qkv.bias"] = bias
    a = loaded(written(split, tmp_path / "a.safetensors"), spec)
    assert_equal(a, loaded(written(fused, tmp_path / "b.safetensors"), spec))


def test_no_bias_at_all_means_no_parameter():
    spec, tree, report = convert.load_tree(goldens.FILES["oblong"], spec=goldens.SPECS["oblong"])
    assert "bias" not in tree["blocks"][0]["attn"]["qkv"]
    source = readers.read_tensors(goldens.FILES["oblong"])
    assert report.parameters == sum(array.size for array in source.values())


def test_layer_scale_counts(tmp_path):
    state, spec = goldens.tensors_of("registers"), goldens.SPECS["registers"]
    model = convert.load_model(goldens.FILES["registers"], model=spec)
    ones = {name: np.ones_like(a) if "gamma" in name else a for name, a in state.items()}
    without = convert.load_model(written(ones, tmp_path / "a.safetensors"), model=spec)
    images = goldens.images((2, 16, 16, 3))
    ours = goldens.answer(model, images)
    assert np.abs(ours - goldens.answer(without, images)).max() > 0.1
    # The same numbers where the gammas are multiplied into the layers before them.
    folded = {name: a for name, a in state.items() if "gamma" not in name}
    for i in range(2):
        for scale, layer in (("ls1", "attn.proj"), ("ls2", "mlp.fc2")):
            gamma = state[f"blocks.{i}.{scale}.gamma"]
            folded[f"blocks.{i}.{layer}.weight"] = state[f"blocks.{i}.{layer}.weight"] * gamma[:, None]
            folded[f"blocks.{i}.{layer}.bias"] = state[f"blocks.{i}.{layer}.bias"] * gamma
    plain = convert.load_model(written(folded, tmp_path / "b.safetensors"), model=specs.replace(spec, layer_scale=None))
    np.testing.assert_allclose(ours, goldens.answer(plain, images), atol=2e-5)


# ------------------------------------------------------------------------------------------------------- strictness


def test_unknown_tensor_is_named(tmp_path):
    state = goldens.tensors_of("registers") | {"blocks.0.unknown": np.ones(3, np.float32)}
    with pytest.raises(UserError, match="1 unused: blocks.0.unknown"):
        loaded(written(state, tmp_path / "a.safetensors"), goldens.SPECS["registers"])


def test_all_errors_at_once_at_most_five_a_side(tmp_path):
    state = {name: a for name, a in goldens.tensors_of("token").items() if not name.startswith("blocks.1.")}
    state["patch_embed.proj.bias"] = np.ones(5, np.float32)
    state["norm.bias"] = np.full(16, np.nan, np.float32)
    state["norm.weight"] = np.ones(16, np.int32)
    state |= {f"more.{i}": np.ones(1, np.float32) for i in range(7)}
    with pytest.raises(UserError) as error:
        loaded(written(state, tmp_path / "a.safetensors"), goldens.SPECS["token"])
    text = str(error.value)
    assert "\n" not in text
    assert "1 of wrong shape: patch_embed/bias (patch_embed.proj.bias) is [5], the model's [16]" in text
    assert "12 missing: blocks/1/" in text and text.count("blocks/1/") == 5
    assert "7 unused: more.0, more.1, more.2, more.3, more.4, ..." in text
    assert "norm/scale (norm.weight) has dtype int32" in text and "norm/bias (norm.bias) holds NaN" in text


def test_heads_that_the_source_keeps_apart_are_checked(tmp_path):
    """[16, 2, 8] and [16, 8, 2] flatten to the same shape, with other heads."""
    state = goldens.tensors_of("jax")
    name = "Transformer/encoderblock_1/MultiHeadDotProductAttention_1/out/kernel"
    state[name] = state[name].reshape(8, 2, 16)
    np.savez(tmp_path / "a.npz", **state)
    with pytest.raises(UserError, match="blocks/1/attn/out/kernel .* is for 8 heads, the model has 2"):
        loaded(tmp_path / "a.npz", goldens.SPECS["jax"])


def test_names_of_no_vit(tmp_path):
    path = written({f"layer{i}.conv.weight": np.ones(1, np.float32) for i in range(9)}, tmp_path / "a.safetensors")
    with pytest.raises(UserError, match="no ViT naming that is known") as error:
        loaded(path, None)
    assert str(error.value).count(".conv.weight") == 5


@pytest.mark.parametrize(
    ("name", "message"),
    [("token", "do not say heads .no known model has width 16.*--model NAME"), ("jax", "do not say gelu .*tanh.*erf")],
)
def test_what_is_not_known_is_asked_for(name, message):
    with pytest.raises(UserError, match=message):
        loaded(goldens.FILES[name], None)


# ------------------------------------------------------------------- known sizes, preprocessing and numerics (R19, R23)


@pytest.fixture(scope="module")
def pico(tmp_path_factory):
    """A bare file of a known size: no metadata, nothing beside it."""
    spec = specs.spec("vit_pico_patch4_28", num_classes=10)
    rng = np.random.default_rng(0)
    shapes = models.abstract_parameters(spec)
    tree = trees.map_paths(lambda _, leaf: rng.standard_normal(leaf.shape).astype(np.float32), shapes)
    state = export.to_dialect(tree, spec, dialects.TIMM)
    return written(state, tmp_path_factory.mktemp("pico") / "bare.safetensors")


def test_known_width_tells_the_heads_but_not_the_preprocessing(pico):
    spec, _, report = convert.load_tree(pico)
    assert (spec.name, spec.heads, spec.num_classes) == ("vit_pico_patch4_28", 3, 10)
    assert spec.preprocessing is None
    assert any("unknown: tell data.mean and data.std" in line for line in report.lines())


def test_a_name_brings_its_preprocessing_and_size(pico):
    spec, tree, _ = convert.load_tree(pico, spec="vit_pico_patch4_32")
    assert spec.preprocessing.mean == (0.5, 0.5, 0.5)
    assert spec.img_size == (32, 32) and spec.num_classes == 10 and tree["pos_embed"].shape == (1, 65, 96)
    with pytest.raises(UserError, match=r"patch_embed/kernel .* is \[4, 4, 3, 96\], the model's \[8, 8, 3, 96\]"):
        convert.load_tree(pico, spec="vit_pico_patch8_32")


def test_preprocessing_and_class_names_travel(tmp_path):
    told = specs.Preprocessing((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "bilinear", 0.95, "squash")
    spec = goldens.small(preprocessing=told)
    names = [f"class {i}" for i in range(7)]
    tree = loaded(goldens.FILES["token"], spec)
    export.save_timm(tree, spec, tmp_path / "a.safetensors", names)
    export.save_folder(tree, spec, tmp_path / "folder", names)
    export.save_hf(tree, spec, tmp_path / "hf", names)
    for file in ("a.safetensors", "folder", "hf"):
        again, params, report = convert.load_tree(tmp_path / file)
        assert again.preprocessing.mean == told.mean and again.preprocessing.resize == "squash"
        assert report.class_names == tuple(names)
        assert_equal(params, tree)
        assert convert.load_tree(tmp_path / file, num_classes=3)[2].class_names is None


def test_timm_folder(pico, tmp_path):
    shutil.copy(pico, tmp_path / "model.safetensors")
    told = {
        "mean": [0.1] * 3,
        "std": [0.2] * 3,
        "interpolation": "bilinear",
        "crop_pct": 0.8,
        "input_size": [3, 28, 28],
    }
    config = {"architecture": "vit_pico_patch4_28", "num_classes": 10, "pretrained_cfg": told}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec, _, _ = convert.load_tree(tmp_path)
    assert spec.preprocessing == specs.Preprocessing((0.1,) * 3, (0.2,) * 3, "bilinear", 0.8, "shorter")
    assert convert.load_tree(tmp_path, spec="vit_pico_patch4_28")[0].preprocessing == spec.preprocessing


def test_epsilon_of_transformers_stays_with_a_name(pico, tmp_path):
    """The name is timm's, the weights are not."""
    tree = loaded(pico, None)
    spec = specs.spec("vit_pico_patch4_28", num_classes=10, eps=1e-12)
    export.save_hf(tree, spec, tmp_path / "hf")
    assert convert.load_tree(tmp_path / "hf", spec="vit_pico_patch4_28")[0].eps == 1e-12
    os.remove(tmp_path / "hf" / "config.json")
    assert convert.load_tree(tmp_path / "hf", spec="vit_pico_patch4_28")[0].eps == 1e-12
    assert convert.load_tree(tmp_path / "hf")[0].eps == 1e-12


def test_sixteen_bit_weights_keep_their_bits(tmp_path):
    spec = goldens.small(img_size=(8, 8), width=8, depth=1, hidden=16, num_classes=3)
    source = readers.read_tensors(goldens.DATA / "bfloat16.pth")
    tree = loaded(goldens.DATA / "bfloat16.pth", spec)
    assert {leaf.dtype for leaf in trees.flatten(tree).values()} == {np.dtype(ml_dtypes.bfloat16)}
    export.save_timm(tree, spec, tmp_path / "a.safetensors")
    again = readers.read_tensors(tmp_path / "a.safetensors")
    assert again.keys() == source.keys()
    assert all(again[name].tobytes() == source[name].tobytes() for name in source)
    model = convert.load_model(goldens.DATA / "bfloat16.pth", model=spec)
    assert {leaf.dtype for leaf in trees.flatten(models.parameters(model)).values()} == {np.dtype("float32")}
    export.save_folder(tree, spec, tmp_path / "folder")
    assert_equal(loaded(tmp_path / "folder", None), tree)


# ----------------------------------------------------------------------------------------------------------- places


def test_unknown_name_lists_what_is_shipped(tmp_path, monkeypatch):
    monkeypatch.setattr(places, "ASSETS", str(tmp_path))
    (tmp_path / "vit_one.safetensors").touch()
    with pytest.raises(UserError, match=r"vit_two: no such weights; .*\(vit_one\)"):
        places.resolve("vit_two")


def test_hub_that_cannot_be_reached(monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")

    def refuse(*_, **__):
        raise OSError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(UserError, match="hf-hub:a/b: not in the cache and not to be had .*offline"):
        places.resolve("hf-hub:a/b")


def test_identity_changes_with_the_bytes(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"abc")
    # sha256 of "abc", FIPS 180-2's first example
    assert places.identity(path) == {
        "source": str(path),
        "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    }
    path.write_bytes(b"abd")
    assert places.identity(path)["sha256"] != "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
