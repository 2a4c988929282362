"""Runs of a small real ViT on real digits, from one step to a finished run. PITFALLS ckpt, masks, R21, R26, R64."""

import functools
import gc
import json
import shutil
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from vitplast_jax import components, models, sharding, trees
from vitplast_jax.errors import UserError
from vitplast_jax.training import checkpoint, cost, inputs, loop, metrics, optim, run, start
from vitplast_jax.training import config as settings
from vitplast_jax.training import evaluation as evaluating
from vitplast_jax.training import step as steps

# A size for tests alone: compiles in seconds.
models.specs.SIZES["nano"] = models.specs._Size(width=32, depth=2, heads=2)

TINY = {
    "model": "vit_nano_patch4_8",
    "data.name": "digits",
    "data.crop_scale": (),
    "data.flip": False,
    "data.shift": 0.1,
    "batch_size": 16,
    "steps": 6,
    "warmup_steps": 2,
    "eval_every": 3,
    "checkpoint_every": 2,
    "log_every": 1,
    "learning_rate": 0.03,
    "trainable": ("mha",),
    "mesh.data": 1,
}


def tiny(**overrides):
    return settings.validate(
        {key: value for key, value in (TINY | {k.replace("__", "."): v for k, v in overrides.items()}).items()}
    )


def state_of(workdir, step):
    with checkpoint.Checkpoints(workdir / "checkpoints") as checkpoints:
        restored = checkpoints._latest.restore(step).state
    return trees.flatten(restored)


