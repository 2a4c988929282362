"""Loss gradients by component and by its input against plain differentiation; rank agreement against SciPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from vitplast_jax import models, sharding, trees
from vitplast_jax.data.sources import Source
from vitplast_jax.errors import UserError
from vitplast_jax.models import Preprocessing, ViTSpec
from vitplast_jax.plasticity import agreement, measure, measure_gradients
from vitplast_jax.plasticity.gradients import add_gradients
from vitplast_jax.training.step import cross_entropy

SPEC = ViTSpec(
    **dict(name="tiny", img_size=(8, 8), patch_size=(4, 4), width=12, depth=2, heads=3, hidden=24, num_classes=3),
    layer_scale=0.5,
    preprocessing=Preprocessing(crop_pct=1.0),
)


@pytest.fixture(scope="module")
def model():
    rng = np.random.default_rng(0)
    draw = lambda _, leaf: jnp.asarray(0.4 * rng.normal(size=leaf.shape), jnp.float32)  # noqa: E731
    return models.build(SPEC, trees.map_paths(draw, models.abstract_parameters(SPEC)))


def make_source(n):
    rng = np.random.default_rng(1)
    images = rng.integers(0, 256, (n, 8, 8, 3), dtype=np.uint8)
    labels = rng.integers(0, 3, n).astype(np.int32)
    return Source("made", "train", labels, ("a", "b", "c"), tuple(map(str, range(n))), images)


def block_forward(block, x, given):
    """A block with what its components are given moved by `given`."""
    branch = block.attn(block.norm1(x + given["ln1"]) + given["mha"])
    x = x + block.ls1(branch)
    hidden = block.mlp.fc1(block.norm2(x + given["ln2"]) + given["fc1"])
    return x + block.ls2(block.mlp.fc2(block.mlp.activate(hidden) + given["fc2"]))


def test_norms_equal_plain_differentiation(model):
    source = make_source(8)
    found = measure_gradients(model, source, batch_size=8)
    images = jnp.asarray((source.images / 255 - 0.5) / 0.5, jnp.float32)
    params = models.parameters(model)

    def loss_of(image, label, params, given):
        made = models.with_parameters(model, params)
        x = made.embed(image[None])
        for index in range(2):
            x = block_forward(made.blocks[index], x, given[index])
        return cross_entropy(made.head(made.norm(x[:, 0])), label[None])[0]

    tokens = (SPEC.tokens, 12)
    zeros = {name: jnp.zeros(tokens) for name in ("ln1", "mha", "ln2", "fc1")} | {"fc2": jnp.zeros((SPEC.tokens, 24))}
    one = jax.jit(jax.value_and_grad(loss_of, argnums=(2, 3)))
    losses, grads = zip(
        *(one(i, t, params, [zeros] * 2) for i, t in zip(images, source.labels, strict=True)), strict=True
    )
    by_params = jax.tree.map(lambda *leaves: np.mean(leaves, 0), *(g[0]["blocks"] for g in grads))
    assert found["loss"] == pytest.approx(float(np.mean(losses)), rel=1e-5)
    places = {"ln1": ("norm1",), "mha": ("attn",), "ln2": ("norm2",), "fc1": ("mlp", "fc1"), "fc2": ("mlp", "fc2")}
    for row in found["rows"]:
        leaf = by_params[row["block"]]
        for part in places[row["component"]]:
            leaf = leaf[part]
        squares = sum(float(np.square(a).sum()) for a in jax.tree.leaves(leaf))
        assert row["grad_norm"] == pytest.approx(np.sqrt(squares), rel=1e-4)
        norms = [np.linalg.norm(g[1][row["block"]][row["component"]]) for g in grads]
        assert row["input_grad_norm"] == pytest.approx(float(np.mean(norms)), rel=1e-4)
        assert row["input_grad_norm_low"] < row["input_grad_norm"] and row["grad_norm_low"] is None  # one batch


def test_devices_change_nothing_and_intervals_come_from_batches(model):
    source = make_source(17)
    one, eight = (measure_gradients(model, source, batch_size=8, mesh=sharding.make_mesh(k)) for k in (1, 8))
    assert one["images"] == 16 and one["batches"] == 2
    for a, b in zip(one["rows"], eight["rows"], strict=True):
        assert list(b.values())[2:] == pytest.approx(list(a.values())[2:], rel=1e-4)


def test_gradients_join_a_result(model):
    source = make_source(8)
    result = measure(model, None, source, distribution="downstream")
    joined = add_gradients(result, measure_gradients(model, source, batch_size=4), "train")
    assert [row["grad_norm"] for row in joined["rows"]] == [row["grad_norm"] for row in joined["gradients"]["rows"]]
    assert joined["gradients"]["agreement"]["grad_norm"]["cells"] == 10
    assert set(joined["rows"][0]) == set(result["rows"][0])


def test_unlabelled_images_and_too_many_classes_are_one_line(model):
    with pytest.raises(UserError, match="labelled"):
        measure_gradients(model, np.zeros((4, 8, 8, 3), np.uint8))
    source = make_source(4)
    source.labels[0] = 3
    with pytest.raises(UserError, match="label 3 does not exist"):
        measure_gradients(model, source)


def test_rank_correlations_equal_scipy():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=30), rng.integers(0, 5, 30).astype(float)  # with ties
    assert float(agreement.spearman(a, b)) == pytest.approx(scipy.stats.spearmanr(a, b)[0])
    assert float(agreement.kendall(a, b)) == pytest.approx(scipy.stats.kendalltau(a, b)[0])
    assert np.isnan(agreement.spearman(a, np.ones(30)))


def test_agreement_has_an_interval_over_blocks():
    table = np.arange(30.0).reshape(6, 5)
    found = agreement.rank_agreement(table, table**2)
    assert found["spearman"] == {"value": pytest.approx(1), "low": pytest.approx(1), "high": pytest.approx(1)}
    noisy = agreement.rank_agreement(table, table + 8 * np.random.default_rng(0).normal(size=table.shape))
    assert noisy["kendall"]["low"] < noisy["kendall"]["value"] < noisy["kendall"]["high"] <= 1
    assert agreement.rank_agreement(table[:2], table[:2])["spearman"]["low"] is None
