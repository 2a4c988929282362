"""Lists, Parquet and tar shards: the same images give the same numbers, however they are packed; classes go by name."""

import io
import json
import tarfile

import jax
import numpy as np
import pytest
from PIL import Image

from vitplast_jax import components, models, trees
from vitplast_jax.command import load_config
from vitplast_jax.data import decode, memory, prepare, prepared, protocols, sources
from vitplast_jax.errors import UserError
from vitplast_jax.training import inputs, loop, optim, run
from vitplast_jax.training import step as steps

models.specs.SIZES["nano"] = models.specs._Size(width=32, depth=2, heads=2)  # a size for tests alone
NAMES = ("bird", "cat", "dog")


def encoded(pixels, kind="PNG"):
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, kind)
    return stream.getvalue()


def image(label, place, split):
    random = np.random.RandomState(100 * label + place + 50 * (split == "test"))
    return (random.randint(0, 60, (8, 8)) + 60 * label).astype(np.uint8)


def examples():
    """(split, class, name, pixels) in the order of a folder: classes sorted, then names."""
    for split, count in (("train", 8), ("test", 4)):
        for label, name in enumerate(NAMES):
            for place in range(count):
                yield split, label, f"{name}/{place}.png", image(label, place, split)


def write_folder(root):
    for split, _, name, pixels in examples():
        path = root / split / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(pixels))
    return "folder", root


def write_table(root):
    write_folder(root)
    lines = [f"{split}/{name},{NAMES[label]},{split}" for split, label, name, _ in examples()]
    (root / "all.csv").write_text("\n".join(["path,label,split", *lines]))
    return "table", root / "all.csv"


def write_npz(root):
    arrays = {"class_names": np.asarray(NAMES)}
    for split in ("train", "test"):
        chosen = [(pixels, label) for part, label, _, pixels in examples() if part == split]
        arrays[f"x_{split}"] = np.stack([pixels for pixels, _ in chosen])
        arrays[f"y_{split}"] = np.asarray([label for _, label in chosen])
    np.savez(root / "all.npz", **arrays)
    return "npz", root / "all.npz"


def write_parquet(root):
    import pyarrow
    from pyarrow import parquet

    hub = {"info": {"features": {"label": {"names": NAMES, "_type": "ClassLabel"}}}}
    for split in ("train", "test"):
        rows = [(pixels, label, name) for part, label, name, pixels in examples() if part == split]
        columns = {
            "image": [{"bytes": encoded(pixels), "path": name} for pixels, _, name in rows],
            "label": [label for _, label, _ in rows],
        }
        table = pyarrow.table(columns).replace_schema_metadata({"huggingface": json.dumps(hub)})
        parquet.write_table(table, root / f"{split}-00000-of-00001.parquet", row_group_size=5)
    return "parquet", root


