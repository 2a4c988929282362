"""Every family of models: what the peers answer, in two layouts and back; positions that turn; names."""

import dataclasses
import json

import goldens
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import vitplast_jax as vp
from vitplast_jax import components, models, trees
from vitplast_jax.errors import UserError
from vitplast_jax.models import layers, names, specs
from vitplast_jax.weights import convert, dialects, export, places, readers, structure, view

# golden -> (what must be told beside the file: the width has no name, and timm's files no size without a table,
# dialect, what the file alone must say of the structure)
TIMM = {
    "deit_timm": ({}, "timm", {"distilled": True, "pool": "distilled"}),
    "dinov2_timm": ({}, "timm SwiGLU", {"gated": True, "hidden": 32, "registers": 2, "pos_prefix": "none"}),
    "gap_timm": ({}, "timm", {"pool": "avg", "fc_norm": False, "class_token": False}),
    "dinov3_timm": ({"img_size": (8, 12)}, "timm eva", {"key_bias": False, "qkv_bias": True, "registers": 2}),
    "dinov3_gated_timm": ({"img_size": (8, 12)}, "timm eva SwiGLU", {"gated": True, "hidden": 48, "qkv_bias": False}),
}
HF = {
    "deit_hf": ("transformers", {"distilled": True, "pool": "distilled", "eps": 1e-12}),
    "mae_hf": ("transformers", {"num_classes": 0}),
    "dinov2_hf": ("transformers dinov2", {"pool": "token+avg", "antialias": False, "pos_prefix": "all"}),
    "dinov2_registers_hf": ("transformers dinov2 SwiGLU", {"pos_prefix": "class", "gated": True, "antialias": True}),
    "dinov3_hf": ("transformers dinov3 SwiGLU", {"key_bias": False, "eps": 1e-5, "pos_embed": False, "gated": True}),
}


def inferred(name):
    """(spec, tree, report) of a golden, its structure from names, shapes and config.json."""
    if name in HF or name == "gpt2_hf":
        return convert.load_tree(goldens.DATA / name)
    path = goldens.DATA / f"{name}.safetensors"
    seen = view.View(readers.read_tensors(path), name)
    spec, _ = structure.infer(seen, {"heads": 2, **TIMM[name][0]}, name)
    return convert.load_tree(path, spec=spec)


def difference(spec, tree, name):
    told = goldens.golden(name)
    x = np.array(told["words"], np.int32) if "words" in told else goldens.images(told["input"])
    expected = np.array(told["logits"])
    with jax.default_matmul_precision("highest"):
        ours = np.asarray(jax.jit(models.apply, static_argnums=0)(models.structure(spec), tree, {}, x))
    return np.abs(ours - expected).max() / np.abs(expected).max()


def differing(a, b):
    assert a.keys() == b.keys()
    return [name for name in a if a[name].shape != b[name].shape or a[name].tobytes() != b[name].tobytes()]


@pytest.mark.parametrize("name", [*TIMM, *HF, "gpt2_hf"])
def test_the_peers_answer_and_the_same_file_again(name, tmp_path):
    spec, tree, report = inferred(name)
    dialect, fields = TIMM[name][1:] if name in TIMM else HF.get(name, ("transformers gpt2", {"gelu": "tanh"}))
    assert report.dialect == dialect
    assert {field: getattr(spec, field) for field in fields} == fields
    assert difference(spec, tree, name) < 1e-5
    source = goldens.DATA / (f"{name}.safetensors" if name in TIMM else name)
    out = tmp_path / "again.safetensors" if name in TIMM else tmp_path / "again"
    (export.save_timm if name in TIMM else export.save_hf)(tree, spec, out)
    # The mask token of DINO's pretraining belongs to no model of ours; transformers gets zeros for it.
    assert set(differing(readers.read_tensors(source), readers.read_tensors(out))) <= set(report.ignored)
    again, params, _ = convert.load_tree(out)
    scale = {"layer_scale": spec.layer_scale} if name in HF else {}
    assert dataclasses.replace(again, name=spec.name, **scale) == spec
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(tree), strict=True))
    components.counts(tree)  # every leaf has a component