def same(a, b):
    assert a.keys() == b.keys()
    for path in a:
        np.testing.assert_array_equal(np.asarray(a[path]), np.asarray(b[path]), err_msg=path)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run with weight decay, momentum and dropout that nothing disturbed."""
    workdir = tmp_path_factory.mktemp("straight")
    results = loop.train_and_evaluate(tiny(weight_decay=0.1, dropout=0.1), workdir)
    return workdir, results


def test_a_run_folder_holds_what_readme_says(straight):
    workdir, results = straight
    assert {"config.json", "metrics.jsonl", "results.json", "checkpoints", "environment.json"} <= {
        entry.name for entry in workdir.iterdir()
    }
    assert json.loads((workdir / "results.json").read_text()) == json.loads(json.dumps(results))
    assert results["test"]["count"] == 359 and results["validation"]["count"] + 360 < 1797
    assert results["compilations"] == {"train": 1, "evaluate": 1}
    assert results["trainable"] == ["mha", "head", "final_norm"]
    counted = results["parameters"]
    assert counted["trainable"] == counted["method"] + counted["head"] == 2 * (4 * 32**2 + 4 * 32) + 2 * 32 + 330
    assert counted["head"] == 330
    lines = run.read_metrics(workdir / "metrics.jsonl")
    training = [line for line in lines if "split" not in line]
    assert [line["step"] for line in training] == [1, 2, 3, 4, 5, 6]
    assert {
        "loss",
        "learning_rate",
        "grad_norm",
        "grad_norm/mha",
        "grad_norm/head",
        "images_per_second",
        "data_wait",
    } <= (training[0].keys())
    assert "grad_norm/fc1" not in training[0]
    whole = sum(training[0][f"grad_norm/{name}"] ** 2 for name in ("mha", "head", "final_norm")) ** 0.5
    assert training[0]["grad_norm"] == pytest.approx(whole, rel=1e-5)
    assert training[0]["learning_rate"] == 0.0 and training[1]["learning_rate"] == pytest.approx(0.015)
    assert [(line["step"], line["split"]) for line in lines if "split" in line][:2] == [
        (3, "validation"),
        (6, "validation"),
    ]


def test_frozen_leaves_are_bit_identical_and_have_no_state(straight):
    workdir, _ = straight
    before = trees.flatten(models.initial_parameters(models.specs.spec("vit_nano_patch4_8", num_classes=10), 0))
    after = trees.flatten(models.parameters(run.load_run(workdir).model))
    trained = {path for path in after if components.locate(path).component in ("mha", "head", "final_norm")}
    for path in after:
        equal = np.array_equal(before[path], after[path])
        assert equal == (path not in trained), path
    held = [path for path in state_of(workdir, 6) if not path.startswith("trainable")]
    assert sum("attn" in path for path in held) == 2 * 4 and not any("mlp" in path or "norm1" in path for path in held)


def test_continuing_equals_no_interruption_bit_for_bit(straight, tmp_path, monkeypatch):
    class Stop(Exception):
        pass

    original, calls = run.MetricsLog.write, []

    def stop_at_five(self, **entry):
        original(self, **entry)
        calls.append(entry)
        if entry["step"] == 5:
            raise Stop

    config = tiny(weight_decay=0.1, dropout=0.1)
    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(run.MetricsLog, "write", stop_at_five)
        loop.train_and_evaluate(config, tmp_path)
    results = loop.train_and_evaluate(config, tmp_path)  # continues at step 4
    same(state_of(tmp_path, 6), state_of(straight[0], 6))
    assert results["test"] == straight[1]["test"] and results["best_step"] == straight[1]["best_step"]
    lines = run.read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines if "split" not in line] == [1, 2, 3, 4, 5, 6]


def test_a_finished_run_is_not_run_again(straight):
    before = (straight[0] / "metrics.jsonl").read_text()
    again = loop.train_and_evaluate(tiny(weight_decay=0.1, dropout=0.1), straight[0])
    assert again == json.loads(json.dumps(straight[1]))
    assert (straight[0] / "metrics.jsonl").read_text() == before


def test_another_run_is_refused_and_overwrite_discards(straight, tmp_path):
    workdir, _ = straight
    with pytest.raises(UserError) as caught:
        loop.train_and_evaluate(tiny(weight_decay=0.1, dropout=0.1, trainable=("ln1",), seed=1), workdir)
    text = str(caught.value)
    assert 'holds another run: seed was 0, now 1; trainable was ["mha"], now ["ln1"]' in text and "--overwrite" in text
    config = tiny(steps=1, warmup_steps=0)
    loop.train_and_evaluate(config, tmp_path)
    with pytest.raises(UserError):  # what cannot start discards nothing
        loop.train_and_evaluate(
            tiny(steps=1, warmup_steps=0, learning_rate_factors=("fc1=2",)), tmp_path, overwrite=True
        )
    assert json.loads((tmp_path / "results.json").read_text())["trainable"][0] == "mha"
    results = loop.train_and_evaluate(tiny(steps=1, warmup_steps=0, trainable=("ln1",)), tmp_path, overwrite=True)
    assert results["trainable"][0] == "ln1"


def test_a_run_may_be_continued_on_other_devices(straight, tmp_path):
    config = tiny(weight_decay=0.1, dropout=0.1, mesh__data=8)
    results = loop.train_and_evaluate(config, tmp_path)
    assert results["parameters"] == straight[1]["parameters"]
    got = state_of(tmp_path, 6)
    for path, leaf in state_of(straight[0], 6).items():
        np.testing.assert_allclose(np.asarray(got[path]), np.asarray(leaf), atol=2e-6, err_msg=path)
    (tmp_path / "results.json").unlink()
    again = loop.train_and_evaluate(tiny(weight_decay=0.1, dropout=0.1, mesh__data=1), tmp_path)  # restores 8 -> 1
    assert again["test"]["accuracy"] == results["test"]["accuracy"]
    assert again["test"]["loss"] == pytest.approx(results["test"]["loss"], abs=1e-6)


def test_a_checkpoint_of_another_structure_is_refused(straight, tmp_path):
    target = {"a": jax.ShapeDtypeStruct((2, 3), jnp.float32)}
    with checkpoint.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save_best(1, {"a": jnp.ones((2, 2)), "b": jnp.ones(1)})
    with checkpoint.Checkpoints(tmp_path) as checkpoints, pytest.raises(UserError) as caught:
        checkpoints.restore_best(target, 1)
    assert "trainable/b is not expected; trainable/a is float32[2, 2], expected float32[2, 3]" in str(caught.value)


def test_a_save_that_fails_is_not_silent(tmp_path):
    checkpoints = checkpoint.Checkpoints(tmp_path)
    (tmp_path / "latest").rmdir()
    (tmp_path / "latest").write_text("in the way")
    with pytest.raises((OSError, ValueError)):
        checkpoints.save_latest(1, {"a": jnp.ones(2)}, {"best_step": None})
        checkpoints.wait()


@pytest.mark.parametrize("batch_size, devices, fsdp", [(1, 1, 1), (64, 1, 1), (100, 1, 1), (100, 8, 1), (64, 2, 4)])
def test_an_evaluation_counts_every_example_once(straight, batch_size, devices, fsdp):
    workdir, results = straight
    mesh = sharding.make_mesh(devices, fsdp)
    finished = run.load_run(workdir, mesh)
    config = tiny(eval_batch_size=batch_size, mesh__data=devices)
    data = {"test": inputs.load_split(config, "test")}
    evaluator = evaluating.Evaluator(finished.spec, mesh, data, config)
    params = models.parameters(finished.model)  # each leaf went straight to its place
    assert jax.tree.map(lambda leaf: leaf.sharding, params) == sharding.parameters(mesh, params)
    summary = evaluator(params, {}, "test")
    assert summary["accuracy"] == results["test"]["accuracy"] and summary["count"] == 359
    assert summary["loss"] == pytest.approx(results["test"]["loss"], rel=1e-6)
    assert evaluator.compilations == 1


def test_padding_is_neither_dropped_nor_counted():
    # R26: 1003 examples of which 895 are right.
    right = np.arange(1003) < 895
    batches = []
    for first in range(0, 1003, 64):
        rows = np.arange(first, first + 64)
        mask = rows < 1003
        label = np.where(mask, 0, 1)
        batches.append(
            {"loss": np.ones(64), "label": label, "prediction": np.where(right[rows % 1003], label, 2), "mask": mask}
        )
    evaluation = metrics.evaluate(batches, lambda batch: batch, 3)
    assert evaluation.summary() == {"accuracy": 895 / 1003, "balanced_accuracy": 895 / 1003, "loss": 1.0, "count": 1003}
    assert evaluation.per_class() == [895 / 1003, None, None]
    assert evaluation.confusion.tolist() == [[895, 0, 108], [0, 0, 0], [0, 0, 0]]


@functools.cache
def ten_steps(optimizer, mesh_size=1, accumulation=1):
    """Parameters and metrics after ten steps on one batch, and the size of the first step's gradients (AdamW)."""
    config = tiny(optimizer=optimizer, learning_rate=1e-3, batch_size=64, warmup_steps=0, trainable=("all",))
    mesh = sharding.make_mesh(mesh_size)
    spec = models.specs.spec("vit_nano_patch4_8", num_classes=10)
    params = models.initial_parameters(spec, 0)
    trainable, frozen = trees.partition(params, run.trainable_mask(config, params))
    optimizer, schedule = optim.make_optimizer(config, trainable, spec.depth)
    source = inputs.load_split(config, "train")
    prepare = inputs.make_training_preparation(config, spec, source)
    step = jax.jit(
        steps.make_train_step(
            models.structure(spec),
            optimizer,
            schedule,
            prepare,
            seed=0,
            label_smoothing=0.1,
            accumulation=accumulation,
            mesh=mesh,
        )
    )
    batch = inputs.to_devices({"image": source.images[:64], "label": source.labels[:64]}, mesh)
    state = steps.TrainState(jnp.zeros((), jnp.int32), trainable, optimizer.init(trainable))
    state, measured = step(state, frozen, batch)
    moments = [x.nu for x in jax.tree.leaves(state.opt_state, is_leaf=is_adam) if is_adam(x)]
    first = {path: np.sqrt(nu / 1e-3) for path, nu in trees.flatten(moments[0]).items()} if moments else {}
    for _ in range(9):
        state, measured = step(state, frozen, batch)
    return trees.flatten(state.trainable), measured, first


