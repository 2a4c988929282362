"""Linear probing: features against a forward pass written out, the classifier's invariances, and the command."""

import csv
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vitplast_jax import command, models, peft, probe, trees
from vitplast_jax.training import config as settings
from vitplast_jax.training import inputs, probing
from vitplast_jax.training.loop import train_and_evaluate
from vitplast_jax.training.run import load_run

SPEC = models.ViTSpec(
    name="tiny", img_size=(8, 8), patch_size=(4, 4), width=12, depth=2, heads=3, hidden=30, num_classes=3
)


@pytest.fixture(scope="module")
def model():
    rng = np.random.default_rng(0)
    shapes = models.abstract_parameters(SPEC)
    params = trees.map_paths(lambda _, leaf: jnp.asarray(0.4 * rng.normal(size=leaf.shape), jnp.float32), shapes)
    return models.build(SPEC, params)


def test_features_are_those_of_the_forward_pass(model):
    images = jnp.asarray(np.random.default_rng(1).normal(size=(4, 8, 8, 3)), jnp.float32)
    places = probing.places_of(SPEC, "all")
    assert len(places) == 2 * 6 * 2 and places_last() in places
    step = jax.jit(probing.make_feature_step(SPEC, None, lambda x: x, places))
    found = dict(zip(places, step(models.parameters(model), images), strict=True))
    first, last = model.blocks
    stream = model.embed(images)
    norm1 = first.norm1(stream)
    mid = stream + first.attn(norm1)
    expected = {
        (0, "ln1", "mean"): norm1.mean(1),
        (0, "mha", "cls"): first.attn(norm1)[:, 0],
        (0, "ln2", "mean"): first.norm2(mid).mean(1),
        (0, "fc1", "mean"): first.mlp.fc1(first.norm2(mid)).mean(1),
        (0, "fc2", "mean"): first.mlp(first.norm2(mid)).mean(1),
        (1, "block", "mean"): last(first(stream)).mean(1),  # the paper's: before the final norm, over all tokens
    }
    for place, value in expected.items():
        assert found[probing.Place(*place)].shape == (4, probing.width_of(SPEC, probing.Place(*place)))
        np.testing.assert_allclose(found[probing.Place(*place)], value, rtol=1e-4, atol=1e-5, err_msg=str(place))
    logits = model.head(model.norm(found[probing.Place(1, "block", "cls")]))
    np.testing.assert_allclose(logits, model(images), rtol=1e-4, atol=1e-5)


def test_a_mean_is_over_the_tokens_of_the_image_not_over_prompts(model):
    prompted, images = peft.attach(model, method="vpt-deep", rank=5), jnp.ones((1, 8, 8, 3))
    step = probing.make_feature_step(SPEC, prompted.slots, lambda x: x, [places_last()])
    tokens = prompted(images, intermediates=True)[1]["blocks"][-1]["output"]
    assert tokens.shape[1] == 1 + 5 + 4  # class token, prompts, patches
    own = jnp.concatenate([tokens[:, :1], tokens[:, 6:]], axis=1)
    np.testing.assert_allclose(step(models.parameters(prompted), images)[0], own.mean(1), rtol=1e-5)


def places_last():
    return probing.places_of(SPEC, "last")[0]


def test_places_are_held_in_groups(monkeypatch):
    places = probing.places_of(SPEC, "all")
    monkeypatch.setattr(probing, "MOST_BYTES", 4 * 10 * 60)  # sixty numbers for each of ten images
    groups = probing._groups(SPEC, places, 10)
    assert [place for group in groups for place in group] == places
    assert max(sum(probing.width_of(SPEC, place) for place in group) for group in groups) <= 60
    monkeypatch.setattr(probing, "MOST_BYTES", 1)  # one place at a time at the least
    assert [len(group) for group in probing._groups(SPEC, places, 10)] == [1] * len(places)


def test_the_classifier_sees_directions_and_counts_what_it_never_learnt():
    rng = np.random.default_rng(2)
    labels = {split: rng.integers(0, 3, count) for split, count in (("train", 90), ("test", 40))}
    centres = 3 * rng.normal(size=(3, 5))
    features = {split: centres[y] + 0.1 * rng.normal(size=(len(y), 5)) for split, y in labels.items()}
    plain = probing.fit(features, labels, 4)
    assert plain["summaries"]["test"]["accuracy"] == 1.0 and plain["summaries"]["test"]["count"] == 40
    assert plain["converged"] and plain["iterations"] > 0
    scaled = {split: x * rng.uniform(0.1, 9, (len(x), 1)) for split, x in features.items()}  # lengths carry nothing
    again = probing.fit(scaled, labels, 4)
    assert again["summaries"]["test"]["loss"] == pytest.approx(plain["summaries"]["test"]["loss"], rel=1e-4)
    labels["test"] = labels["test"].copy()
    labels["test"][:10] = 3  # a class that train lacks
    unseen = probing.fit(features, labels, 4)["summaries"]["test"]
    assert unseen["accuracy"] == pytest.approx(0.75) and np.isfinite(unseen["loss"])