@pytest.mark.parametrize("name", ["dinov2_hf", "dinov2_registers_hf"])
def test_the_peers_own_resizing(name):
    """R01: transformers resizes without antialias where there are no registers, and with it where there are."""
    spec, tree, _ = convert.load_tree(goldens.DATA / name, img_size=(24, 12))
    assert difference(spec, tree, f"{name}_resized") < 1e-5


@pytest.mark.parametrize("name", ["deit_timm", "dinov2_timm", "deit_hf", "dinov2_registers_hf", "dinov3_hf"])
def test_the_other_layout_answers_the_same(name, tmp_path):
    """DINOv2 with registers: timm has no row of positions for the class token, transformers has one."""
    spec, tree, _ = inferred(name)
    if name in HF:
        if spec.pool == "token+avg":
            spec, tree, _ = convert.load_tree(goldens.DATA / name, num_classes=0)
            spec, tree = specs.replace(spec, pool="token"), tree
        export.save_timm(tree, spec, tmp_path / "out")
    else:
        export.save_hf(tree, spec, tmp_path / "out")
    again, params, _ = convert.load_tree(tmp_path / "out")
    x = goldens.images((2, *spec.img_size, 3))
    ours, other = (goldens.answer(models.build(s, p), x) for s, p in ((spec, tree), (again, params)))
    np.testing.assert_allclose(other, ours, rtol=0, atol=1e-5 * np.abs(ours).max())


def test_what_a_layout_cannot_hold_is_said(tmp_path):
    spec, tree, _ = inferred("dinov2_hf")
    with pytest.raises(UserError, match="head/kernel"):
        broken = dict(tree) | {"head": {}}
        export.save_hf(broken, spec, tmp_path / "a")
    spec, tree, _ = inferred("gap_timm")
    with pytest.raises(UserError, match="no model of transformers has no class token"):
        export.save_hf(tree, spec, tmp_path / "a")
    with pytest.raises(UserError, match="timm has no head that reads class token and mean"):
        export.save_timm(*inferred("dinov2_hf")[1::-1], tmp_path / "a")
    spec, tree, _ = inferred("gpt2_hf")
    with pytest.raises(UserError, match="timm has no language models"):
        export.save_timm(tree, spec, tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_folders_of_ours_hold_every_family(tmp_path):
    for name in ("dinov3_hf", "gpt2_hf", "deit_timm"):
        spec, tree, _ = inferred(name)
        export.save_folder(tree, spec, tmp_path / name)
        again, params, report = convert.load_tree(tmp_path / name)
        assert again == spec and report.container == "Orbax"
        assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(tree), strict=True))


# -------------------------------------------------------------------------- one model under many names (R12, R13)


def hub_names(state):
    """timm's Eva names -> Meta's for DINOv3, with the third of the bias that the mask switches off."""
    out = {"mask_token": np.zeros((1, 16), np.float32), "rope_embed.periods": np.ones(2, np.float32)}
    for name, array in state.items():
        name = (
            name.replace("reg_token", "storage_tokens").replace("gamma_1", "ls1.gamma").replace("gamma_2", "ls2.gamma")
        )
        for ours, theirs in (("fc1_g", "w1"), ("fc1_x", "w2"), ("mlp.fc2", "mlp.w3")):
            if any("fc1_g" in key for key in state):
                name = name.replace(ours, theirs)
        if name.endswith("q_bias"):
            value = state[name.replace("q_bias", "v_bias")]
            key = name.replace("q_bias", "qkv.bias")
            junk = np.full(16, 7, np.float32)
            out[key] = np.concatenate([array, junk, value])
            out[key + "_mask"] = np.repeat(np.array([1, 0, 1], np.float32), 16)
        elif not name.endswith("v_bias"):
            out[name] = array
    return out


def chunked(state):
    return {n.replace("blocks.0.", "blocks.0.0.").replace("blocks.1.", "blocks.0.1."): a for n, a in state.items()}


