"""Benchmarks: the table against the papers' numbers, labels by hand, and records of every row's real TFDS schema."""

import dataclasses
import io
import json
import re
import runpy
import shutil
import zipfile

import numpy as np
import pytest
from PIL import Image

from vitplast_jax import command
from vitplast_jax.data import decode, memory, prepare, prepared, protocols, records, sources
from vitplast_jax.errors import UserError

# ORACLES B2 and A3
VTAB = {
    **{"caltech101": 102, "cifar100": 100, "dtd": 47, "flowers": 102, "pets": 37, "svhn": 10, "sun397": 397},
    **{"camelyon": 2, "eurosat": 10, "resisc45": 45, "retinopathy": 5},
    **{"clevr_count": 8, "clevr_dist": 6, "dmlab": 6, "kitti": 4, "dspr_loc": 16, "dspr_ori": 16},
    **{"snorb_azim": 18, "snorb_ele": 9},
}
# The tests of VTAB-1k, as published with the benchmark.
VTAB_TESTS = {
    **{"caltech101": 6084, "cifar100": 10_000, "dtd": 1880, "flowers": 6149, "pets": 3669, "svhn": 26_032},
    **{"sun397": 21_750, "camelyon": 32_768, "eurosat": 5400, "resisc45": 6300, "retinopathy": 42_670},
    **{"clevr_count": 15_000, "clevr_dist": 15_000, "dmlab": 22_735, "kitti": 711, "dspr_loc": 73_728},
    **{"dspr_ori": 73_728, "snorb_azim": 12_150, "snorb_ele": 12_150},
}
FGVC = {"cub": 200, "nabirds": 555, "flowers": 102, "dogs": 120, "cars": 196}
PLASTICITY = {
    **{"cifar10": 10, "cifar100": 100, "flowers102": 102, "pet": 37, "domainnet/clipart": 345, "domainnet/sketch": 345},
    **{f"cifar10_c/{name}_5": 10 for name in ("contrast", "gaussian_noise", "motion_blur", "snow", "speckle_noise")},
}


def size_of(row, split):
    sizes = [len(range(row.counts[part])[first:last]) for part, first, last in row.parts[split]]
    return sum(sizes)


def test_the_table_has_the_papers_tasks():
    rows = protocols.TASKS
    assert {name.removeprefix("vtab/"): row.classes for name, row in rows.items() if row.benchmark == "vtab"} == VTAB
    assert {name.removeprefix("fgvc/"): row.classes for name, row in rows.items() if row.benchmark == "fgvc"} == FGVC
    assert {name: rows[name].classes for name in PLASTICITY} == PLASTICITY
    # FGVC and VTAB means of the head's size in ORACLES B2: 234.6 and 49.5 classes
    assert np.mean([*FGVC.values()]) == pytest.approx(234.6) and np.mean([*VTAB.values()]) == pytest.approx(
        49.5, abs=0.05
    )
    for name, row in rows.items():
        assert row.name == name and row.licence and row.megabytes > 0 and bool(row.manual) == bool(row.files), name


def test_vtab_is_800_and_200_apart_and_the_published_test():
    for name, tested in VTAB_TESTS.items():
        row = protocols.task(f"vtab/{name}")
        assert (size_of(row, "train"), size_of(row, "validation"), size_of(row, "test")) == (800, 200, tested), name
        taken = [
            (part, i) for found in row.parts.values() for part, a, b in found for i in range(row.counts[part])[a:b]
        ]
        assert len(taken) == len(set(taken)), name  # no example is in two splits


