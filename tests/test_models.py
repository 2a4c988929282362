import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vitplast_jax import components, models, trees
from vitplast_jax.errors import UserError
from vitplast_jax.models import layers, specs

SMALL = specs.ViTSpec("small", (16, 16), (4, 4), width=16, depth=2, heads=2, hidden=32, num_classes=3)


def images(spec=SMALL, batch=2, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(1), (batch, *spec.img_size, spec.in_chans)).astype(dtype)


def numpy_vit(params, x, heads, eps=1e-6):
    """The formula of arXiv 2010.11929 in float64, written without looking at the layers."""
    from scipy.special import erf, softmax

    p = {path: np.asarray(leaf, np.float64) for path, leaf in trees.flatten(params).items()}

    def norm(x, name):
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps) * p[f"{name}/scale"] + p[
            f"{name}/bias"
        ]

    kernel = p["patch_embed/kernel"]
    ph, pw, _, d = kernel.shape
    tokens = [
        np.einsum("bpqc,pqcd->bd", x[:, i : i + ph, j : j + pw], kernel) + p["patch_embed/bias"]
        for i in range(0, x.shape[1], ph)
        for j in range(0, x.shape[2], pw)
    ]
    z = np.stack(tokens, 1)
    z = np.concatenate([np.broadcast_to(p["cls_token"], (len(x), 1, d)), z], 1) + p["pos_embed"]
    for i in range(max(int(path.split("/")[1]) for path in p if path.startswith("blocks")) + 1):
        y = norm(z, f"blocks/{i}/norm1")
        qkv = y @ p[f"blocks/{i}/attn/qkv/kernel"] + p[f"blocks/{i}/attn/qkv/bias"]
        q, k, v = (
            part.reshape(*part.shape[:2], heads, d // heads).transpose(0, 2, 1, 3) for part in np.split(qkv, 3, -1)
        )
        mixed = softmax(q @ k.transpose(0, 1, 3, 2) / np.sqrt(d // heads), -1) @ v
        mixed = mixed.transpose(0, 2, 1, 3).reshape(z.shape)
        z = z + mixed @ p[f"blocks/{i}/attn/out/kernel"] + p[f"blocks/{i}/attn/out/bias"]
        y = norm(z, f"blocks/{i}/norm2") @ p[f"blocks/{i}/mlp/fc1/kernel"] + p[f"blocks/{i}/mlp/fc1/bias"]
        y = y * (1 + erf(y / np.sqrt(2))) / 2
        z = z + y @ p[f"blocks/{i}/mlp/fc2/kernel"] + p[f"blocks/{i}/mlp/fc2/bias"]
    return norm(z, "norm")[:, 0] @ p["head/kernel"] + p["head/bias"]


def noisy(params, seed=0):
    """Nothing stays at 0 or 1, so that a bias or a scale that is left out shows."""
    return trees.map_paths(
        lambda path, leaf: leaf + 0.1 * jax.random.normal(jax.random.key(len(path) + seed), leaf.shape), params
    )


def test_the_logits_are_those_of_the_formula():
    params = noisy(models.parameters(models.create_model(SMALL)))
    expected = numpy_vit(params, np.asarray(images(), np.float64), SMALL.heads)
    with jax.default_matmul_precision("highest"):
        logits = models.build(SMALL, params)(images())
    np.testing.assert_allclose(logits, expected, atol=1e-5 * np.abs(expected).max())


def test_intermediates_belong_to_the_same_pass_and_components_can_be_called_alone():
    model = models.create_model(SMALL)
    logits, out = model(images(), intermediates=True)
    np.testing.assert_array_equal(logits, model(images()))
    block, parts = model.blocks[1], out["blocks"][1]
    np.testing.assert_array_equal(parts["input"], out["blocks"][0]["output"])
    np.testing.assert_allclose(block.norm1(parts["input"]), parts["norm1"], rtol=1e-6)
    np.testing.assert_allclose(block.attn(parts["norm1"]), parts["mha"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(block.mlp.fc1(parts["norm2"]), parts["fc1"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(block.mlp.fc2(parts["act"]), parts["fc2"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(parts["input"] + parts["mha"] + parts["fc2"], parts["output"], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(out["embedding"], model.embed(images()))


def test_mean_pooling_leaves_prefix_tokens_out_and_registers_make_the_sequence_longer():
    spec = specs.replace(SMALL, pool="avg", registers=3, pos_prefix=False)
    model = models.create_model(spec)
    _, out = model(images(), intermediates=True)
    tokens = out["blocks"][-1]["output"]
    assert tokens.shape == (2, 1 + 3 + 16, 16)
    np.testing.assert_allclose(out["pooled"], model.norm(tokens[:, 4:].mean(1)), rtol=1e-6)


def test_without_a_head_the_model_returns_pooled_features():
    model = models.create_model(SMALL, num_classes=0)
    features, out = model(images(), intermediates=True)
    assert features.shape == (2, 16)
    np.testing.assert_array_equal(features, out["pooled"])


@pytest.mark.parametrize("size, patch", [((16, 24), (4, 8)), ((28, 14), (14, 7))])
def test_any_grid(size, patch):
    spec = specs.replace(SMALL, img_size=size, patch_size=patch)
    assert models.create_model(spec)(images(spec)).shape == (2, 3)
    assert spec.positions == 1 + (size[0] // patch[0]) * (size[1] // patch[1])


@pytest.mark.parametrize("eps, expected", [(1e-12, 1.0), (1e-6, 0.7071), (1e-5, 0.3015)])
def test_layer_norm_epsilon(eps, expected):
    # A row of standard deviation 1e-3: 1e-3 / sqrt(1e-6 + eps).
    x = jnp.asarray([[1e-3, -1e-3] * 8])
    assert float(layers.LayerNorm(16, eps)(x).std()) == pytest.approx(expected, abs=1e-4)


def test_layer_norm_of_large_means_is_computed_in_two_passes():
    x = 1e4 + jnp.asarray([[1.0, -1.0] * 8])
    np.testing.assert_allclose(layers.LayerNorm(16, 0.0)(x), [[1.0, -1.0] * 8], atol=1e-3)


def test_gelu_is_the_one_that_was_asked_for():
    x = jnp.linspace(-6, 6, 1001)
    erf, tanh = (layers.Mlp(4, 8, name).activate(x) for name in ("erf", "tanh"))
    assert float(jnp.abs(erf - tanh).max()) == pytest.approx(4.7e-4, abs=2e-5)
    assert float(erf[750]) == pytest.approx(3.0 * 0.9986501, abs=1e-5)  # 3 Phi(3)


def test_bfloat16_images_compute_in_bfloat16_but_logits_are_float32():
    model = models.create_model(SMALL)
    logits, out = model(images(dtype=jnp.bfloat16), intermediates=True)
    assert logits.dtype == jnp.float32
    assert out["blocks"][0]["fc1"].dtype == jnp.bfloat16
    text = jax.jit(model).lower(images(dtype=jnp.bfloat16)).as_text()
    assert "exponential" in text and "exponential %" not in [
        line for line in text.splitlines() if "exp" in line and "bf16" in line
    ]
    np.testing.assert_allclose(logits, model(images()), atol=0.1)


def test_frozen_weights_may_be_bfloat16():
    static, trainable, frozen = models.split(
        models.create_model(SMALL), components.mask(models.abstract_parameters(SMALL), "mha")
    )
    frozen = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), frozen)
    grads = jax.grad(lambda t: models.apply(static, t, frozen, images()).sum())(trainable)
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("float32")}


def test_the_head_depends_on_seed_classes_and_width_alone():
    first = models.parameters(models.create_model(SMALL, seed=3))["head"]
    other = models.parameters(models.create_model(specs.replace(SMALL, depth=1, registers=2), seed=3))["head"]
    np.testing.assert_array_equal(first["kernel"], other["kernel"])
    assert np.abs(first["kernel"]).max() <= 16**-0.5
    assert not np.array_equal(first["kernel"], models.parameters(models.create_model(SMALL, seed=4))["head"]["kernel"])


def test_remat_changes_nothing_but_memory(tree_allclose):
    static, trainable, frozen = models.split(
        models.create_model(SMALL), components.mask(models.abstract_parameters(SMALL), "all")
    )

    def grads(remat):
        return jax.grad(lambda t: models.apply(static, t, frozen, images(), jax.random.key(0), remat=remat).sum())(
            trainable
        )

    plain = grads("none")
    for policy in set(layers.REMAT) - {"none"}:
        tree_allclose(grads(policy), plain, rtol=1e-5, atol=1e-6)


def test_a_slot_in_qkv_gives_thirds_and_changes_nothing_by_being_there():
    attention, x = layers.Attention(8, 2), jax.random.normal(jax.random.key(0), (2, 5, 8))
    attention.qkv.kernel[...] = jax.random.normal(jax.random.key(1), (8, 24))
    attention.qkv.bias[...] = jax.random.normal(jax.random.key(2), (24,))
    attention.out.kernel[...] = jnp.eye(8)
    plain = attention(x)

    class Slot:
        def pieces(self, x, kernels, biases, keys):
            assert [kernel.shape for kernel in kernels] == [(8, 8)] * 3
            return [x @ kernel + bias for kernel, bias in zip(kernels, biases, strict=True)]

    attention.qkv.slot = Slot()
    np.testing.assert_allclose(attention(x), plain, rtol=1e-5, atol=1e-6)


def test_gradients_of_parameters_are_summed_in_their_own_dtype():
    # bfloat16 holds 256 and 258, but not 257.
    x, kernel, bias = jnp.ones((257, 1), jnp.bfloat16), jnp.ones((1, 1)), jnp.zeros((1,))
    gradients = jax.grad(lambda *params: layers.product(x, *params).astype(jnp.float32).sum(), (0, 1))(kernel, bias)
    assert [(float(g.squeeze()), g.dtype) for g in gradients] == [(257.0, jnp.float32)] * 2
    table = jax.grad(lambda table: layers.repeated(table, 257, jnp.bfloat16).astype(jnp.float32).sum())(kernel)
    assert (float(table.squeeze()), table.dtype) == (257.0, jnp.float32)


def test_attention_weights_sum_in_float32():
    # R21: 1024 equal tokens; sums of ones in bfloat16 stop at 256, and the output would be four times the value.
    attention = layers.Attention(4, 1)
    attention.qkv.kernel[...] = jnp.concatenate([jnp.zeros((4, 8)), jnp.eye(4)], axis=1)
    attention.out.kernel[...] = jnp.eye(4)
    x = jnp.broadcast_to(jnp.asarray([1.0, -2.0, 0.5, 3.0], jnp.bfloat16), (1024, 4))
    np.testing.assert_allclose(np.asarray(attention(x), np.float32), np.asarray(x, np.float32), rtol=2e-2)


def test_dropout_is_a_function_of_each_examples_key():
    spec = specs.replace(SMALL, drop_rate=0.3, drop_path_rate=0.3)
    model, keys = models.create_model(spec), jax.random.split(jax.random.key(0), 4)
    x = jnp.tile(images(batch=1), (4, 1, 1, 1))
    whole = model(x, keys)
    np.testing.assert_allclose(whole[2:], model(x[2:], keys[2:]), rtol=1e-5, atol=1e-6)
    assert len(np.unique(np.round(whole[:, 0], 4))) == 4
    np.testing.assert_array_equal(model(x), models.create_model(SMALL)(x))  # without a key nothing is dropped


def test_dropout_keeps_the_mean_and_the_rate():
    keys = jax.random.split(jax.random.key(0), 64)
    y = layers.dropout(jnp.ones((64, 50, 50)), keys, 16, 0.25)
    assert float((y == 0).mean()) == pytest.approx(0.25, abs=0.01)
    assert float(y.mean()) == pytest.approx(1.0, abs=0.01)
    path = layers.dropout(jnp.ones((64, 5, 5)), keys, 17, 0.5, shape=(1, 1))
    assert all(len(np.unique(example)) == 1 for example in path)  # whole branches


def test_an_empty_slot_is_free_and_a_filled_one_takes_over():
    from flax import nnx

    class Twice(nnx.Module):
        def __call__(self, x, kernel, bias):
            return 2 * (x @ kernel + bias)

    model = models.create_model(SMALL)
    paths = list(trees.flatten(models.parameters(model)))
    before = model.blocks[0].mlp.fc1(jnp.ones((1, 16)))
    model.blocks[0].mlp.fc1.slot = Twice()
    np.testing.assert_allclose(model.blocks[0].mlp.fc1(jnp.ones((1, 16))), 2 * before)
    assert list(trees.flatten(models.parameters(model))) == paths


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: specs.spec("vit_bse_patch16_224"), "did you mean vit_base_patch16_224"),
        (lambda: specs.spec("vit_base_patch16_225"), "225 is not a multiple of the patch size 16"),
        (lambda: specs.spec("resnet50"), "no model is called 'resnet50'"),
        (lambda: specs.spec("vit_base_patch16_224", wdith=3), "no such field: wdith"),
        (lambda: specs.replace(SMALL, heads=3), "width 16 is not a multiple of 3 heads"),
        (lambda: models.create_model(SMALL)(jnp.ones((1, 20, 20, 3))), "takes images [b, 16, 16, 3]"),
    ],
)
def test_wrong_names_and_sizes_are_one_clear_line(make, says):
    with pytest.raises(UserError) as caught:
        make()
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_build_lists_what_does_not_fit():
    flat = trees.flatten(models.parameters(models.create_model(SMALL)))
    flat["blocks/1/mlp/fc1/kernel"] = flat["blocks/1/mlp/fc1/kernel"].T
    del flat["norm/bias"]
    with pytest.raises(
        UserError, match=r"norm/bias is missing; blocks/1/mlp/fc1/kernel has shape \(32, 16\), the model"
    ):
        models.build(SMALL, trees.unflatten(flat))


def test_specs_travel_through_json():
    import json

    spec = specs.spec("vit_small_patch16_224.dino", img_size=(32, 48), layer_scale=0.1)
    assert specs.from_dict(json.loads(json.dumps(specs.to_dict(spec)))) == spec
    assert spec.preprocessing.mean == specs.IMAGENET[0]
    assert specs.spec("vit_base_patch16_224").preprocessing.mean == (0.5, 0.5, 0.5)
    assert specs.spec("vit_base_patch16_224.something_new").preprocessing is None


def test_no_draw_of_the_model_is_one_of_the_data():
    from vitplast_jax.data import preprocess

    blocks = models.create_model(SMALL).blocks
    places = [layers.FIRST_PLACE] + [block.first_place + draw for block in blocks for draw in range(5)]
    assert len({*places, preprocess.CROP_FOLD, preprocess.FLIP_FOLD, preprocess.SHIFT_FOLD}) == len(places) + 3


@pytest.mark.parametrize("offset", [0, 50, 500])
def test_the_variance_of_bfloat16_tokens_withstands_a_large_mean(offset):
    x = jnp.asarray(offset + 3 * np.random.RandomState(0).randn(5, 64), jnp.bfloat16)
    exact = np.asarray(x, np.float64)
    expected = (exact - exact.mean(-1, keepdims=True)) / np.sqrt(exact.var(-1, keepdims=True) + 1e-6)
    y = layers.LayerNorm(64, 1e-6)(x)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, rtol=2**-8, atol=0.01)