@pytest.mark.parametrize("name", ["dinov3_timm", "dinov3_gated_timm"])
def test_dinov3_of_the_hub_in_chunks_or_not(name, tmp_path):
    spec, tree, _ = inferred(name)
    state = hub_names(readers.read_tensors(goldens.DATA / f"{name}.safetensors"))
    gated = " SwiGLU" if "gated" in name else ""
    for kind, tensors in (("plain", state), ("chunked", chunked(state))):
        export.write_safetensors(tensors, tmp_path / kind, {})
        found, same, report = convert.load_tree(tmp_path / kind, spec=spec)
        assert report.dialect == "dinov3 hub" + gated
        assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(same), jax.tree.leaves(tree), strict=True))


def test_dinov2_under_five_names_is_one_tree(tmp_path):
    """R13: timm, hub, chunked hub, transformers' old and new names: bit-identical."""
    spec, _, _ = inferred("dinov2_registers_hf")
    spec = specs.replace(spec, pool="token", num_classes=0, pos_prefix="none")
    path = goldens.DATA / "dinov2_registers_hf"
    _, tree, _ = convert.load_tree(path, spec=spec)
    hf = {
        n.removeprefix("dinov2_with_registers."): a for n, a in readers.read_tensors(path).items() if "classif" not in n
    }
    five = {}
    for name, array in hf.items():
        for old, new in (("attention.query", "q_proj"), ("attention.key", "k_proj"), ("attention.value", "v_proj")):
            name = name.replace(old, new)
        name = name.replace("attention.output.dense", "attention.o_proj").replace("weights_out", "down_proj")
        if "weights_in" in name:
            gate, up = np.split(array, 2)
            five |= {name.replace("weights_in", "gate_proj"): gate, name.replace("weights_in", "up_proj"): up}
        else:
            five[name] = array
    timm = export.timm_tensors(tree, spec)[0]
    row = goldens.images((1, 1, 16), seed=1)
    hub = {}
    for name, array in timm.items():
        for ours, theirs in (("reg_token", "register_tokens"), ("mlp.fc1", "mlp.w12"), ("mlp.fc2", "mlp.w3")):
            name = name.replace(ours, theirs)
        hub[name] = array
    hub |= {"mask_token": np.zeros((1, 16), np.float32)}
    hub["pos_embed"] = np.concatenate([np.zeros_like(row), timm["pos_embed"]], 1)
    sources = {"timm SwiGLU": timm, "dino hub SwiGLU": hub, "dino hub SwiGLU ": chunked(hub)}
    sources |= {"transformers dinov2 SwiGLU": hf, "transformers dinov2 SwiGLU ": five}
    for dialect, tensors in sources.items():
        export.write_safetensors(tensors, tmp_path / "file", {})
        _, same, report = convert.load_tree(tmp_path / "file", spec=spec)
        assert report.dialect == dialect.strip()
        assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(same), jax.tree.leaves(tree), strict=True))