def is_adam(node):
    return isinstance(node, optax.ScaleByAdamState)


@pytest.mark.parametrize(
    "devices, accumulation, optimizer, tolerance",
    [(8, 1, "sgd", 1e-6), (1, 4, "sgd", 1e-6), (4, 4, "sgd", 1e-6), (4, 4, "adamw", 1e-5)],
)
def test_the_gradient_is_the_mean_over_the_global_batch(devices, accumulation, optimizer, tolerance):
    expected, loss, first = ten_steps(optimizer)
    got, other, _ = ten_steps(optimizer, devices, accumulation)
    assert float(other["loss"]) == pytest.approx(float(loss["loss"]), abs=1e-5)
    for path, leaf in expected.items():
        clear = np.ones(leaf.shape, bool)
        if optimizer == "adamw":
            # Adam divides a gradient by its size + 1e-8, so one that is zero but for rounding becomes a step of noise:
            # the key bias's always, another element's by chance (seen: 2e-9 in a kernel whose gradients are 2e-3).
            clear = first[path] > 1e-7
            key_bias = path.endswith("qkv/bias")
            assert (~clear).sum() <= (leaf.size // 3 if key_bias else max(1, leaf.size // 1000)), path
        np.testing.assert_allclose(got[path][clear], leaf[clear], atol=tolerance, err_msg=path)


def lowered(selectors, spec, batch=7):
    """The training step for these selectors, lowered from shapes alone."""
    params = models.abstract_parameters(spec)
    trainable, frozen = trees.partition(params, components.mask(params, selectors))
    config = tiny(warmup_steps=0)
    optimizer, schedule = optim.make_optimizer(config, trainable, spec.depth)

    def prepare(images, keys):
        return images.astype(jnp.float32) / 255

    step = steps.make_train_step(models.structure(spec), optimizer, schedule, prepare, seed=0)
    state = jax.eval_shape(lambda t: steps.TrainState(jnp.zeros((), jnp.int32), t, optimizer.init(t)), trainable)
    images = jax.ShapeDtypeStruct((batch, *spec.img_size, 3), jnp.uint8)
    return jax.jit(step).lower(state, frozen, {"image": images, "label": jax.ShapeDtypeStruct((batch,), jnp.int32)})


def weight_gradients(text, spec):
    """Products in the HLO whose result has the shape of an FC or attention kernel."""
    d, f = spec.width, spec.hidden
    shapes = {(d, 3 * d), (3 * d, d), (d, d), (d, f), (f, d)}
    names = tuple(f"= f32[{a},{b}]" for a, b in shapes)
    return [line for line in text.splitlines() if "dot(" in line and any(name in line for name in names)]


def test_an_ln1_step_has_no_weight_gradient_of_a_kernel():
    spec = models.specs.spec("vit_nano_patch4_8", num_classes=10)  # of 7 images: no activation has a kernel's shape
    full = lowered("all", spec).compile().as_text()
    alone = lowered(["ln1", "head", "final_norm"], spec).compile().as_text()
    assert len(weight_gradients(full, spec)) >= 4 * spec.depth
    assert weight_gradients(alone, spec) == []


@pytest.mark.slow
def test_ln1_of_vit_base_costs_at_most_0_7_of_a_full_step():
    spec = models.specs.spec("vit_base_patch16_224", num_classes=10)
    full = cost.analyse(lowered("all", spec).compile()).flops
    alone = cost.analyse(lowered(["ln1", "head", "final_norm"], spec).compile()).flops
    assert 0.5 < alone / full <= 0.70


def test_a_step_that_does_not_fit_is_said_at_start_with_what_would(monkeypatch, tmp_path):
    needed = []
    analyse = cost.analyse

    def record(compiled):
        needed.append(analyse(compiled).bytes)
        return analyse(compiled)

    monkeypatch.setattr(cost, "analyse", record)
    loop.train_and_evaluate(tiny(steps=1, warmup_steps=0, batch_size=64, eval_batch_size=16), tmp_path / "fits")
    monkeypatch.setattr(cost, "device_bytes", lambda: needed[0] - 1)
    with pytest.raises(UserError, match=r"needs 0\.\d\d GB on each device.*--config.microbatch=32 fits"):
        loop.train_and_evaluate(tiny(steps=1, warmup_steps=0, batch_size=64, eval_batch_size=16), tmp_path / "not")
    assert not (tmp_path / "not").exists()
    results = loop.train_and_evaluate(
        tiny(steps=1, warmup_steps=0, batch_size=64, eval_batch_size=16, microbatch="auto"), tmp_path / "auto"
    )
    assert results["compilations"]["train"] == 2
    expected = state_of(tmp_path / "fits", 1)
    for path, leaf in state_of(tmp_path / "auto", 1).items():
        np.testing.assert_allclose(np.asarray(leaf), np.asarray(expected[path]), atol=1e-6, err_msg=path)


def test_the_same_seed_gives_the_same_head_whatever_trains():
    heads = [
        start.load_start(tiny(trainable=(name,)), [str(i) for i in range(10)]).params["head"] for name in ("mha", "fc1")
    ]
    np.testing.assert_array_equal(heads[0]["kernel"], heads[1]["kernel"])


@pytest.mark.parametrize(
    "overrides, says",
    [
        ({"model": ""}, "config.model and config.weights are both empty"),
        ({"data__name": ""}, "config.data.name is empty"),
        ({"trainable": ("mha@7",)}, "has no block 7"),
        ({"num_classes": 3}, "config.num_classes is 3, but the data have 10 classes"),
        ({"mesh__data": 3}, "batch_size 16 is not a multiple of the 3 devices"),
        ({"mesh__data": 9}, "needs 9 devices, there are 8"),
        ({"image_size": (30, 30)}, "30 is not a multiple of the patch size 4"),
        ({"accumulation": 16, "mesh__data": 8}, "cannot be shared equally by 8 devices"),
        ({"learning_rate_factors": ("fc1=2",)}, "factor 'fc1=2': of what trains"),
    ],
)
def test_what_cannot_run_is_said_in_one_line_before_anything_is_written(overrides, says, tmp_path):
    with pytest.raises(UserError) as caught:
        loop.train_and_evaluate(tiny(**overrides), tmp_path / "run")
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_evaluate_run_maps_classes_by_name():
    config = tiny()
    source = inputs.load_split(config, "test")
    names = tuple(reversed(source.class_names))
    mapped = inputs.with_labels_of(source, names)
    assert [names[label] for label in mapped.labels[:20]] == [source.class_names[label] for label in source.labels[:20]]
    with pytest.raises(UserError, match="has classes that the model does not know: 0"):
        inputs.with_labels_of(source, names[:-1])


def test_a_best_checkpoint_is_on_disk_before_a_record_names_it(tmp_path):
    # The best is saved in the background; a kill right after the latest must find it.
    with checkpoint.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save_best(2, {"a": jnp.ones((512, 512))})
        checkpoints.save_latest(2, {"a": jnp.ones(3)}, {"best_step": 2})
        assert (tmp_path / "best" / "2").is_dir() and (tmp_path / "latest" / "2").is_dir()


def test_a_save_keeps_the_values_of_its_moment(tmp_path):
    # The next step overwrites the buffers that are still being written.
    bump = jax.jit(lambda x: x + 1, donate_argnums=0)
    value = jnp.zeros((2048, 2048))
    with checkpoint.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save_best(1, {"a": value})
        for _ in range(5):
            value = bump(value)
        checkpoints.wait()
        target = {"a": jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding)}
        assert float(jnp.abs(checkpoints.restore_best(target, 1)["a"]).max()) == 0.0


