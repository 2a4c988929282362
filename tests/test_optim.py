"""PITFALLS R38, R39, R40; schedules and factors by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from vitplast_jax import trees
from vitplast_jax.errors import UserError
from vitplast_jax.training import config as settings
from vitplast_jax.training import optim

PARAMS = trees.unflatten(
    {
        "patch_embed/kernel": jnp.ones((2, 2)),
        "blocks/0/attn/qkv/kernel": jnp.ones((2, 2)),
        "blocks/0/attn/qkv/bias": jnp.ones(2),
        "blocks/1/attn/qkv/kernel": jnp.ones((2, 2)),
        "head/kernel": jnp.ones((2, 2)),
    }
)


def make(trainable=PARAMS, **values):
    small = {"steps": 100, "warmup_steps": 0, "learning_rate": 0.1, "clip_norm": 0.0, "momentum": 0.0}
    return optim.make_optimizer(settings.validate(small | values), trainable, depth=2)[0]


def step(optimizer, params, grads, state=None):
    updates, state = optimizer.update(grads, optimizer.init(params) if state is None else state, params)
    return optax.apply_updates(params, updates), state


def filled(value, tree=PARAMS):
    return jax.tree.map(lambda leaf: jnp.full_like(leaf, value), tree)


def moved(params):
    return {path: float(leaf.ravel()[0]) for path, leaf in trees.flatten(params).items()}


def test_warm_up_is_linear_and_the_cosine_ends_at_zero():
    schedule = optim.make_schedule(2.0, 4, 12)
    np.testing.assert_allclose([schedule(s) for s in (0, 1, 4, 8, 12)], [0.0, 0.5, 2.0, 1.0, 0.0], atol=1e-6)
    assert float(optim.make_schedule(2.0, 0, 10)(0)) == 2.0
    assert float(optim.make_schedule(2.0, 10, 10)(10)) == 2.0  # warm-up to the end


def test_sgd_with_momentum_by_hand():
    optimizer = make(momentum=0.5)
    params, state = step(optimizer, PARAMS, filled(1.0))
    params, _ = step(optimizer, params, filled(1.0), state)
    # 1 - 0.1 (1) - 0.1 (1 + 0.5), the cosine taking 0.02 % off by the second step.
    assert moved(params)["head/kernel"] == pytest.approx(0.75, abs=1e-3)


def test_clipping_is_by_the_norm_over_all_trained_leaves():
    params, _ = step(make(clip_norm=1.0), PARAMS, filled(1.0))
    assert moved(params)["head/kernel"] == pytest.approx(1 - 0.1 / 18**0.5, abs=1e-6)  # 18 elements


def test_weight_decay_acts_on_kernels_and_on_what_a_factor_names():
    decayed = moved(step(make(weight_decay=0.5, optimizer="adamw"), PARAMS, filled(0.0))[0])
    assert decayed["head/kernel"] == pytest.approx(0.95)
    assert decayed["blocks/0/attn/qkv/bias"] == 1.0
    optimizer = make(weight_decay=0.5, optimizer="adamw", weight_decay_factors=("mha@0=2", "head=0"))
    decayed = moved(step(optimizer, PARAMS, filled(0.0))[0])
    assert decayed["head/kernel"] == 1.0
    assert decayed["blocks/0/attn/qkv/bias"] == decayed["blocks/0/attn/qkv/kernel"] == pytest.approx(0.9)


def test_sgd_decays_before_its_momentum_as_torch_does():
    params, _ = step(make(weight_decay=0.5, clip_norm=1.0), PARAMS, filled(0.0))
    assert moved(params)["head/kernel"] == pytest.approx(1 - 0.1 * 0.5)  # not clipped: it is no gradient of the loss


def test_layer_wise_decay_and_factors_by_selector():
    optimizer = make(layer_decay=0.5, learning_rate_factors=("mha@1=10", "head=3"))
    params = moved(step(optimizer, PARAMS, filled(1.0))[0])
    lost = {path: (1 - value) / 0.1 for path, value in params.items()}
    assert lost["patch_embed/kernel"] == pytest.approx(0.125, abs=1e-5)
    assert lost["blocks/0/attn/qkv/kernel"] == pytest.approx(0.25, abs=1e-5)
    assert lost["blocks/1/attn/qkv/kernel"] == pytest.approx(5.0, abs=1e-5)
    assert lost["head/kernel"] == pytest.approx(3.0, abs=1e-5)


def test_a_factor_for_what_does_not_train_is_an_error():
    with pytest.raises(UserError, match="factor 'fc1=2': of what trains, selector 'fc1' matches nothing"):
        make(learning_rate_factors=("fc1=2",))


@pytest.mark.parametrize("optimizer, copies", [("sgd", 1), ("adamw", 2)])
def test_the_state_is_of_the_trainable_leaves_alone(optimizer, copies):
    trainable = trees.unflatten({"head/kernel": jnp.ones((3, 5))})
    state = make(trainable, optimizer=optimizer, momentum=0.9).init(trainable)
    held = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
    assert sum(leaf.size for leaf in held) == copies * 15