def test_big_vision_pools_after_its_norm(tmp_path):
    """No class token and encoder_norm: the mean is taken of normed patches, as in timm with fc_norm=False."""
    _, tree, _ = inferred("gap_timm")
    flat, names_of = trees.flatten(tree), {"pos_embed": "pos_embedding", "patch_embed": "embedding", "head": "head"}
    names_of |= {"norm": "Transformer/encoder_norm"}
    state = {}
    for path, array in flat.items():
        first, *rest = path.split("/")
        if first != "blocks":
            state["/".join(["params", names_of[first], *rest])] = array
            continue
        block = f"params/Transformer/encoderblock_{rest[0]}/"
        attention = block + "MultiHeadDotProductAttention_0/"
        match rest[1:]:
            case ["attn", "qkv", leaf]:
                for name, part in zip(("query", "key", "value"), np.split(array, 3, -1), strict=True):
                    state[f"{attention}{name}/{leaf}"] = part.reshape(*part.shape[:-1], 2, 8)
            case ["attn", "out", leaf]:
                state[f"{attention}out/{leaf}"] = array.reshape(2, 8, 16) if leaf == "kernel" else array
            case ["mlp", layer, leaf]:
                state[f"{block}MlpBlock_0/Dense_{int(layer == 'fc2')}/{leaf}"] = array
            case [norm, leaf]:
                state[f"{block}LayerNorm_{int(norm == 'norm2')}/{leaf}"] = array
    np.savez(tmp_path / "a.npz", **state)
    seen = view.View(readers.read_tensors(tmp_path / "a.npz"), "a")
    spec, _ = structure.infer(seen, {"gelu": "erf"}, "a")
    assert seen.dialect.name == "big_vision" and (spec.pool, spec.fc_norm, spec.heads) == ("avg", False, 2)
    _, same, _ = convert.load_tree(tmp_path / "a.npz", spec=spec)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(same), jax.tree.leaves(tree), strict=True))
    with pytest.raises(UserError, match="its final norm acts on every token"):
        convert.load_tree(tmp_path / "a.npz", spec=specs.replace(spec, fc_norm=True))


def test_periods_that_the_file_holds_in_bfloat16(tmp_path):
    """Meta's files keep the rotary periods, rounded; transformers and timm compute them anew in float32."""
    state = hub_names(readers.read_tensors(goldens.DATA / "dinov3_timm.safetensors"))
    exact = np.array([1, 10**0.5, 10, 10**1.5], np.float32)  # one head of width 16: four frequencies
    for periods, kind in ((exact, "float32"), (exact.astype(ml_dtypes.bfloat16), "bfloat16")):
        export.write_safetensors(state | {"rope_embed.periods": periods}, tmp_path / "a", {})
        seen = view.View(readers.read_tensors(tmp_path / "a"), "a")
        assert structure.infer(seen, {"heads": 1}, "a")[0].rope.periods == kind
    rounded = specs.Rope(periods="bfloat16")
    wide, narrow = (layers.rope_table(rope, (3, 5), 64)[0] for rope in (specs.Rope(), rounded))
    assert 1e-4 < np.abs(wide - narrow).max() < 0.1


# ------------------------------------------------------------------------------------------- rotary positions (R12)


@pytest.mark.parametrize("grid", [(14, 14), (14, 20)])
def test_rotary_tables_by_the_formula(grid):
    """Middles of the patches in -1..1, each side by itself; height first, both halves of a head alike."""
    cosine, sine = layers.rope_table(specs.Rope(), grid, 64)
    i, j, f = 3, 11, 5
    place = i * grid[1] + j
    for half in (0, 32):
        for offset, coordinate in ((0, 2 * (i + 0.5) / grid[0] - 1), (16, 2 * (j + 0.5) / grid[1] - 1)):
            angle = 2 * np.pi * coordinate / 100 ** (f / 16)
            assert cosine[place, half + offset + f] == pytest.approx(np.cos(angle), abs=1e-6)
            assert sine[place, half + offset + f] == pytest.approx(np.sin(angle), abs=1e-6)


