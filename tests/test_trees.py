import jax
import numpy as np
import pytest

from vitplast_jax import trees


def test_flatten_and_unflatten_are_inverse_and_blocks_are_ints():
    tree = {"blocks": {2: {"kernel": 1}, 10: {"kernel": 2}}, "head": {"bias": 3}}
    flat = trees.flatten(tree)
    assert flat == {"blocks/2/kernel": 1, "blocks/10/kernel": 2, "head/bias": 3}
    assert trees.unflatten(flat) == tree


def test_partition_prunes_and_combine_puts_together_again():
    tree = {"a": {"x": 1, "y": 2}, "b": {"z": 3}}
    mask = {"a": {"x": True, "y": False}, "b": {"z": False}}
    chosen, rest = trees.partition(tree, mask)
    assert chosen == {"a": {"x": 1}}
    assert rest == {"a": {"y": 2}, "b": {"z": 3}}
    assert trees.combine(chosen, rest) == tree


def test_partition_refuses_a_mask_of_another_structure():
    with pytest.raises(ValueError, match="differ in 1 paths"):
        trees.partition({"a": 1, "b": 2}, {"a": True})


def test_combine_refuses_what_stands_twice():
    with pytest.raises(ValueError, match="share 1 paths"):
        trees.combine({"a": 1}, {"a": 2})


def test_count_takes_a_shared_array_once_and_scalars_as_one():
    shared = np.zeros((2, 3))
    assert trees.count({"a": shared, "b": {"c": shared, "d": np.zeros(())}}) == 7


def test_count_is_of_the_global_array_however_it_is_sharded():
    mesh = jax.make_mesh((8,), ("data",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    assert trees.count({"a": jax.device_put(np.zeros((16, 2)), place)}) == 32