def test_labels_made_of_features_by_hand():
    def label(rule, **features):
        return protocols.RULES[rule](lambda name: np.asarray(features.get(name.replace("/", "_"), [])))

    assert [label("clevr_count", objects_size=[0] * n) for n in (3, 10)] == [0, 7]
    coordinates = [[0, 0, 9.7], [0, 0, 8.2], [5, 5, 11.0]]
    assert label("clevr_distance", objects_pixel_coords=np.ravel(coordinates)) == 1  # 8.0 < 8.2 <= 8.5
    assert label("clevr_distance", objects_pixel_coords=[0, 0, 8.0]) == 0
    assert label("clevr_distance", objects_pixel_coords=[0, 0, 12.0]) == 5
    place = np.ravel([[0, 0, 30.0], [0, 0, 9.0], [0, 0, 2.0]])
    assert label("kitti_distance", objects_type=[0, 2, 3], objects_location=place) == 1  # the nearest is a pedestrian
    assert label("kitti_distance", objects_type=[0, 3, 3], objects_location=place) == 2
    assert label("kitti_distance", objects_type=[3, 4, 7], objects_location=place) == 3  # no vehicle
    assert label("kitti_distance") == 3
    assert [label("dsprites_x", label_x_position=[x]) for x in (0, 1, 2, 31)] == [0, 0, 1, 15]
    assert [label("dsprites_orientation", label_orientation=[x]) for x in (0, 2, 3, 39)] == [0, 0, 1, 15]


def png(colour, side=8, channels=3):
    stream = io.BytesIO()
    mode = {1: "L", 3: "RGB"}[channels]
    Image.new(mode, (side, side), colour if channels == 1 else (colour, 0, 0)).save(stream, "PNG")
    stream.seek(0)
    return stream


def shrunken(row, size=4):
    """The row with splits of a few examples that overlap nowhere."""
    parts, used = {}, {}
    for split, found in row.parts.items():
        start = used.get(found[0][0], 0)
        parts[split] = ((found[0][0], start, start + size),)
        used[found[0][0]] = start + size
    return dataclasses.replace(row, parts=parts, counts=used)


def filled(feature, key, label, place):
    """A value of a TFDS feature, of the right type; images come encoded."""
    from tensorflow_datasets import features as f

    if isinstance(feature, f.Image):
        return png(1 if key == "image" and feature.shape == (64, 64, 1) else place, 8, feature.shape[-1])
    if isinstance(feature, f.FeaturesDict):
        return {name: filled(inner, name, label, place) for name, inner in feature.items()}
    if isinstance(feature, f.Sequence):
        return [filled(feature.feature, key, label, place)] * (3 + place % 2)
    if isinstance(feature, f.ClassLabel):
        return place % min(feature.num_classes, label.classes)
    if isinstance(feature, f.BBoxFeature):
        return f.BBox(0.0, 0.0, 1.0, 1.0)
    if feature.np_dtype in (object, np.str_, np.bytes_) or "Text" in type(feature).__name__:
        return f"{key} {place}"
    return np.full(feature.shape, place + 0.5, feature.np_dtype) if feature.shape else feature.np_dtype(place)


SOURCES = sorted({row.source for row in protocols.TASKS.values() if row.source.startswith("tfds:")})


@pytest.fixture
def shrink(monkeypatch):
    def apply(source):
        rows = {row.name: shrunken(row) for row in protocols.sharing(source)}
        for name, row in rows.items():
            monkeypatch.setitem(protocols.TASKS, name, row)
        return rows

    return apply


def generate(folder, row):
    """A prepared folder of a few records in the real schema of the row's TFDS builder; needs no TensorFlow."""
    import tensorflow_datasets as tfds

    features = tfds.builder(row.source.split(":")[1], data_dir=str(folder / "none")).info.features
    counts = {}
    for other in protocols.sharing(row.source):
        for part, count in other.counts.items():
            counts[part] = max(counts.get(part, 0), count)

    def examples():
        for split, count in counts.items():
            for place in range(count):
                yield split, {key: filled(feature, key, row, place) for key, feature in features.items()}

    folder.mkdir(parents=True, exist_ok=True)
    prepare.write_tfds(folder / prepared.DATA, row.name, features, examples())
    return prepare.write_index(row, folder, prepare._names(features))