def test_attention_turns_the_patches_alone():
    """Against numpy in float64: one class token and four registers are not turned, and the keys have no bias."""
    grid, heads, k = (2, 3), 2, 8
    attention = layers.Attention(16, heads, key_bias=False, rope=specs.Rope(), grid=grid)
    rng = np.random.default_rng(0)
    weights = {
        "qkv": rng.standard_normal((16, 48)) / 4,
        "bias": rng.standard_normal(48),
        "out": rng.standard_normal((16, 16)),
    }
    attention.qkv.kernel[...], attention.qkv.bias[...] = jnp.asarray(weights["qkv"]), jnp.asarray(weights["bias"])
    attention.out.kernel[...] = jnp.asarray(weights["out"])
    x = rng.standard_normal((11, 16))
    q, key, v = np.split(x @ weights["qkv"] + weights["bias"] * np.repeat([1, 0, 1], 16), 3, -1)
    mixed = []
    for head in range(heads):
        parts = [part[:, head * k : head * k + k].copy() for part in (q, key, v)]
        for part in parts[:2]:
            for token in range(5, 11):
                i, j = divmod(token - 5, grid[1])
                for f, (coordinate, period) in enumerate(
                    (2 * (at + 0.5) / side - 1, 10.0**exponent)
                    for at, side in ((i, grid[0]), (j, grid[1]))
                    for exponent in (0, 1)
                ):
                    a, b = part[token, f], part[token, f + k // 2]
                    angle = 2 * np.pi * coordinate / period
                    part[token, f] = a * np.cos(angle) - b * np.sin(angle)
                    part[token, f + k // 2] = b * np.cos(angle) + a * np.sin(angle)
        scores = np.exp(parts[0] @ parts[1].T / np.sqrt(k))
        mixed.append(scores / scores.sum(-1, keepdims=True) @ parts[2])
    expected = np.concatenate(mixed, -1) @ weights["out"]
    with jax.default_matmul_precision("highest"):
        ours = attention(jnp.asarray(x[None], jnp.float32))[0]
    np.testing.assert_allclose(ours, expected, atol=1e-5 * np.abs(expected).max())


def test_rope_in_bfloat16_is_another_table():
    fine, coarse = (layers.rope_table(specs.Rope(dtype=d), (16, 16), 64)[0] for d in ("float32", "bfloat16"))
    assert 1e-3 < np.abs(fine - coarse).max() < 0.2


def test_the_keys_bias_that_is_not_used_gets_no_gradient():
    spec = goldens.small(depth=1, rope=specs.Rope(), pos_embed=False, pos_prefix="none", key_bias=False)
    model = models.create_model(spec)
    static, params = models.structure(spec), models.parameters(model)
    grads = jax.grad(lambda p: models.apply(static, p, {}, goldens.images((1, 16, 16, 3))).sum())(params)
    bias = np.asarray(grads["blocks"][0]["attn"]["qkv"]["bias"])
    assert not bias[16:32].any() and bias[:16].any() and bias[32:].any()


# ------------------------------------------------------------------------------------------------------------ GPT-2


@pytest.fixture(scope="module")
def gpt2():
    return convert.load_model(goldens.DATA / "gpt2_hf")


@pytest.mark.parametrize("name", ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"])
def test_no_matrix_of_gpt2_may_be_transposed(name, tmp_path):
    """R16: where the shape shows it, an error; attn.c_proj is square, so the numbers must show it."""
    tensors = {n: np.array(a) for n, a in readers.read_tensors(goldens.DATA / "gpt2_hf").items()}
    victim = f"transformer.h.1.{name}.weight"
    tensors[victim] = np.ascontiguousarray(tensors[victim].T)
    (tmp_path / "config.json").write_text((goldens.DATA / "gpt2_hf" / "config.json").read_text())
    export.write_safetensors(tensors, tmp_path / "model.safetensors", {})
    if name != "attn.c_proj":
        with pytest.raises(UserError, match="of wrong shape"):
            convert.load_tree(tmp_path)
        return
    spec, tree, _ = convert.load_tree(tmp_path)
    assert difference(spec, tree, "gpt2_hf") > 1e-2


def test_gpt2_sees_no_later_word_and_its_parts_can_be_called_alone(gpt2):
    words = jnp.asarray([[3, 1, 4, 1, 5]])
    logits, out = gpt2(words, intermediates=True)
    assert logits.shape == (1, 5, 19)
    np.testing.assert_allclose(gpt2(words.at[0, 4].set(9))[0, :4], logits[0, :4], atol=1e-6)
    attention = gpt2.blocks[1].attn(out["blocks"][1]["norm1"])
    np.testing.assert_allclose(attention, out["blocks"][1]["mha"], atol=1e-6)
    np.testing.assert_array_equal(gpt2.embed(words), out["embedding"])
    with pytest.raises(UserError, match="takes whole numbers .* at most 12"):
        gpt2(jnp.zeros((1, 13), jnp.int32))


def test_gpt2_head_is_the_table_of_words(gpt2, tmp_path):
    paths = trees.flatten(models.parameters(gpt2))
    assert "wte" in paths and not any(path.startswith("head") for path in paths)
    assert components.locate("wte").component == components.locate("wpe").component == "emb"
    tensors = dict(readers.read_tensors(goldens.DATA / "gpt2_hf"))
    (tmp_path / "config.json").write_text((goldens.DATA / "gpt2_hf" / "config.json").read_text())
    for factor in (1, 2):
        extra = {"lm_head.weight": factor * tensors["transformer.wte.weight"]}
        export.write_safetensors(tensors | extra, tmp_path / "model.safetensors", {})
        if factor == 1:
            assert convert.load_tree(tmp_path)[2].ignored == ("lm_head.weight",)
        else:
            with pytest.raises(UserError, match="lm_head.weight differs"):
                convert.load_tree(tmp_path)


def test_counts_of_gpt2_small():
    """124,439,808 parameters (the published 124M, head tied)."""
    shapes = models.abstract_parameters(specs.spec("gpt2"))
    assert trees.count(shapes) == 124_439_808


# ------------------------------------------------------------------------------------------------- names and counts


@pytest.mark.parametrize(
    ("name", "millions"),
    [  # as published: model cards and papers, backbones of DINO without heads
        ("vit_small_patch14_dinov2", 22.06),
        ("facebook/dinov2-base", 86.58),
        ("dinov2_vitl14_reg", 304.37),
        ("vit_giant_patch14_dinov2.lvd142m", 1136.5),
        ("facebook/dinov3-vits16-pretrain-lvd1689m", 21.6),
        ("dinov3_vits16plus", 28.7),
        ("facebook/dinov3-vith16plus-pretrain-lvd1689m", 840.6),
        ("dinov3_vit7b16", 6716),
        ("deit_base_distilled_patch16_224", 87.34),
        ("gpt2-xl", 1557.6),
    ],
)
def test_parameter_counts(name, millions):
    count = trees.count(models.abstract_parameters(specs.spec(name)))
    assert count / 1e6 == pytest.approx(millions, rel=2e-3)


@pytest.mark.parametrize(
    "names_of_one",
    [
        ("dinov2_vits14_reg", "facebook/dinov2-with-registers-small"),
        ("dinov3_vitb16", "facebook/dinov3-vitb16-pretrain-lvd1689m", "vit_base_patch16_dinov3_qkvb.lvd1689m"),
        ("gpt2-medium", "openai-community/gpt2-medium"),
        ("deit_small_distilled_patch16_224.fb_in1k", "facebook/deit-small-distilled-patch16-224"),
    ],
)
def test_names_of_one_model(names_of_one):
    assert len({dataclasses.replace(specs.spec(name), name="") for name in names_of_one}) == 1


def test_names_decide_the_pixels():
    assert specs.spec("dinov3_vitl16").preprocessing.mean == names.IMAGENET[0]
    assert specs.spec("facebook/dinov3-vitl16-pretrain-sat493m").preprocessing.mean == names.SATELLITE[0]
    assert specs.spec("google/vit-base-patch16-224-in21k").eps == 1e-12
    with pytest.raises(UserError, match="did you mean vit_base_patch14_dinov2"):
        specs.spec("vit_base_patch14_dinov")


def test_specs_of_all_families_travel_through_json():
    for name in ("dinov3_vits16", "gpt2", "facebook/deit-base-distilled-patch16-224", "dinov2_vitg14_reg"):
        spec = specs.spec(name)
        assert specs.from_dict(json.loads(json.dumps(specs.to_dict(spec)))) == spec


def test_every_leaf_of_every_family_has_one_component_and_gates_are_fc1():
    for name in names.examples():
        if "pico" in name or not name.startswith("vit_") or "dino" in name:
            components.counts(models.abstract_parameters(specs.spec(name)))
    params = models.abstract_parameters(specs.spec("dinov3_vits16plus"))
    hit = [path for path, on in trees.flatten(components.mask(params, ["fc1@0"])).items() if on]
    assert sorted(hit) == [f"blocks/0/mlp/{part}/{leaf}" for part in ("fc1", "gate") for leaf in ("bias", "kernel")]


def test_the_head_of_a_distilled_model_is_two(caplog):
    spec, tree, report = convert.load_tree(goldens.DATA / "deit_hf", num_classes=3, seed=1)
    assert report.reinitialised == ("head/kernel", "head/bias", "head_dist/kernel", "head_dist/bias")
    assert tree["head_dist"]["kernel"].shape == (16, 3)
    assert not np.array_equal(tree["head"]["kernel"], tree["head_dist"]["kernel"])


def test_every_dialect_has_a_rule_for_the_paths_it_shares():
    """A path that a table misspells would never be filled."""
    known = {rule.path for rule in dialects.OURS.rules + dialects.OURS_GPT2.rules}
    for dialect in (*dialects.DIALECTS, dialects.TIMM_GATED):
        assert {rule.path for rule in dialect.rules} <= known, dialect.name


@pytest.mark.parametrize("channels", [1, 6])
def test_other_channels_answer_the_same_to_the_same_image(channels):
    """A grey image, as one channel or repeated, gives what it gives in three channels."""
    options = {"model": goldens.SPECS["token"]}
    grey = goldens.images((2, 16, 16, 1))
    expected = goldens.answer(convert.load_model(goldens.FILES["token"], **options), np.repeat(grey, 3, -1))
    model = convert.load_model(goldens.FILES["token"], in_chans=channels, **options)
    kernel = models.parameters(model)["patch_embed"]["kernel"]
    assert kernel.shape == (4, 4, channels, 16)
    np.testing.assert_allclose(goldens.answer(model, np.repeat(grey, channels, -1)), expected, rtol=0, atol=1e-5)


def test_statistics_stay_known_only_where_all_channels_share_them():
    half, imagenet = (specs.Preprocessing(*s) for s in (names.HALF, names.IMAGENET))
    for told, known in ((half, specs.Preprocessing((0.5,), (0.5,))), (imagenet, None)):
        spec = goldens.small(preprocessing=told)
        assert convert.load_tree(goldens.FILES["token"], spec=spec, in_chans=1)[0].preprocessing == known


def test_the_hubs_cache_is_honoured_offline(tmp_path, monkeypatch):
    """A repository where huggingface_hub keeps it: references, snapshots, and links to blobs."""
    constants = pytest.importorskip("huggingface_hub.constants")
    repository, commit = tmp_path / "models--owner--name", "0123456789abcdef0123456789abcdef01234567"
    for folder in ("blobs", "refs", f"snapshots/{commit}"):
        (repository / folder).mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    for file in goldens.FILES["hf"].iterdir():
        (repository / "blobs" / f"sha-{file.name}").write_bytes(file.read_bytes())
        (repository / "snapshots" / commit / file.name).symlink_to(f"../../blobs/sha-{file.name}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    spec, tree, report = convert.load_tree("hf-hub:owner/name")
    expected_spec, expected, _ = convert.load_tree(goldens.FILES["hf"])
    assert spec == expected_spec and report.source == "hf-hub:owner/name"
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True))
    with pytest.raises(UserError, match="hf-hub:owner/other: not in the cache"):
        convert.load_tree("hf-hub:owner/other")


def test_preprocessing_of_transformers_that_crops(tmp_path):
    told = {"do_center_crop": True, "crop_size": {"height": 224, "width": 224}, "size": {"shortest_edge": 256}}
    told |= {"image_mean": [0.1] * 3, "image_std": [0.2] * 3, "resample": 3}
    (tmp_path / "p.json").write_text(json.dumps(told))
    expected = specs.Preprocessing((0.1,) * 3, (0.2,) * 3, "bicubic", 0.875, "shorter")
    assert places._transformers_preprocessing(str(tmp_path / "p.json")) == expected
    assert vp.create_model("dinov3_vits16", depth=1, img_size=32).spec.rope == specs.Rope()