def test_best_checkpoints_of_steps_that_run_again_are_forgotten(tmp_path):
    with checkpoint.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save_best(2, {"a": jnp.zeros(3)})
        checkpoints.save_latest(2, {"a": jnp.zeros(3)}, {"best_step": 2})
        checkpoints.save_best(4, {"a": jnp.zeros(3)})
        checkpoints.wait()
    target = {"a": jax.ShapeDtypeStruct((3,), jnp.float32, sharding=jnp.zeros(3).sharding)}
    with checkpoint.Checkpoints(tmp_path) as checkpoints:
        checkpoints.forget_after_latest()
        assert checkpoints._best.all_steps() == [2]
        checkpoints.save_best(4, {"a": jnp.ones(3)})
        checkpoints.wait()
        np.testing.assert_array_equal(checkpoints.restore_best(target, 4)["a"], 1.0)


def test_a_lost_best_checkpoint_is_said_at_once(tmp_path):
    target = {"a": jax.ShapeDtypeStruct((3,), jnp.float32, sharding=jnp.zeros(3).sharding)}
    with checkpoint.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save_latest(2, {"a": jnp.zeros(3)}, {"best_step": 1})
        with pytest.raises(UserError, match="the best checkpoint, of step 1, is gone"):
            checkpoints.restore_latest(target)