@pytest.mark.parametrize("source", SOURCES)
def test_records_of_every_schema_are_read_without_tensorflow(source, shrink, tmp_path):
    rows = shrink(source)
    generate(tmp_path / "set", next(iter(rows.values())))
    for name, row in rows.items():
        for split in row.parts:
            loaded = sources.load(name, str(tmp_path / "set"), split, validation=0.25)
            if split == "train" and "validation" not in row.parts:
                assert len(loaded) == 3  # a quarter is held out
            else:
                assert len(loaded) == 4
            assert loaded.num_classes == row.classes and loaded.task["task"] == name
            kept = memory.keep(decode.check(loaded), 1e9)
            pixels = kept.read([0, 1])
            assert pixels.shape[:3] == (2, 8, 8) and pixels.dtype == np.uint8
            if row.scale == 255:
                assert pixels.max() == 255
    import sys

    assert "tensorflow" not in sys.modules


@pytest.fixture(scope="module")
def cifar(tmp_path_factory):
    """A prepared cifar100, of nine images."""
    folder = tmp_path_factory.mktemp("prepared") / "cifar100"
    row = dataclasses.replace(protocols.task("cifar100"), counts={"train": 6, "test": 3})

    def examples():
        for split, count in row.counts.items():
            for place in range(count):
                yield split, png(10 * place).read(), 7 * place

    folder.mkdir()
    names = [f"class {i}" for i in range(100)]
    prepare.write_records(folder / prepared.DATA, "cifar100", names, examples())
    prepare.write_index(row, folder, {"label": names})
    return folder


def test_one_prepared_folder_serves_the_rows_of_its_source(cifar):
    manifest = prepared.read_manifest(str(cifar))
    assert manifest["serves"] == ["cifar100", "vtab/cifar100"]
    for name in ("tfds", "cifar100"):
        test = sources.load(name, str(cifar), "test")
        assert test.labels.tolist() == [0, 7, 14] and test.ids == ("test/0", "test/1", "test/2")
        assert test.class_names[:2] == ("class 0", "class 1")
    train, held = (sources.load("tfds", str(cifar), split, validation=0.5) for split in ("train", "validation"))
    assert sorted(train.ids + held.ids) == [f"train/{i}" for i in range(6)]
    first = sources.load("tfds", str(cifar), "train", validation=0.5)
    assert first.fingerprint == train.fingerprint and train.task["size"] == "full"
    few = protocols.task("vtab/cifar100").describe()
    assert few["size"] == "1k" and few["parts"]["validation"] == "train[45000:45200]"
    with pytest.raises(UserError, match="holds tfds:cifar100:3.0.2, but vtab/dtd is tfds:dtd:3.0.1; make it with"):
        sources.load("vtab/dtd", str(cifar))


def test_pixels_labels_and_the_1000_of_vtab(cifar, monkeypatch):
    parts = {"train": (("train", 0, 3),), "validation": (("train", 4, 6),), "test": (("test", 0, None),)}
    row = dataclasses.replace(protocols.task("vtab/cifar100"), parts=parts)
    monkeypatch.setitem(protocols.TASKS, "vtab/cifar100", row)
    ids = [sources.load("vtab/cifar100", str(cifar), split).ids for split in ("train", "validation")]
    assert ids == [("train/0", "train/1", "train/2"), ("train/4", "train/5")]
    whole = sources.load("vtab/cifar100", str(cifar), "train", validation=0)
    assert (
        whole.ids == ids[0] + ids[1] and sources.load("vtab/cifar100", str(cifar), "validation", validation=0) is None
    )
    kept = memory.keep(decode.check(whole), 0)
    assert kept.read([3, 0])[:, 0, 0].tolist() == [[40, 0, 0], [0, 0, 0]] and kept.labels.tolist() == [0, 7, 14, 28, 35]


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda folder: (folder / "manifest.json").unlink(), "preparing it was cut short"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json: is damaged"),
        (lambda folder: (folder / "index.npz").unlink(), "index.npz: is missing"),
        (lambda folder: next((folder / "data").glob("*record*")).write_bytes(b"short"), "has 5 bytes, expected"),
        (lambda folder: shutil.rmtree(folder), "no such folder"),
    ],
)
def test_a_damaged_or_half_prepared_folder_is_refused(cifar, tmp_path, harm, message):
    copy = tmp_path / "copy"
    shutil.copytree(cifar, copy)
    harm(copy)
    with pytest.raises(UserError, match=message) as error:
        sources.load("cifar100", str(copy))
    assert str(copy) in str(error.value) and "\n" not in str(error.value)


