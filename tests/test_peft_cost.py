"""What a step with an adapter costs, as XLA counts it; nothing is compiled or allocated."""

import jax
import jax.numpy as jnp

from vitplast_jax import components, models, trees
from vitplast_jax.models import specs
from vitplast_jax.peft.settings import make_settings

# The width, tokens and heads of ViT-B/16; two blocks, for the shares are those of a block.
SPEC = specs.ViTSpec("two", (224, 224), (16, 16), width=768, depth=2, heads=12, hidden=3072, num_classes=10)


def flops(told, chosen) -> float:
    """Of the gradient of the loss with respect to what ``chosen(path)`` names, the head and the final norm."""
    slots = make_settings(told) if told else None
    params = models.abstract_parameters(SPEC, slots)
    mask = trees.map_paths(
        lambda path, _: (chosen(path) or path.startswith(("head/", "norm/"))) and not components.is_fixed(path), params
    )
    trainable, frozen = trees.partition(params, mask)
    static = models.structure(SPEC, slots)

    def loss(trainable, frozen, images):
        return models.apply(static, trainable, frozen, images).sum()

    images = jax.ShapeDtypeStruct((2, 224, 224, 3), jnp.float32)
    return jax.jit(jax.grad(loss)).lower(trainable, frozen, images).cost_analysis()["flops"]


def in_slot(path):
    return components.locate(path).component == "peft"


def test_aoft_lora_costs_no_more_than_training_the_qkv_biases_and_less_than_lora():
    aoft = flops({"rank": 8, "projection": "ao"}, in_slot)
    lora = flops({"rank": 8}, in_slot)
    biases = flops(None, lambda path: path.endswith("qkv/bias"))
    assert aoft < lora
    assert aoft <= 1.005 * biases, aoft / biases
    assert flops({"rank": 768, "projection": "ao"}, in_slot) < 1.001 * aoft  # whatever the rank