def test_a_run_that_diverges_stops_with_a_line_that_says_so(tmp_path):
    with pytest.raises(UserError, match=r"the run diverged \(.*\); lower config.learning_rate"):
        loop.train_and_evaluate(tiny(learning_rate=1e30, clip_norm=0.0, warmup_steps=0), tmp_path)
    assert all(np.isfinite(line["loss"]) for line in run.read_metrics(tmp_path / "metrics.jsonl"))


def test_two_processes_cannot_train_in_one_folder(tmp_path):
    claim = run.Claim({"format": 1}, overwrite=False)
    with run.take(tmp_path, claim, 1), pytest.raises(UserError, match="another process trains in"):
        with run.take(tmp_path, claim, 1):
            pass


def test_leftovers_without_a_config_are_not_taken_over(tmp_path):
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(UserError, match="has results.json but no config.json"):
        loop.train_and_evaluate(tiny(), tmp_path)


def test_selectors_that_do_not_apply_are_left_out_of_what_is_reported():
    config = tiny(also_trainable=("head", "ls1", "all@1"))
    assert run.applied_selectors(config, ("ln1", "mha", "head")) == ["mha", "head", "all@1"]


def test_an_evaluation_on_train_uses_the_batch_size(straight):
    summary, names = evaluating.evaluate_run(straight[0], "train", 300)
    assert summary["count"] == 1797 - 359 - 287 and names == tuple("0123456789")
    assert summary["split"] == "train" and sum(map(sum, summary["confusion"])) == summary["count"]


