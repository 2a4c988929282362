"""The counts are those of arXiv 2602.06883 as ORACLES gives them; the lists of leaves are written out by hand."""

import jax
import pytest

from vitplast_jax import components, models, trees
from vitplast_jax.errors import UserError


def shapes(name, **overrides):
    return models.abstract_parameters(models.specs.spec(name, **overrides))


def marked(params, selectors):
    return [path for path, hit in trees.flatten(components.mask(params, selectors)).items() if hit]


@pytest.mark.parametrize(
    "name, ln, mha, fc2",
    [
        ("vit_base_patch16_224", 18_432, 28_348_416, 28_320_768),
        ("vit_large_patch16_224", 49_152, 100_761_600, 100_687_872),
        ("vit_huge_patch14_224", 81_920, 209_879_040, 209_756_160),
    ],
)
def test_counts_of_the_paper(name, ln, mha, fc2):
    counts = components.counts(shapes(name))
    assert (counts["ln1"], counts["ln2"], counts["mha"], counts["fc1"], counts["fc2"]) == (ln, ln, mha, mha, fc2)


def test_counts_of_the_embedding_and_of_everything():
    params = shapes("vit_base_patch16_224", num_classes=10)
    assert components.counts(params)["emb"] == 742_656
    assert sum(components.counts(params).values()) == trees.count(params)


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"registers": 4, "layer_scale": 0.1, "pos_prefix": False},
        {"pool": "avg", "class_token": False},
        {"qkv_bias": False, "num_classes": 0},
    ],
)
def test_every_parameter_of_every_variant_has_exactly_one_component(overrides):
    params = shapes("vit_pico_patch4_28", **overrides)
    masks = [set(marked(params, name)) for name in components.counts(params)]
    assert sum(map(len, masks)) == len(set().union(*masks)) == len(trees.flatten(params))


def test_block_1_does_not_select_blocks_10_and_11_and_norm_not_the_final_norm():
    params = shapes("vit_base_patch16_224")
    assert marked(params, ["mha@1"]) == [
        "blocks/1/attn/out/bias",
        "blocks/1/attn/out/kernel",
        "blocks/1/attn/qkv/bias",
        "blocks/1/attn/qkv/kernel",
    ]
    ln1 = marked(params, ["ln1"])
    assert ln1 == [f"blocks/{i}/norm1/{leaf}" for i in range(12) for leaf in ("bias", "scale")]
    assert marked(params, ["final_norm"]) == ["norm/bias", "norm/scale"]
    assert len(marked(params, ["fc1"])) == 24


def test_ranges_unions_and_all():
    params = shapes("vit_pico_patch4_28")
    assert marked(params, "fc1@1-2") == [f"blocks/{i}/mlp/fc1/{x}" for i in (1, 2) for x in ("bias", "kernel")]
    assert set(marked(params, "fc1@0, head")) == set(marked(params, ["fc1@0"])) | set(marked(params, ["head"]))
    assert marked(params, "all") == list(trees.flatten(params))
    assert {components.locate(path).block for path in marked(params, "all@3")} == {3}
    assert marked(params, []) == []


@pytest.mark.parametrize(
    "selector, says",
    [
        ("mah", "names no component; there are: all emb ln1 mha"),
        ("mha@5", "has no block 5 in this model; it has: all emb ln1 mha ln2 fc1 fc2 final_norm head; blocks 0-4"),
        ("mha@3-9", "has no block 5"),
        ("ls1", "matches nothing in this model"),
        ("head@1", "lies outside the blocks"),
        ("mha@3-1", "the last block comes before the first"),
        ("mha@", "is not COMPONENT"),
        ("mha@-1", "is not COMPONENT"),
        ("blocks/1/attn", "is not COMPONENT"),
    ],
)
def test_a_selector_that_matches_nothing_is_an_error_that_lists_what_exists(selector, says):
    with pytest.raises(UserError) as caught:
        components.mask(shapes("vit_pico_patch4_28"), [selector])
    assert says in str(caught.value) and repr(selector)[1:-1] in str(caught.value) and "\n" not in str(caught.value)


def test_a_parameter_without_a_rule_is_noticed():
    with pytest.raises(ValueError, match="belongs to no component"):
        components.locate("blocks/1/something/kernel")


def test_what_sits_in_a_slot_is_peft():
    assert components.locate("blocks/3/attn/qkv/slot/down") == ("peft", 3)


def test_a_mask_has_the_structure_of_the_parameters():
    params = shapes("vit_pico_patch4_28")
    assert jax.tree.structure(components.mask(params, "mha")) == jax.tree.structure(params)
    assert set(trees.flatten(components.labels(params)).values()) == set(components.counts(params))
