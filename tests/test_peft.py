"""One matrix of cases over all methods: starts, masks, gradients, counts, merging, saving. PITFALLS R38-R53."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from vitplast_jax import components, models, peft, trees
from vitplast_jax.errors import UserError
from vitplast_jax.models import layers, specs
from vitplast_jax.peft import settings, slots
from vitplast_jax.peft.attach import initial_parameters

D, DEPTH, HIDDEN = 16, 2, 32
SPEC = specs.ViTSpec("small", (8, 8), (4, 4), width=D, depth=DEPTH, heads=2, hidden=HIDDEN, num_classes=3)
IMAGES = np.random.RandomState(0).randn(4, 8, 8, 3).astype(np.float32)
ALL_LINEAR = ("q", "k", "v", "out", "fc1", "fc2")
PAIR = 4 * D + D * 4  # rank 4, square

# name -> (settings, parameters that train, what a fresh one leaves: "bits", "nearly" or nothing; can it be merged)
CASES = {
    "lora": ({"rank": 4, "dropout": 0.1}, DEPTH * 2 * PAIR, "bits", True),
    "lora everywhere": (
        {"rank": 4, "targets": ALL_LINEAR, "alpha": 8.0},
        DEPTH * (4 * PAIR + 2 * 4 * (D + HIDDEN)),
        "bits",
        True,
    ),
    "lora ranks": ({"ranks": (2, 0), "targets": ("v", "fc1@0")}, 2 * 2 * D + 2 * (D + HIDDEN), "bits", True),
    "lora ao": ({"rank": 4, "projection": "ao"}, DEPTH * 4 * D, "bits", True),
    "lora ao fc1": (
        {"rank": D, "projection": "ao", "targets": ("fc1", "fc2"), "normalize": True},
        DEPTH * 2 * (D + HIDDEN),
        "bits",
        True,
    ),
    "lora ao plain": ({"rank": 4, "projection": "ao", "start": "plain"}, DEPTH * 4 * D, None, True),
    "lora ao scales": ({"rank": 4, "projection": "ao", "scales": True}, DEPTH * (4 * D + 2 * 4), "bits", True),
    "adapter": ({"method": "adapter", "rank": 4}, DEPTH * (PAIR + 4 + D), "bits", False),
    "adapter linear": (
        {"method": "adapter", "rank": 4, "targets": ("mha", "ffn"), "activation": "none", "position": "before"},
        DEPTH * 2 * (PAIR + 4 + D),
        "bits",
        True,
    ),
    "adapter ao": (
        {"method": "adapter", "rank": 4, "preset": "count-single", "dropout": 0.1},
        DEPTH * 2 * D,
        "bits",
        False,
    ),
    "adapter ao tied": (
        {"method": "adapter", "rank": 4, "preset": "count-tied", "activation": "none"},
        DEPTH * 2 * D,
        "bits",
        True,
    ),
    "adapter ao scales": (
        {"method": "adapter", "rank": 4, "projection": "ao", "scales": True, "position": "parallel"},
        DEPTH * (2 * D + 4 + 4 + D),
        "bits",
        False,
    ),
    "vpt shallow": ({"method": "vpt-shallow", "rank": 3}, 3 * D, None, False),
    "vpt deep": ({"method": "vpt-deep", "rank": 3}, DEPTH * 3 * D, None, False),
    "vpt deep ao": ({"method": "vpt-deep", "rank": 3, "projection": "ao"}, DEPTH * D, None, False),
    "oft": ({"method": "oft", "rank": 4}, DEPTH * 4 * 6, "nearly", True),
    "boft": ({"method": "boft", "rank": 4, "targets": ("q", "out")}, DEPTH * 2 * (3 * 4 * 6 + D), "nearly", True),
    "hra": ({"method": "hra", "rank": 4, "targets": ("q", "fc2")}, DEPTH * 4 * (D + HIDDEN), "nearly", True),
    "hta": ({"method": "hta", "targets": ("v", "fc1")}, DEPTH * (3 * D + D + HIDDEN + D), "bits", True),
    "ssf": ({"method": "ssf"}, DEPTH * 2 * (2 * D + 3 * D + D + HIDDEN + D), "bits", True),
}


@pytest.fixture(scope="module")
def base():
    """A model in which no leaf stands at 0 or 1, and its logits."""
    params = trees.map_paths(
        lambda path, leaf: leaf + 0.1 * jax.random.normal(jax.random.key(len(path)), leaf.shape),
        models.parameters(models.create_model(SPEC)),
    )
    return models.build(SPEC, params)


@pytest.fixture(scope="module")
def forward():
    """logits of a model, compiled once for each structure."""
    compiled = jax.jit(models.apply, static_argnums=0)
    return lambda model: np.asarray(compiled(*models.split(model, all_of(model)), IMAGES))


def all_of(model):
    return trees.map_paths(lambda path, _: True, models.parameters(model))


def same(a, b):
    return np.array_equal(np.asarray(a), np.asarray(b))


def moved(model, size=0.05):
    """The model after some training: every leaf that may train is elsewhere."""
    params = models.parameters(model)
    mask = trees.flatten(components.mask(params, ("peft", "head")))
    changed = trees.map_paths(
        lambda path, leaf: leaf + size * mask[path] * jax.random.normal(jax.random.key(len(path)), leaf.shape), params
    )
    return models.with_parameters(model, changed)


@pytest.mark.parametrize("name", CASES)
def test_every_method(name, base, forward, tmp_path):
    told, count, fresh, merges = CASES[name]
    before = forward(base)
    model = peft.attach(base, **told)
    params = models.parameters(model)

    # R48: what a fresh one leaves of the output; off (the base itself) is untouched.
    if fresh == "bits":  # operation by operation: a compiler rounds a fused sum of zero as it pleases
        np.testing.assert_array_equal(model(IMAGES), base(IMAGES))
        np.testing.assert_allclose(forward(model), before, atol=1e-6)
    elif fresh == "nearly":
        np.testing.assert_allclose(forward(model), before, atol=1e-5)
    else:
        assert np.abs(forward(model) - before).max() > 1e-4
    kept = {path: leaf for path, leaf in trees.flatten(params).items() if components.locate(path).component != "peft"}
    assert kept.keys() == trees.flatten(models.parameters(base)).keys()
    assert all(same(leaf, trees.flatten(models.parameters(base))[path]) for path, leaf in kept.items())

    # R51, R42: what trains is counted once, start vectors never.
    trainable, frozen = trees.partition(params, components.mask(params, "peft"))
    assert trees.count(trainable) == count
    assert not any("start_" in path for path in trees.flatten(trainable))
    assert trees.count(trees.partition(params, components.mask(params, "all"))[0]) == count + trees.count(kept)

    # R47: merged equals unmerged, twice as once, and back.
    trained = moved(model)
    after = forward(trained)
    assert np.abs(after - before).max() > 1e-3 and np.isfinite(after).all()
    if merges:
        merged = peft.merge(trained)
        assert trees.flatten(models.parameters(merged)).keys() == kept.keys()
        np.testing.assert_allclose(forward(merged), after, atol=1e-5)
        assert peft.merge(merged) is merged
        back = trees.flatten(models.parameters(peft.unmerge(merged)))
        assert all(same(leaf, back[path]) for path, leaf in trees.flatten(models.parameters(trained)).items())
    else:
        with pytest.raises(UserError, match="cannot be merged"):
            peft.merge(trained)

    # R46: the adapter file holds all that was trained, the head too, and no more.
    peft.save(trained, tmp_path)
    again = peft.load(models.build(SPEC, models.parameters(base)), tmp_path)
    np.testing.assert_array_equal(forward(again), after)
    assert (tmp_path / "adapter.safetensors").stat().st_size < 50_000


# These five have not been run through the training test yet.
NOT_TRAINED = ("adapter ao scales", "vpt shallow", "vpt deep", "boft", "hta")


@pytest.mark.parametrize("name", [name for name in CASES if name not in NOT_TRAINED])
def test_training_moves_what_is_selected_and_nothing_else(name, base):
    """R38-R40: frozen leaves keep their bits under weight decay, no state is kept for them, gradients are finite."""
    model = peft.attach(base, **CASES[name][0])
    static, trainable, frozen = models.split(model, components.mask(models.parameters(model), ("peft", "head")))
    optimizer = optax.adamw(1e-2, weight_decay=0.1)
    state = optimizer.init(trainable)
    keys = jax.random.split(jax.random.key(0), len(IMAGES))

    @jax.jit
    def step(trainable, state):
        grads = jax.grad(lambda t: jnp.square(models.apply(static, t, frozen, IMAGES, keys)).mean())(trainable)
        updates, state = optimizer.update(grads, state, trainable)
        return optax.apply_updates(trainable, updates), state, grads

    first, state, grads = step(trainable, state)
    flat = trees.flatten(grads)
    assert all(np.isfinite(leaf).all() for leaf in flat.values())
    still = [path for path, leaf in flat.items() if not np.abs(leaf).max() > 0]
    # Where the up projection, or AOFT*'s lambda, is still zero, what it multiplies has no gradient yet.
    waiting = ("_vector", "down_bias") if CASES[name][0].get("scales") else ("down_kernel", "down_bias")
    assert not [path for path in still if not path.endswith(waiting)], still
    second, _, _ = step(first, state)
    assert all(
        np.abs(np.asarray(a) - np.asarray(b)).max() > 0
        for a, b in zip(jax.tree.leaves(second), jax.tree.leaves(trainable), strict=True)
    )
    assert len(jax.tree.leaves(state)) == 1 + 2 * len(flat)


def test_counts_of_the_paper_for_vit_b():
    """ORACLES B2: ViT-B/16 without its head, from the one counter; nothing is allocated."""
    spec = specs.spec("vit_base_patch16_224", num_classes=0)

    def count(**told):
        params = models.abstract_parameters(spec, settings.make_settings(told))
        return trees.count(trees.partition(params, components.mask(params, "peft"))[0])

    assert {count(projection="ao", rank=rank) for rank in (1, 8, 50, 768)} == {36_864}
    assert count(rank=8) == 294_912
    assert count(method="adapter", rank=8) == 156_768
    assert count(method="adapter", preset="count-single") == 18_432
    assert count(method="adapter", preset="count-tied") == 18_432
    assert count(method="adapter", preset="count-single", scales=True, rank=8) == 18_432 + 12 * 8
    assert count(method="adapter", preset="formula") == 36_864
    assert count(method="vpt-deep", projection="ao") == 9_216


def test_a_third_without_an_adapter_keeps_its_bits(base):
    x = jnp.asarray(np.random.RandomState(0).randn(2, 5, D), jnp.float32)
    plain = base.blocks[0].attn.qkv(x)
    for told in (CASES["lora"][0], {"method": "oft", "rank": 4, "targets": ("q", "v")}):
        qkv = moved(peft.attach(base, **told)).blocks[0].attn.qkv(x)
        np.testing.assert_array_equal(qkv[..., D : 2 * D], plain[..., D : 2 * D])
        assert np.abs(qkv[..., 2 * D :] - plain[..., 2 * D :]).max() > 1e-4


def test_lora_is_its_formula(base):
    model = moved(peft.attach(base, rank=4, targets=("v",), alpha=8.0))
    flat = {path: np.asarray(leaf, np.float64) for path, leaf in trees.flatten(models.parameters(model)).items()}
    x = np.random.RandomState(0).randn(3, D)
    place = "blocks/1/attn/qkv"
    expected = x @ flat[f"{place}/kernel"] + flat[f"{place}/bias"]
    pair = f"{place}/slot/v/pair"
    expected[:, 2 * D :] += 8 / 4 * x @ flat[f"{pair}/down_kernel"] @ flat[f"{pair}/up_kernel"]
    np.testing.assert_allclose(model.blocks[1].attn.qkv(jnp.asarray(x, jnp.float32)), expected, atol=1e-5)


def test_ao_lora_from_zero_is_the_difference_of_two_printed_pairs(base):
    model = moved(peft.attach(base, rank=4, targets=("fc1@1",), projection="ao"), size=0.3)
    part = model.blocks[1].mlp.fc1.slot.fc1
    pair = part.pair

    def product(p, q):
        return peft.ao_matrix(p[...], 4) @ peft.ao_matrix(q[...], 4).T

    expected = product(pair.down_vector, pair.up_vector) - product(pair.start_down_vector, pair.start_up_vector)
    np.testing.assert_allclose(part.merged(jnp.zeros((D, HIDDEN)), None)[0], expected, atol=1e-5)
    down, up = part.matrices()
    assert down.shape == (D, 8) and up.shape == (8, HIDDEN)
    np.testing.assert_allclose(down @ up, expected, atol=1e-5)


@pytest.mark.parametrize("start, factor", [("plain", 1.0), ("scale", 0.1)])
def test_other_starts_are_the_formula_and_a_tenth_of_it(base, start, factor):
    part = peft.attach(base, rank=4, projection="ao", start=start).blocks[0].attn.qkv.slot.v
    down, up = (peft.ao_matrix(vector[...], 4) for vector in (part.pair.down_vector, part.pair.up_vector))
    np.testing.assert_allclose(part.merged(jnp.zeros((D, D)), None)[0], factor * down @ up.T, atol=1e-6)
    assert "start_down_vector" not in " ".join(
        trees.flatten(models.parameters(peft.attach(base, projection="ao", start=start)))
    )


@pytest.mark.parametrize("position", ["after", "before", "parallel"])
def test_an_adapter_stands_where_it_says(base, position):
    model = moved(peft.attach(base, method="adapter", rank=4, targets=("mha",), position=position))
    block, x = model.blocks[0], jnp.asarray(np.random.RandomState(0).randn(2, 5, D), jnp.float32)
    a, f, norm = block.adapter_mha, block.attn, block.norm1(x)
    down, up = a.pair.down_kernel[...], a.pair.up_kernel[...]

    def added(x):
        return jax.nn.gelu(x @ down + a.down_bias[...], approximate=False) @ up + a.up_bias[...]

    expected = {"after": f(norm) + added(f(norm)), "before": f(norm + added(norm)), "parallel": f(norm) + added(norm)}
    np.testing.assert_allclose(block(x, intermediates=True)[1]["mha"], expected[position], atol=1e-5)


@pytest.mark.parametrize("pool, registers", [("token", 0), ("avg", 2)])
def test_prompts_stand_behind_the_prefix_and_are_not_pooled(pool, registers):
    """R53."""
    spec = specs.replace(SPEC, pool=pool, registers=registers, depth=3)
    model = peft.attach(models.create_model(spec), method="vpt-deep", rank=3)
    _, out = model(jnp.asarray(IMAGES), intermediates=True)
    lengths = [parts["output"].shape[1] for parts in out["blocks"]]
    assert out["embedding"].shape[1] == spec.tokens and lengths == [spec.tokens + 3] * 3
    prefix = spec.prefix
    for index, parts in enumerate(out["blocks"]):  # each block has its own prompts, behind the prefix, without position
        entered = parts["norm1"][:, prefix : prefix + 3]
        expected = model.blocks[index].norm1(jnp.tile(model.blocks[index].prompt.tokens()[None], (4, 1, 1)))
        np.testing.assert_allclose(entered, expected, atol=1e-5)
    last = out["blocks"][-1]["output"]
    pooled = model.norm(last[:, prefix + 3 :].mean(1) if pool == "avg" else last[:, 0])
    np.testing.assert_allclose(out["pooled"], pooled, atol=1e-6)


def test_prompts_of_a_range_of_blocks_are_carried_on():
    model = peft.attach(
        models.create_model(specs.replace(SPEC, depth=4)), method="vpt-deep", targets="prompt@1-2", rank=3
    )
    _, out = model(jnp.asarray(IMAGES), intermediates=True)
    assert [parts["output"].shape[1] for parts in out["blocks"]] == [5, 8, 8, 8]


def test_trained_biases_and_norms_are_saved_too(base, forward, tmp_path):
    model = peft.attach(base, rank=2)
    params = trees.map_paths(
        lambda path, leaf: leaf + 0.1 if path.endswith("norm1/bias") else leaf, models.parameters(moved(model))
    )
    trained = models.with_parameters(model, params)
    peft.save(trained, tmp_path)
    again = peft.load(base, tmp_path)
    np.testing.assert_array_equal(forward(again), forward(trained))
    other = models.create_model(SPEC, seed=5)
    with pytest.raises(UserError, match="belongs to other base weights"):
        peft.load(other, tmp_path)
    headless = models.create_model(SPEC, num_classes=7)  # the head comes with the adapter
    with pytest.raises(UserError, match="belongs to other base weights"):
        peft.load(headless, tmp_path)
    (tmp_path / "adapter.json").write_text("{")
    with pytest.raises(UserError, match="is damaged"):
        peft.load(base, tmp_path)


def test_a_bfloat16_base_is_merged_in_float32(base, forward):
    half = models.build(SPEC, trees.map_paths(lambda _, leaf: leaf.astype(jnp.bfloat16), models.parameters(base)))
    trained = moved(peft.attach(half, rank=4, projection="ao"), size=1e-3)
    merged = peft.merge(trained)
    assert models.parameters(merged)["blocks"][0]["attn"]["qkv"]["kernel"].dtype == jnp.float32
    np.testing.assert_allclose(forward(merged), forward(trained), atol=1e-5)
    # Computed in bfloat16 they differ by that type's rounding: 2^-8 of the logits' size.
    images = jnp.asarray(IMAGES, jnp.bfloat16)
    difference = np.abs(np.asarray(merged(images) - trained(images)))
    assert difference.max() < 4 * 2**-8 * np.abs(np.asarray(trained(images))).max()


def test_dropout_draws_are_the_examples_own_and_off_without_keys(base, forward):
    model = moved(peft.attach(base, rank=4, dropout=0.5, targets=ALL_LINEAR))
    x = jnp.tile(jnp.asarray(IMAGES[:1]), (4, 1, 1, 1))
    keys = jax.random.split(jax.random.key(0), 4)
    whole = model(x, keys)
    np.testing.assert_allclose(whole[2:], model(x[2:], keys[2:]), rtol=1e-4, atol=1e-5)
    assert len(np.unique(np.round(whole[:, 0], 4))) == 4
    without = peft.attach(base, rank=4, targets=ALL_LINEAR)
    np.testing.assert_array_equal(model(x), models.build(SPEC, models.parameters(model), without.slots)(x))
    places = [
        linear.slot.place
        for block in model.blocks
        for linear in (block.attn.qkv, block.attn.out, block.mlp.fc1, block.mlp.fc2)
    ]
    assert len(set(places)) == len(places) and min(places) >= slots.FIRST_PLACE
    assert slots.FIRST_PLACE > layers.FIRST_PLACE + 8 * 1000


def test_an_adapter_drops_its_hidden_units_alike_before_and_after_its_start(base):
    model = peft.attach(base, method="adapter", rank=4, projection="ao", dropout=0.5)
    keys = jax.random.split(jax.random.key(0), len(IMAGES))
    np.testing.assert_array_equal(model(jnp.asarray(IMAGES), keys), base(jnp.asarray(IMAGES)))


def test_the_given_model_stays_as_it_is(base):
    peft.attach(base, rank=4)
    assert base.slots is None and base.blocks[0].attn.qkv.slot is None
    with pytest.raises(UserError, match="already has lora in its slots"):
        peft.attach(peft.attach(base, rank=2), rank=2)


def test_the_same_seed_gives_the_same_adapter_and_start_vectors_equal_their_vectors(base):
    first, other = (models.parameters(peft.attach(base, projection="ao", seed=seed)) for seed in (0, 1))
    pair = first["blocks"][0]["attn"]["qkv"]["slot"]["q"]["pair"]
    np.testing.assert_array_equal(pair["down_vector"], pair["start_down_vector"])
    assert not np.array_equal(pair["down_vector"], pair["up_vector"])
    assert not np.array_equal(
        pair["down_vector"], other["blocks"][0]["attn"]["qkv"]["slot"]["q"]["pair"]["down_vector"]
    )
    assert abs(float(pair["down_vector"][0]) - 1) < 0.2
    same = initial_parameters(SPEC, settings.make_settings({"projection": "ao"}), 0)
    np.testing.assert_array_equal(same["blocks"][0]["attn"]["qkv"]["slot"]["q"]["pair"]["up_vector"], pair["up_vector"])


def test_selectors_reach_the_adapters_of_a_block(base):
    params = models.parameters(peft.attach(base, rank=4))
    chosen = [path for path, hit in trees.flatten(components.mask(params, "peft@1")).items() if hit]
    assert chosen and all(path.startswith("blocks/1/attn/qkv/slot/") for path in chosen)


@pytest.mark.parametrize(
    "told, says",
    [
        ({"method": "lorra"}, "peft.method is 'lorra'; there are lora, adapter"),
        ({"rnak": 8}, "peft has no setting rnak"),
        ({"targets": ("x",)}, "lora has no target 'x'; it has q, k, v"),
        ({"targets": ("q@7",)}, "has no block 7; the model has 0-1"),
        ({"targets": ("qkv", "q@1")}, "qkv covers q, k and v, but block 1"),
        ({"targets": ("gate",)}, "block 0 of this model has no gate"),
        ({"ranks": (1, 2, 3)}, "gives 3 ranks, the model has 2 blocks"),
        ({"rank": 17, "projection": "ao"}, "AO from 16 to 16 has a rank of 1 to 16"),
        ({"start": "plain"}, "peft.start belongs to peft.projection=ao"),
        ({"tied": True}, "peft.tied is True, which lora does not read"),
        ({"method": "adapter", "preset": "formulla"}, "peft.preset is 'formulla'; adapter has formula, count-single"),
        ({"method": "oft", "rank": 3}, "OFT's block size is at least 2 and divides the width 16"),
        ({"method": "hra", "rank": 3}, "take an even number"),
        ({"method": "vpt-deep", "ranks": (2, 3)}, "each block has as many"),
    ],
)
def test_what_does_not_fit_is_one_clear_line(base, told, says):
    with pytest.raises(UserError) as caught:
        peft.attach(base, **told)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_config_knows_the_methods():
    from vitplast_jax.training import config

    assert config.PEFT_METHODS == ("", *settings.METHODS)
    group = config.default_config().peft
    assert set(group) == set(settings.to_dict(settings.Settings()))


def test_a_language_model_takes_lora_and_no_prompts():
    base = models.create_model(models.GPT2Spec("small", 12, 2, 3, 24, vocabulary=20, context=8))
    words = jnp.arange(10).reshape(2, 5)
    model = peft.attach(base, "lora", rank=2, targets=("q", "fc2"))
    np.testing.assert_array_equal(model(words), base(words))
    params = models.parameters(model)
    mask = trees.flatten(components.mask(params, "peft"))
    changed = models.with_parameters(model, trees.map_paths(lambda path, leaf: leaf + 0.3 * mask[path], params))
    assert np.abs(changed(words) - base(words)).max() > 1e-4
    np.testing.assert_allclose(peft.merge(changed)(words), changed(words), atol=1e-5)
    with pytest.raises(UserError, match="small reads words from left to right: visual prompts are for Vision"):
        peft.attach(base, "vpt-deep", rank=2)
