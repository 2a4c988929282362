"""Equal blocks as a loop: the numbers of the blocks one by one, whatever trains and whatever is attached."""

import jax
import jax.numpy as jnp
import pytest

from vitplast_jax import components, models, trees
from vitplast_jax.models import scan, specs
from vitplast_jax.peft.attach import initial_parameters
from vitplast_jax.peft.settings import make_settings
from vitplast_jax.training import loop

SPEC = specs.replace(specs.spec("vit_pico_patch4_28", num_classes=3, img_size=8), width=16, hidden=32, heads=2, depth=4)


def parts(spec, selectors, told=None):
    slots = None if told is None else make_settings(told)
    params = models.initial_parameters(spec, 0)
    if slots is not None:
        params = trees.combine(params, initial_parameters(spec, slots, 0))
    return models.structure(spec, slots), *trees.partition(params, components.mask(params, selectors))


@pytest.mark.parametrize(
    "selectors, told, rate, loops",
    [
        (["fc1@1-2", "head"], None, 0.0, (1, 2, 1)),
        (["peft"], {"method": "vpt-deep", "rank": 2}, 0.0, (1, 3)),  # the first block's prompts enter
        (["peft", "ln1"], {"method": "lora", "rank": 2, "projection": "ao"}, 0.0, (4,)),
        (["peft"], {"method": "adapter", "rank": 2, "targets": ("ffn@2-3",), "dropout": 0.1}, 0.5, (2, 2)),
    ],
)
def test_a_loop_computes_what_the_blocks_compute(selectors, told, rate, loops, tree_allclose):
    spec = specs.replace(SPEC, drop_path_rate=rate)  # every block draws at a place of its own and drops at its own rate
    static, trainable, frozen = parts(spec, selectors, told)
    images, keys = jax.random.normal(jax.random.key(1), (4, 8, 8, 3)), jax.random.split(jax.random.key(2), 4)

    def loss(trainable, looped, remat):
        logits = models.apply(static, trainable, frozen, images, keys, scan=looped, remat=remat)
        return jnp.square(logits).mean()

    model = models.nnx.merge(static, trees.combine(trainable, frozen))
    assert scan.loops(model.blocks, trainable.get("blocks", {})) == loops
    both = [
        jax.jit(jax.value_and_grad(loss), static_argnums=(1, 2))(trainable, *how) for how in ((0, "none"), (1, "block"))
    ]
    tree_allclose(*both, rtol=1e-5, atol=1e-6)


def test_a_loops_program_does_not_grow_with_the_depth():
    def products(depth, looped):
        static, trainable, frozen = parts(specs.replace(SPEC, depth=depth), ["all"])
        images = jnp.zeros((2, 8, 8, 3))

        def loss(trainable):
            return models.apply(static, trainable, frozen, images, scan=looped).sum()

        return jax.jit(jax.grad(loss)).lower(trainable).as_text().count("dot_general")

    assert products(2, True) == products(5, True) < products(2, False) < products(5, False)


@pytest.mark.slow
def test_a_run_with_loops_leaves_the_checkpoint_that_one_without_would(small_config, tmp_path, tree_allclose):
    import orbax.checkpoint as ocp

    saved = []
    for looped in (False, True):
        config = small_config(image_size=8, mesh__data=1, scan=looped, steps=4, checkpoint_every=4, optimizer="sgd")
        loop.train_and_evaluate(config, tmp_path / str(looped))
        with ocp.StandardCheckpointer() as checkpointer:
            saved.append(checkpointer.restore(tmp_path / str(looped) / "checkpoints" / "latest" / "4" / "state"))
    tree_allclose(*saved, rtol=0, atol=1e-6)