@pytest.mark.parametrize("victim", ["state/_METADATA", "state", "state/manifest.ocdbt"])
def test_a_damaged_checkpoint_is_one_line_that_names_it(straight, tmp_path, victim, monkeypatch):
    # Orbax's other reads end after the first has failed, and find their event loop closed: no fault of the next test.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    copy = tmp_path / "run"
    shutil.copytree(straight[0], copy)
    damaged = copy / "checkpoints" / "best" / str(straight[1]["best_step"]) / victim
    shutil.rmtree(damaged) if damaged.is_dir() else damaged.unlink()
    with pytest.raises(UserError, match=r"checkpoint .*/best/\d+ is damaged \(.*\); delete that folder"):
        run.load_run(copy)
    gc.collect()
    time.sleep(1.0)


@pytest.mark.parametrize("content", ["", "{}", "[]", "null"])
@pytest.mark.parametrize("name", ["config.json", "results.json"])
def test_damaged_json_is_one_line_that_names_it(straight, tmp_path, name, content):
    copy = tmp_path / "run"
    shutil.copytree(straight[0], copy, ignore=shutil.ignore_patterns("checkpoints"))
    (copy / name).write_text(content)
    with pytest.raises(UserError, match=f"{name} is damaged"):
        run.load_run(copy)
    with pytest.raises(UserError, match=f"{name} is damaged"):
        loop.train_and_evaluate(tiny(weight_decay=0.1, dropout=0.1), copy)


def test_a_diverged_step_is_neither_saved_nor_chosen(tmp_path):
    config = tiny(learning_rate=1e30, clip_norm=0.0, warmup_steps=0, log_every=100, eval_every=1, checkpoint_every=1)
    with pytest.raises(UserError, match="the run diverged"):
        loop.train_and_evaluate(config, tmp_path)
    for saved in (tmp_path / "checkpoints" / "latest").glob("[0-9]*"):
        assert all(np.isfinite(np.asarray(leaf)).all() for leaf in state_of(tmp_path, int(saved.name)).values())


def test_data_that_changed_since_the_run_are_not_evaluated(straight, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(straight[0], copy)
    described = json.loads((copy / "config.json").read_text())
    described["data_fingerprint"]["test"] = "0" * 64
    (copy / "config.json").write_text(json.dumps(described))
    with pytest.raises(UserError, match="the test split of digits is no longer the run's"):
        evaluating.evaluate_run(copy)
