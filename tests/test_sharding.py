import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from vitplast_jax import models, sharding, trees
from vitplast_jax.errors import UserError
from vitplast_jax.training import config as settings
from vitplast_jax.training import hlo, optim

SHAPES = models.abstract_parameters(models.specs.spec("vit_pico_patch4_28", num_classes=10))


def test_minus_one_takes_the_devices_that_fsdp_leaves():
    assert dict(sharding.make_mesh(-1, 2).shape) == {"data": 4, "fsdp": 2}
    assert dict(sharding.make_mesh(2, 1).shape) == {"data": 2, "fsdp": 1}


@pytest.mark.parametrize("data, fsdp", [(9, 1), (3, 4), (-1, 16)])
def test_more_devices_than_there_are_is_an_error(data, fsdp):
    with pytest.raises(UserError, match="there are 8"):
        sharding.make_mesh(data, fsdp)


def test_wide_kernels_are_divided_and_the_rest_is_replicated():
    mesh = sharding.make_mesh(1, 8)
    specs = {path: place.spec for path, place in trees.flatten(sharding.parameters(mesh, SHAPES)).items()}
    assert specs["blocks/0/attn/qkv/kernel"] == specs["blocks/4/mlp/fc1/kernel"] == P(None, "fsdp")
    assert specs["blocks/0/attn/out/kernel"] == specs["blocks/4/mlp/fc2/kernel"] == P("fsdp", None)
    assert {spec for path, spec in specs.items() if "blocks" not in path or "kernel" not in path} == {P()}


def test_leaves_go_to_their_places_one_by_one(monkeypatch):
    """Issue 3: no second full copy on the host; what was converted for one leaf is gone when the next is."""
    mesh, alive, most, put = sharding.make_mesh(1, 8), [], 0, jax.device_put
    rng = np.random.default_rng(0)
    tree = trees.map_paths(lambda _, leaf: rng.standard_normal(leaf.shape).astype(np.float32), SHAPES)

    def watched(array, place):
        nonlocal most
        most = max(most, sum(ref() is not None for ref in alive))
        alive.append(weakref.ref(array))
        return put(np.array(array), place)  # a copy: the CPU's arrays may be views of the host's

    monkeypatch.setattr(jax, "device_put", watched)
    placed = trees.flatten(sharding.put(mesh, tree, lambda path: "bfloat16" if "kernel" in path else "float32"))
    converted = [ref for ref, path in zip(alive, placed, strict=True) if "kernel" in path]
    assert most <= 1 + len(alive) - len(converted)  # those of the source stay alive with the tree
    places = trees.flatten(sharding.parameters(mesh, tree))
    for path, leaf in placed.items():
        assert leaf.sharding == places[path] and leaf.dtype == ("bfloat16" if "kernel" in path else "float32")
        expected = trees.flatten(tree)[path].astype(leaf.dtype)
        np.testing.assert_array_equal(np.asarray(leaf), expected, err_msg=path)
    fc1 = placed["blocks/0/mlp/fc1/kernel"]
    assert {shard.data.shape for shard in fc1.addressable_shards} == {(96, 384 // 8)}


def test_an_axis_that_does_not_divide_stays_whole():
    mesh = sharding.make_mesh(1, 5)
    assert {place.spec for place in jax.tree.leaves(sharding.parameters(mesh, SHAPES))} == {P()}


def test_the_optimizer_state_lies_where_its_parameters_do():
    mesh = sharding.make_mesh(2, 4)
    optimizer, _ = optim.make_optimizer(settings.validate({"optimizer": "adamw"}), SHAPES, 5)
    state = jax.eval_shape(optimizer.init, SHAPES)
    places = sharding.like(mesh, state, SHAPES)
    flat = jax.tree_util.tree_flatten_with_path(places)[0]
    divided = [path for path, place in flat if place.spec != P()]
    assert len(divided) == 2 * 5 * 4  # mu and nu of four kernels in five blocks
    counters = [
        place.spec
        for (path, leaf), (_, place) in zip(jax.tree_util.tree_flatten_with_path(state)[0], flat, strict=True)
        if leaf.ndim == 0
    ]
    assert counters and set(counters) == {P()}


def test_fsdp_computes_what_one_device_computes():
    model = models.create_model("vit_pico_patch4_28", num_classes=10, img_size=8)
    images = jax.random.normal(jax.random.key(0), (8, 8, 8, 3))
    params, static = models.parameters(model), models.structure(model.spec)
    mesh = sharding.make_mesh(2, 4)
    divided = jax.device_put(params, sharding.parameters(mesh, params))
    apply = jax.jit(lambda params, images: models.apply(static, params, {}, images))
    got = apply(divided, jax.device_put(images, sharding.batch(mesh)))
    assert jnp.allclose(got, apply(params, images), atol=1e-5)


def test_devices_exchange_what_they_summed_once_however_many_parts_there_are():
    mesh, rows = sharding.make_mesh(4, 2), jnp.arange(48.0).reshape(16, 3)

    def mean(scale, offset, rows):
        total, _ = jax.lax.scan(lambda total, part: (total + part.mean(0), None), jnp.zeros(3), rows.reshape(2, 1, 3))
        return scale * total / 2 + offset

    averaged = jax.jit(sharding.mean_over_devices(mesh, mean))
    arguments = jnp.float32(2), jnp.float32(1), jax.device_put(rows, sharding.batch(mesh))
    np.testing.assert_allclose(averaged(*arguments), 2 * rows.mean(0) + 1, rtol=1e-6)
    text = averaged.lower(*arguments).compile().as_text()
    assert hlo.collective_bytes(text) == {"all-reduce": 4 * 3}