def test_a_record_that_cannot_be_read_follows_the_policy(tmp_path):
    row = dataclasses.replace(protocols.task("pet"), counts={"train": 3, "test": 1})
    whole = png(9).read()
    images = [whole, whole[: len(whole) // 2], whole]
    examples = [("train", image, place) for place, image in enumerate(images)] + [("test", whole, 0)]
    names = [str(i) for i in range(37)]
    prepare.write_records(tmp_path / prepared.DATA, "pet", names, examples)
    prepare.write_index(row, tmp_path, {"label": names})
    source = sources.load("pet", str(tmp_path), "train", validation=0)
    with pytest.raises(UserError, match=r"train record 1 \(example 1\): .*data.unreadable=skip"):
        decode.check(source)
    kept = decode.check(source, "skip")
    assert kept.ids == ("train/0", "train/2") and len(kept.skipped) == 1


# the tool


def call(capsys, *argv):
    tool = runpy.run_path("tools/prepare_dataset.py")
    with pytest.raises(SystemExit) as caught:
        command.run(tool["main"], tool["__doc__"], tool["FLAGS"], tool["named"](list(map(str, argv))))
    return caught.value.code, *capsys.readouterr()


def test_what_is_missing_is_said_in_one_line_each_time(capsys, tmp_path, monkeypatch):
    """PITFALLS R32 and R33: the extra, the file by hand, an archive of ten bytes; the second run behaves the same."""
    monkeypatch.setattr(prepare.importlib.util, "find_spec", lambda name: None)
    cases = [
        (("--name=cifar10",), "preparing cifar10 needs TensorFlow .*pip install 'vitplast_jax\\[prepare\\]'"),
        (("--name=imagenet_val", "--manual", tmp_path), "needs ILSVRC2012_img_val.tar in --manual .*image-net.org"),
        (("--name=fgvc/nabirds",), "fgvc/nabirds needs nabirds in a folder given by --manual: .*9,500 MB"),
        (("--name=cifar10_c/snow_5", "--manual", tmp_path), "needs CIFAR-10-C or CIFAR-10-C.tar in --manual"),
        (("--name=cifar1",), "no benchmark is called 'cifar1'; did you mean cifar10, "),
    ]
    for argv, message in cases:
        for _ in range(2):
            status, out, err = call(capsys, *argv, "--output", tmp_path / "out")
            assert status == 1 and out == "" and err.count("\n") == 1 and re.search(message, err), err
            assert not list(tmp_path.iterdir())
    (tmp_path / "CIFAR-10-C.tar").write_bytes(b"0123456789")
    for _ in range(2):
        status, _, err = call(capsys, "--name=cifar10_c/snow_5", "--manual", tmp_path, "--output", tmp_path / "out")
        assert status == 1 and "could not be prepared, and nothing was left behind: ReadError" in err
        assert [entry.name for entry in tmp_path.iterdir()] == ["CIFAR-10-C.tar"]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("")
    status, _, err = call(capsys, "--name=cifar10_c/snow_5", "--manual", tmp_path, "--output", tmp_path / "out")
    assert status == 1 and "exists and is no prepared data set" in err
    assert call(capsys, "--output", tmp_path)[0] == 2
    status, out, _ = call(capsys, "--list")
    assert status == 0 and len(out.splitlines()) == len(protocols.TASKS) and "CC BY-SA 4.0" in out


def test_archives_are_packed_in_the_papers_order(capsys, tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "sketch.zip", "w") as archive:
        for name in ("sketch/b/2.png", "sketch/a/9.png", "sketch/b/10.png", "sketch/a/readme.txt"):
            archive.writestr(name, png(int(re.search(r"\d+|$", name)[0] or 0)).read())
    row = dataclasses.replace(protocols.task("domainnet/sketch"), classes=2)
    monkeypatch.setitem(protocols.TASKS, row.name, row)
    status, out, _ = call(capsys, row.name, "--manual", tmp_path, "--output", tmp_path / "out")
    assert status == 0 and "prepared archive:domainnet/sketch" in out and "3 whole; serves domainnet/sketch" in out
    assert "nothing to do" in call(capsys, f"--name={row.name}", "--manual", tmp_path, "--output", tmp_path / "out")[1]
    part = prepared.load_prepared(row.name, str(tmp_path / "out"), "train", 0.0, 42)
    assert part.class_names == ("a", "b") and json.loads((tmp_path / "out/manifest.json").read_text())["splits"] == {
        "whole": 3
    }
    every = records.RecordSplit(str(tmp_path / "out" / "data"), "whole", np.zeros(3, np.int64))
    first = [decode.decode_file(records.Packed(every, place))[0, 0, 0] for place in range(3)]
    assert first == [9, 10, 2]  # torchvision's ImageFolder: classes sorted, then names sorted as text

    folder = tmp_path / "CIFAR-10-C"
    folder.mkdir()
    monkeypatch.setattr(prepare.archives, "A_SEVERITY", 4)
    images = np.arange(20, dtype=np.uint8)[:, None, None, None] * np.ones((1, 32, 32, 3), np.uint8)
    np.save(folder / "snow.npy", images)
    np.save(folder / "labels.npy", np.arange(20) % 10)
    row = dataclasses.replace(protocols.task("cifar10_c/snow_5"), counts={"whole": 4}, test=0.25)
    monkeypatch.setitem(protocols.TASKS, row.name, row)
    assert call(capsys, f"--name={row.name}", "--manual", tmp_path, "--output", tmp_path / "snow")[0] == 0
    train, test = (sources.load(row.name, str(tmp_path / "snow"), split, validation=0) for split in ("train", "test"))
    kept, held = sources.hold_out(np.zeros(4), 0.25, 42, stratified=False)
    assert train.ids == tuple(f"whole/{i}" for i in kept) and test.ids == tuple(f"whole/{i}" for i in held)
    assert memory.keep(train, 1e9).read(np.arange(3))[:, 0, 0, 0].tolist() == [16 + i for i in kept]
    assert train.labels.tolist() == [(16 + i) % 10 for i in kept]

    birds = tmp_path / "nabirds"
    (birds / "images/x").mkdir(parents=True)
    for i in range(3):
        (birds / f"images/x/{i}.png").write_bytes(png(i).read())
    (birds / "images.txt").write_text("".join(f"id{i} x/{i}.png\n" for i in range(3)))
    (birds / "image_class_labels.txt").write_text("id0 817\nid1 295\nid2 817\n")
    (birds / "train_test_split.txt").write_text("id0 1\nid1 1\nid2 0\n")
    (birds / "classes.txt").write_text("0 Birds\n295 Common Eider (Adult male)\n817 Oak Titmouse\n")
    row = dataclasses.replace(protocols.task("fgvc/nabirds"), classes=2, counts={"train": 2, "test": 1})
    monkeypatch.setitem(protocols.TASKS, row.name, row)
    assert call(capsys, f"--name={row.name}", "--manual", tmp_path, "--output", tmp_path / "birds")[0] == 0
    train = sources.load(row.name, str(tmp_path / "birds"), "train", validation=0)
    assert train.labels.tolist() == [1, 0] and train.class_names[0] == "Common Eider (Adult male) (295)"
    with pytest.raises(UserError, match="expected {'train': 3"):
        monkeypatch.setitem(protocols.TASKS, row.name, dataclasses.replace(row, counts={"train": 3, "test": 1}))
        prepare.prepare(row.name, tmp_path / "other", str(tmp_path))
