"""What to train: choices under a budget by hand, and FLOPs against XLA's count of the lowered step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vitplast_jax import components, models, trees
from vitplast_jax.errors import UserError
from vitplast_jax.models import GPT2Spec, ViTSpec
from vitplast_jax.plasticity.costs import Costs, step_flops
from vitplast_jax.plasticity.select import choose
from vitplast_jax.training import config as settings
from vitplast_jax.training.step import cross_entropy

SPEC = ViTSpec(name="s", img_size=(16, 16), patch_size=(4, 4), width=128, depth=3, heads=2, hidden=512, num_classes=7)


def result_of(means, half=0.01, depth=3):
    """A plasticity result whose rows have the component's mean, a little less in later blocks."""
    rows = [
        {
            "block": b,
            "component": name,
            "mean": mean - 0.1 * b,
            "low": mean - 0.1 * b - half,
            "high": mean - 0.1 * b + half,
        }
        for b in range(depth)
        for name, mean in means.items()
    ]
    entries = [
        {"component": name, "mean": mean, "low": mean - half, "high": mean + half, "parameters": 3 * SIZES[name]}
        for name, mean in means.items()
    ]
    return {"rows": rows, "components": entries}


SIZES = {"mha": 100, "fc1": 90, "ln1": 5}


def cost_of(selectors):
    """Every block costs its component's size; a step's FLOPs grow with the blocks that are trained."""
    parameters, blocks = 0, set()
    for selector in components.parse(selectors):
        of = selector.blocks or range(3)
        parameters += len(of) * SIZES[selector.component]
        blocks |= set(of)
    return {
        "parameters": parameters,
        "flops": 0.4 + 0.2 * (3 - min(blocks)),
        "optimizer_bytes": 8,
        "allreduce_bytes": 4,
    }


MEANS = {"mha": 3.0, "fc1": 2.0, "ln1": 1.0}


def test_without_a_budget_the_most_plastic_component_wins():
    found = choose(result_of(MEANS), cost_of)
    assert found["recommendation"]["trainable"] == ["mha"] and found["recommendation"]["ties"] == []
    assert [c["trainable"] for c in found["choices"]["components"]] == [["mha"], ["fc1"], ["ln1"]]
    assert [c["trainable"] for c in found["choices"]["rows"]][:4] == [["mha@0"], ["mha@1"], ["mha@2"], ["fc1@0"]]
    assert found["budget"] == {"params": None, "flops": None} and all(c["fits"] for c in found["choices"]["rows"])


def test_a_budget_that_the_winner_fits_changes_nothing():
    found = choose(result_of(MEANS), cost_of, params=300)
    assert found["recommendation"]["trainable"] == ["mha"]
    assert "fits the budget of 300 parameters" in found["recommendation"]["reason"]


def test_a_smaller_budget_takes_blocks_in_the_order_of_plasticity():
    found = choose(result_of(MEANS), cost_of, params=295)
    # mha@0, mha@1 (200), not mha@2 (300), fc1@0 (290), no other fc1, ln1@0 (295)
    assert found["recommendation"]["trainable"] == ["mha@0-1", "fc1@0", "ln1@0"]
    assert not found["choices"]["components"][0]["fits"]
    assert "does not fit the budget of 295 parameters" in found["recommendation"]["reason"]
    found = choose(result_of(MEANS), cost_of, flops=0.7)  # the last block alone
    assert found["recommendation"]["trainable"] == ["mha@2", "fc1@2", "ln1@2"]


def test_rows_that_cannot_be_told_apart_are_named():
    found = choose(result_of(MEANS, half=0.06), cost_of, params=200)
    assert found["recommendation"]["trainable"] == ["mha@0-1"]
    assert found["recommendation"]["ties"] == ["mha@2"]
    assert "cannot be told apart" in found["recommendation"]["reason"]


def test_a_budget_that_nothing_fits_says_what_is_smallest():
    with pytest.raises(UserError, match="the smallest is ln1@2 with 5 parameters"):
        choose(result_of(MEANS), cost_of, params=4)


@pytest.mark.parametrize("selectors", [["mha@2"], ["fc1"], ["ln1@1"], ["fc2@0", "mha@2"]])
def test_flops_are_those_of_the_lowered_step(selectors):
    spec = models.specs.replace(SPEC, width=384, hidden=1536)  # as wide as real ones: what is not counted is small
    shapes = models.abstract_parameters(spec)
    images = jax.ShapeDtypeStruct((4, 16, 16, 3), jnp.float32)
    labels = jax.ShapeDtypeStruct((4,), jnp.int32)

    def counted(selectors):
        mask = components.mask(shapes, selectors)
        trainable, frozen = trees.partition(shapes, mask)

        def loss(trainable, frozen, images, labels):
            return cross_entropy(models.apply(models.structure(spec), trainable, frozen, images), labels).mean()

        lowered = jax.jit(jax.grad(loss)).lower(trainable, frozen, images, labels)
        return lowered.cost_analysis()["flops"], 4 * step_flops(spec, shapes, mask)

    (theirs, ours), (theirs_full, ours_full) = counted([*selectors, "head"]), counted(["all"])
    assert ours / ours_full == pytest.approx(theirs / theirs_full, rel=0.03)
    assert 0.85 < ours / theirs < 1.02  # norms, softmax and GELU are not counted


def test_the_tied_head_of_gpt2_costs_what_the_compiler_counts():
    spec = GPT2Spec(name="g", width=128, depth=2, heads=2, hidden=512, vocabulary=1000, context=64)
    shapes = models.abstract_parameters(spec)

    def counted(selector):
        mask = components.mask(shapes, [selector])
        trainable, frozen = trees.partition(shapes, mask)

        def loss(trainable, frozen, words):
            logits = models.apply(models.structure(spec), trainable, frozen, words)
            return jax.nn.logsumexp(logits, axis=-1).mean()

        lowered = jax.jit(jax.grad(loss)).lower(trainable, frozen, jax.ShapeDtypeStruct((4, 64), np.int32))
        return lowered.cost_analysis()["flops"], 4 * step_flops(spec, shapes, mask)

    for selector in ("emb", "fc2", "all"):
        theirs, ours = counted(selector)
        assert 0.96 < ours / theirs < 1, selector


def test_costs_by_hand():
    config = settings.validate(
        {"optimizer": "adamw", "also_trainable": ("head",), "learning_rate_factors": ("fc1=2",), "warmup_steps": 0}
    )
    cost = Costs(config, SPEC, models.abstract_parameters(SPEC))
    found = cost(["ln1@0"])
    head = 128 * 7 + 7
    assert found["parameters"] == 256 and found["trainable_parameters"] == 256 + head
    assert found["optimizer_bytes"] == 2 * 4 * (256 + head)  # Adam's two moments
    assert found["allreduce_bytes"] == 4 * (256 + head)
    sgd = Costs(settings.validate({"optimizer": "sgd", "also_trainable": ()}), SPEC, models.abstract_parameters(SPEC))
    assert sgd(["ln1@0"])["optimizer_bytes"] == 4 * 256
    assert cost(["all"])["flops"] == 1.0
    assert cost(["fc1@2"])["flops"] < cost(["fc1@0"])["flops"] < cost(["fc1"])["flops"] < 1
    assert np.isclose(cost(["fc1@0"])["flops_per_image"] / cost(["fc1@0"])["flops"], cost(["all"])["flops_per_image"])