TINY = {"model": "vit_pico_patch4_28", "image_size": 8, "data.name": "digits", "eval_batch_size": 512, "mesh.data": 1}


def test_the_command_writes_what_it_prints(tmp_path, capsys, monkeypatch):
    (tmp_path / "c.py").write_text(
        "from vitplast_jax.training.config import default_config, validate\n"
        f"def get_config():\n    return validate({TINY!r})\n"
    )
    monkeypatch.setattr(probing, "MOST_ITERATIONS", 30)
    argv = ["--config", str(tmp_path / "c.py"), "--workdir", str(tmp_path / "p"), "--config.probe.places=last"]
    with pytest.raises(SystemExit) as caught:
        command.run(probe.main, probe.__doc__, probe.FLAGS, argv)
    printed = capsys.readouterr().out
    assert caught.value.code == 0
    result = json.loads((tmp_path / "p" / "probe.json").read_text())
    assert result["place"] == {"block": 4, "component": "block", "pooling": "mean"}
    assert result["test"]["count"] == 359 and result["test"]["accuracy"] > 0.5  # ten classes, random features
    assert f"test accuracy {result['test']['accuracy']:.2%}" in printed
    rows = list(csv.DictReader((tmp_path / "p" / "probe.csv").read_text().splitlines()))
    assert len(rows) == 1 and float(rows[0]["test"]) == result["test"]["accuracy"] == result["rows"][0]["test"]
    assert result["paper"] is None and result["compilations"] == {"features": 1}
    assert (tmp_path / "p" / "probe.png").read_bytes()[:4] == b"\x89PNG"
    config = settings.validate(TINY | {"probe.places": "last"})
    monkeypatch.setattr(probing, "MOST_ITERATIONS", 1)
    assert not probing.probe(config)["rows"][0]["converged"]


@pytest.mark.parametrize("more", [{}, {"run": "runs/x"}])
def test_the_papers_probe_stands_beside_pretrained_weights_alone(tmp_path, capsys, more):
    row = {"block": 1, "component": "block", "pooling": "mean", "width": 12, "train": 0.9, "validation": None}
    row |= {"test": 0.5, "iterations": 3, "converged": True}
    result = {"protocol": {"data": "cifar100"}, "test": {"accuracy": 0.5}, "validation": None, "rows": [row]}
    result |= {"model": "tiny", "place": places_last()._asdict()}
    probe.report(result | more, tmp_path)
    assert ("(paper: " in capsys.readouterr().out) is not bool(more)


def test_a_run_is_probed_as_it_was_trained(tmp_path, capsys, monkeypatch):
    """Its features are those of the trained model, adapter included, and not those of its start."""
    monkeypatch.setattr(probing, "MOST_ITERATIONS", 30)
    few = {
        "steps": 3,
        "warmup_steps": 1,
        "eval_every": 3,
        "checkpoint_every": 3,
        "batch_size": 16,
        "learning_rate": 1.0,
    }
    config = settings.validate(TINY | few | {"peft.method": "lora", "peft.rank": 2})
    train_and_evaluate(config, tmp_path / "run")
    argv = ["--run", str(tmp_path / "run"), "--workdir", str(tmp_path / "p"), "--config.probe.places=last"]
    with pytest.raises(SystemExit) as caught:
        command.run(probe.main, probe.__doc__, probe.FLAGS, argv)
    assert caught.value.code == 0, capsys.readouterr().err
    result = json.loads((tmp_path / "p" / "probe.json").read_text())
    assert result["step"] == 3 and result["run"] == str(tmp_path / "run")

    trained, features, labels = load_run(tmp_path / "run").model, {}, {}
    prepare = inputs.make_evaluation_preparation(trained.spec, "float32", ragged=False)
    for split in ("train", "test"):
        source = inputs.load_split(config, split)
        _, out = trained(prepare(jnp.asarray(source.images)), intermediates=True)
        features[split] = np.asarray(out["blocks"][-1]["output"].mean(1))
        labels[split] = np.asarray(source.labels)
    expected = probing.fit(features, labels, 10)["summaries"]["test"]
    assert result["test"]["loss"] == pytest.approx(expected["loss"], rel=1e-3)
    start = probing.probe(settings.validate(config.to_dict() | {"probe": {"places": "last"}}))
    assert abs(start["test"]["loss"] - expected["loss"]) > 1e-2 * expected["loss"]
    with pytest.raises(SystemExit) as caught:
        command.run(probe.main, probe.__doc__, probe.FLAGS, [*argv[:4], "--config.steps=3"])
    assert caught.value.code == 2 and "only config.probe.*" in capsys.readouterr().err