def write_tar(root):
    (root / "classes.txt").write_text("\n".join(NAMES))
    for split in ("train", "test"):
        with tarfile.open(root / f"{split}-000.tar", "w") as tar:
            for number, (_, label, _, pixels) in enumerate(e for e in examples() if e[0] == split):
                for suffix, data in (("png", encoded(pixels)), ("cls", str(label).encode())):
                    member = tarfile.TarInfo(f"{number:05}.{suffix}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    return "tar", root


def write_records(root):
    import dataclasses

    row = dataclasses.replace(protocols.task("fashion_mnist_tfds"), classes=len(NAMES))
    stream = ((split, encoded(pixels), label) for split, label, _, pixels in examples())
    prepare.write_records(root / prepared.DATA, row.name, list(NAMES), stream)
    prepare.write_index(row, root, {"label": list(NAMES)})
    return "tfds", root


WRITERS = (write_folder, write_table, write_npz, write_parquet, write_tar, write_records)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """{name of the source: its path} of the same images."""
    return dict(writer(tmp_path_factory.mktemp(writer.__name__)) for writer in WRITERS)


def test_the_same_images_however_they_are_packed(packed):
    expected = {split: [e for e in examples() if e[0] == split] for split in ("train", "test")}
    for name, path in packed.items():
        for split, found in expected.items():
            source = memory.keep(decode.check(sources.load(name, path, split, validation=0)), 1e9)
            assert source.class_names == NAMES and source.labels.tolist() == [e[1] for e in found], name
            assert source.images.shape == (len(found), 8, 8, 1), name
            np.testing.assert_array_equal(source.read(np.arange(len(found)))[..., 0], [e[3] for e in found], name)


def settings(packed, name, **overrides):
    small = {"weights": "", "model": "vit_nano_patch4_8", "data.name": name, "batch_size": "8"}
    small |= {
        "data.path": str(packed[name]),
        "data.validation": "0",
        "steps": "2",
        "warmup_steps": "0",
        "log_every": "1",
    }
    small |= {"data.crop_scale": "0.3,1", "data.flip": "true", "mesh.data": "1", "data.shift": "0", "trainable": "ln1"}
    small |= {key.replace("__", "."): value for key, value in overrides.items()}
    return load_config("configs/quickstart.py", list(small.items()))


def test_finetuning_gives_the_same_numbers_however_the_images_are_packed(packed, tmp_path):
    results = {}
    for name in packed:
        found = loop.train_and_evaluate(settings(packed, name), tmp_path / name)
        lines = run.read_metrics(tmp_path / name / "metrics.jsonl")
        results[name] = (found["test"], [line["loss"] for line in lines if "grad_norm" in line])
        assert all(0 <= line["data_wait"] <= 1 for line in lines if "grad_norm" in line)
    assert all(result == results["folder"] for result in results.values()), results


def test_memory_changes_no_number(packed):
    path = packed["folder"]
    kept, not_kept = (memory.keep(decode.check(sources.load("folder", path)), budget) for budget in (1e9, 0))
    assert kept.fingerprint == not_kept.fingerprint == sources.load("folder", path).fingerprint
    order = np.asarray([3, 0, 3])
    for _ in range(2):
        np.testing.assert_array_equal(kept.read(order), not_kept.read(order))
    assert kept.images._known.sum() == 2 and not_kept.images._pixels is None
    np.testing.assert_array_equal(kept.take(order).read([0, 1]), kept.read(order[:2]))
    np.testing.assert_array_equal(kept.images[1], kept.read([1])[0])


def test_larger_images_are_kept_one_by_one(tmp_path):
    for number, side in enumerate((9, 12, 20, 7)):
        path = tmp_path / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(encoded(np.full((side, side, 3), number, np.uint8)))
    source = decode.check(sources.load("folder", tmp_path, "train"))
    assert memory.keep(source, 0).kept is None
    kept = memory.keep(source, 1e9)
    assert memory.open_example(kept, 0).size == memory.open_example(kept, 0).size and [*kept.kept] == [0]


def test_balanced_weights_by_hand(packed):
    config = settings(packed, "npz", data__class_weights="balanced")
    source = sources.load("npz", packed["npz"], validation=0).take(np.asarray([0, 1, 2, 3, 8, 9, 16, 17]))
    np.testing.assert_allclose(inputs.class_weights(config, source, 4)[:3], [8 / 12, 8 / 6, 8 / 6])
    assert inputs.class_weights(settings(packed, "npz"), source, 4) is None
    assert inputs.class_weights(config, source, 4)[source.labels].mean() == pytest.approx(1)


def test_numbers_as_labels_and_columns_of_other_names(tmp_path):
    for i in range(4):
        (tmp_path / f"{i}.png").write_bytes(encoded(image(0, i, "train")))
    (tmp_path / "list.jsonl").write_text("".join(json.dumps({"file_name": f"{i}.png", "class": [2, 10][i % 2]}) + "\n" for i in range(4)))  # fmt: skip # noqa: E501
    train, test = (sources.load("table", tmp_path / "list.jsonl", split, validation=0) for split in ("train", "test"))
    assert train.class_names == ("2", "10") and sorted(train.ids + test.ids) == [f"{i}.png" for i in range(4)]


@pytest.mark.parametrize(
    ("name", "file", "content", "message"),
    [
        ("table", "a.csv", "file,kind\nx.png,cat\n", "a.csv:2: has no label; expected a column called label or class"),
        ("table", "a.csv", "path,label,split\nx.png,cat,never\n", "a.csv:2: split is 'never', expected train"),
        ("table", "a.jsonl", "{\n", "a.jsonl: cannot be read as JSONL"),
        ("table", "a.jsonl", "[1]\n", "a.jsonl: cannot be read as JSONL: a line is no object"),
        ("table", "a.csv", "path,label\nx.png,cat\ny.png,cat\n", "only one class, 'cat'"),
        (
            "table",
            "a.csv",
            "path,label,split\nx,cat,train\ny,dog,train\nz,cow,test\n",
            "unknown class 'cow'; train has cat, dog",
        ),
        ("table", "test.csv", "path,label\nx,cat\n", "has test; expected train"),
        ("parquet", "a.parquet", "no", "a.parquet: cannot be read as Parquet"),
        ("parquet", "a.txt", "no", "has no .parquet file"),
        ("tar", "a.tar", "0123456789", "a.tar: cannot be read as an uncompressed tar file"),
    ],
)
def test_lists_that_are_wrong(tmp_path, name, file, content, message):
    (tmp_path / file).write_text(content)
    with pytest.raises(UserError) as error:
        sources.load(name, tmp_path)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_missing_or_broken_image_is_named(packed, tmp_path):
    (tmp_path / "a.csv").write_text("path,label\nx.png,cat\ny.png,dog\nz.png,dog\nw.png,cat\n")
    for name in "xyw":
        (tmp_path / f"{name}.png").write_bytes(encoded(image(0, 0, "train")))
    source = sources.load("table", tmp_path / "a.csv", "train", validation=0)
    if "z.png" not in source.ids:
        source = sources.load("table", tmp_path / "a.csv", "test", validation=0)
    with pytest.raises(UserError, match=r"z.png \(example \d\): no such file"):
        decode.check(source)
    shard = tmp_path / "train.tar"
    with tarfile.open(shard, "w") as tar:
        for label, data in (("cat", encoded(image(0, 0, "train"))), ("dog", b"<html>")):
            member = tarfile.TarInfo(f"{label}/1.png")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    with pytest.raises(UserError, match=r"train.tar: dog/1.png \(example 1\): is not an image of a known format"):
        decode.check(sources.load("tar", shard.parent, "train", validation=0))


def test_parts_of_a_batch_mix_and_weigh_like_the_whole():
    spec = models.specs.spec("vit_nano_patch4_8", num_classes=3)
    params = models.initial_parameters(spec, 0)
    trainable, frozen = trees.partition(params, components.mask(params, ["ln1", "head"]))
    config = load_config(
        "configs/quickstart.py", [("data.mixup", "0.8"), ("data.cutmix", "1"), ("learning_rate", "0.1")]
    )
    batch = {"image": np.stack([image(i % 3, i, "train")[..., None] for i in range(8)]), "label": np.arange(8) % 3}

    def loss(parts, weights, mixing):
        optimizer, schedule = optim.make_optimizer(config, trainable, spec.depth)

        def prepare(images, keys):
            return np.float32(1 / 255) * images.astype(np.float32).repeat(3, -1)

        step = steps.make_train_step(
            models.structure(spec), optimizer, schedule, prepare, seed=0, accumulation=parts, class_weights=weights,
            mixing=mixing,
        )  # fmt: skip
        state = steps.TrainState(np.int32(0), trainable, optimizer.init(trainable))
        return float(jax.jit(step)(state, frozen, batch)[1]["loss"])

    weights = np.asarray([1.0, 2.0, 0.5], np.float32)
    assert loss(1, weights, inputs.mixing_of(config)) == pytest.approx(
        loss(2, weights, inputs.mixing_of(config)), abs=1e-5
    )
    plain = loss(1, None, None)
    assert loss(1, np.full(3, 2, np.float32), None) == pytest.approx(2 * plain, rel=1e-5)
