"""Sources: what is read, how it is split, and one clear line for everything that can be wrong."""

import gzip
import io
import pathlib
import struct
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from vitplast_jax.data import arrays, sources
from vitplast_jax.errors import UserError


def write_idx(path, array):
    data = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()
    path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)


def images(count, side=4, channels=None, seed=0):
    shape = (count, side, side) if channels is None else (count, side, side, channels)
    return np.random.RandomState(seed).randint(0, 256, shape, np.uint8)


def make_folder(root, classes, count=5, place="", suffix="png"):
    for number, name in enumerate(classes):
        folder = pathlib.Path(root, place, name)
        folder.mkdir(parents=True)
        for i in range(count):
            Image.fromarray(np.full((6, 8, 3), number * 20 + i, np.uint8)).save(folder / f"{i}.{suffix}")


# splits


def test_hold_out_is_the_papers_split():
    """ORACLES A3: 80/20 by numpy.random.seed(42)'s permutation, indices sorted."""
    np.random.seed(42)
    order = np.random.permutation(10_000)
    kept, held = sources.hold_out(np.zeros(10_000, int), 0.2, 42, stratified=False)
    np.testing.assert_array_equal(kept, np.sort(order[:8000]))
    np.testing.assert_array_equal(held, np.sort(order[8000:]))


def test_stratified_splits_keep_every_class_everywhere():
    labels = np.repeat([0, 1, 2, 3], [3, 4, 50, 1])
    parts = [sources.split_indices(labels, split, 0.2, 42, test=0.2, stratified=True) for split in sources.SPLITS]
    assert sorted(np.concatenate(parts).tolist()) == list(range(58))
    counts = [np.bincount(labels[part], minlength=4).tolist() for part in parts]
    assert counts == [[1, 2, 32, 1], [1, 1, 8, 0], [1, 1, 10, 0]]
    assert sources.split_indices(labels, "validation", 0, 42) is None
    assert len(sources.split_indices(labels, "train", 0, 42)) == 58


# digits


def test_digits():
    parts = {split: sources.load("digits", split=split) for split in sources.SPLITS}
    assert sum(len(part) for part in parts.values()) == 1797
    ids = [name for part in parts.values() for name in part.ids]
    assert len(set(ids)) == 1797
    for part in parts.values():
        assert part.images.shape[1:] == (8, 8, 1) and part.images.dtype == np.uint8
        assert part.images.max() == 255 and set(part.labels) == set(range(10)) and part.labels.dtype == np.int32
    from sklearn.datasets import load_digits

    test, bunch = parts["test"], load_digits()
    places = [int(name.split("/")[1]) for name in test.ids]
    np.testing.assert_array_equal(test.labels, bunch.target[places])
    np.testing.assert_allclose(test.images[..., 0] / 255 * 16, bunch.images[places], atol=16 / 255 / 2)


def test_splits_and_fingerprints_depend_on_the_split_seed_alone():
    first, again = (sources.load("digits", split="test") for _ in range(2))
    assert first.fingerprint == again.fingerprint and len(first.fingerprint) == 64
    other = sources.load("digits", split="test", split_seed=1)
    assert other.ids != first.ids and other.fingerprint != first.fingerprint
    # a share held out for validation moves nothing between train and test
    assert sources.load("digits", split="test", validation=0.5).fingerprint == first.fingerprint
    assert sources.load("digits", split="validation", validation=0) is None


def test_the_fingerprint_covers_everything():
    def made(**changes):
        values = {"labels": np.asarray([0, 1], np.int32), "class_names": ("a", "b"), "ids": ("x", "y")}
        values |= {"images": images(2, channels=1)} | changes
        return sources.Source("npz", "train", **values).fingerprint

    changed = [
        made(),
        made(labels=np.asarray([1, 0], np.int32)),
        made(class_names=("a", "c")),
        made(ids=("x", "z")),
        made(ids=("x\ny",)),
        made(images=images(2, channels=1, seed=1)),
        made(images=None, files=("x", "y")),
    ]
    assert len(set(changed)) == len(changed)
    assert made() == made(labels=np.asarray([0, 1], np.int64))


# idx


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_files(tmp_path, suffix):
    train, test = images(50), images(7, seed=1)
    for stem, array in (("train", train), ("t10k", test)):
        write_idx(tmp_path / f"{stem}-images-idx3-ubyte{suffix}", array)
        write_idx(tmp_path / f"{stem}-labels-idx1-ubyte{suffix}", np.arange(len(array), dtype=np.uint8) % 5)
    source = sources.load("idx", tmp_path, "test")
    np.testing.assert_array_equal(source.read([0, 6]), test[[0, 6], ..., None])
    assert source.class_names == tuple("0123456789") and source.labels.tolist() == [0, 1, 2, 3, 4, 0, 1]
    parts = [sources.load("idx", tmp_path, split) for split in ("train", "validation")]
    assert [len(part) for part in parts] == [40, 10]
    for part in parts:
        places = [int(name.split("/")[1]) for name in part.ids]
        np.testing.assert_array_equal(part.images[..., 0], train[places])
    assert sources.load("fashion_mnist", tmp_path, "test").class_names[:2] == ("T-shirt/top", "Trouser")


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda data: b"\x1f" + data[1:], "starts with 1f000803"),
        (lambda data: data[:-1], "holds 799 bytes, its header says (50, 4, 4) = 800"),
        (lambda data: data + b"0", "holds 801 bytes"),
        (lambda data: data[:9], "ends inside its header"),
        (lambda data: b"", "starts with "),
    ],
)
def test_damaged_idx_files(tmp_path, damage, message):
    path = tmp_path / "train-images-idx3-ubyte"
    write_idx(path, images(50))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError) as error:
        arrays.read_idx(str(path), rank=3)
    assert str(path) in str(error.value) and message in str(error.value)


def test_truncated_gzip_wrong_counts_and_labels(tmp_path):
    with pytest.raises(UserError, match="train-images-idx3-ubyte.*no such file"):
        sources.load("idx", tmp_path)
    write_idx(tmp_path / "train-images-idx3-ubyte", images(5))
    write_idx(tmp_path / "train-labels-idx1-ubyte", np.arange(4, dtype=np.uint8))
    with pytest.raises(UserError, match="4 labels for 5 images"):
        sources.load("idx", tmp_path)
    write_idx(tmp_path / "train-labels-idx1-ubyte", np.full(5, 10, np.uint8))
    with pytest.raises(UserError, match="label 10 is out of range, expected 0 to 9"):
        sources.load("fashion_mnist", tmp_path)
    data = gzip.compress((tmp_path / "train-labels-idx1-ubyte").read_bytes())
    (tmp_path / "a.gz").write_bytes(data[:-6])
    (tmp_path / "b.gz").write_bytes(b"<html>not found</html>")
    for name in ("a.gz", "b.gz"):
        with pytest.raises(UserError, match=f"{name}: cannot be read as gzip"):
            arrays.read_idx(str(tmp_path / name), rank=1)


def test_missing_fashion_mnist_names_the_package(monkeypatch):
    monkeypatch.setattr(arrays, "FASHION_MNIST_PATH", "/nowhere")
    with pytest.raises(UserError, match="/nowhere.*dataset-fashion-mnist.*data.path"):
        sources.load("fashion_mnist")


@pytest.mark.skipif(
    not pathlib.Path(arrays.FASHION_MNIST_PATH).is_dir(), reason="dataset-fashion-mnist is not installed"
)
def test_debians_fashion_mnist():
    source = sources.load("fashion_mnist", split="test")
    assert len(source) == 10_000 and source.images.shape[1:] == (28, 28, 1)
    assert np.bincount(source.labels).tolist() == [1000] * 10


# npz


def test_npz_with_splits(tmp_path):
    path = tmp_path / "set.npz"
    parts = {"x_train": images(30, channels=3), "y_train": np.arange(30) % 3}
    np.savez(path, **parts, x_test=images(6, channels=3), y_test=np.arange(6) % 3, class_names=["cat", "dog", "owl"])
    sizes = [len(sources.load("npz", path, split)) for split in sources.SPLITS]
    assert sizes == [24, 6, 6]
    source = sources.load("npz", path)
    assert source.class_names == ("cat", "dog", "owl")
    places = [int(name.removeprefix("train/")) for name in source.ids]
    np.testing.assert_array_equal(source.images, parts["x_train"][places])
    np.savez(path, **parts, val_images=images(3, channels=3), val_labels=[[0], [1], [2]])  # as MedMNIST writes labels
    assert len(sources.load("npz", path)) == 30 and len(sources.load("npz", path, "validation")) == 3
    assert sources.load("npz", path, "test") is None


def test_npz_split_by_seed_and_as_a_folder(tmp_path):
    np.savez(tmp_path / "one.npz", images=images(50), labels=np.arange(50) % 2)
    parts = [sources.load("npz", tmp_path / "one.npz", split) for split in sources.SPLITS]
    assert [len(part) for part in parts] == [32, 8, 10] and parts[0].images.shape == (32, 4, 4, 1)
    assert len({name for part in parts for name in part.ids}) == 50
    with pytest.raises(UserError, match="train.npz: no such file"):
        sources.load("npz", tmp_path)
    np.savez(tmp_path / "train.npz", images=images(10), labels=np.arange(10) % 2)
    np.savez(tmp_path / "test.npz", x_test=images(4), y_test=np.arange(4) % 2)
    assert [len(sources.load("npz", tmp_path, split)) for split in sources.SPLITS] == [8, 2, 4]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"images": images(4).astype(np.float32)}, "images is float32, expected uint8"),
        ({"images": images(4)[0]}, r"images has shape \(4, 4\), expected"),
        ({"images": images(4, channels=4)}, r"shape \(4, 4, 4, 4\), expected .* c 1 or 3"),
        ({"images": images(4, channels=3).transpose(0, 3, 1, 2)}, "channels first"),
        ({"labels": np.arange(3)}, "labels has 3 labels for 4 images"),
        ({"labels": np.arange(4.0)}, "labels is float64 .* expected integers"),
        ({"labels": np.arange(4) - 1}, "label -1 is out of range"),
        ({"class_names": ["a", "b"]}, "label 3 is out of range, expected 0 to 1"),
        ({"labels": None}, "has no array labels"),
        ({"labels": None, "images": None, "data": np.zeros(3)}, "has the arrays data; expected x_train"),
        ({"labels": np.asarray([0, 1, 2, "x"], object)}, "pickled objects, which are never run"),
    ],
)
def test_bad_npz(tmp_path, changes, message):
    values = {"images": images(4), "labels": np.arange(4)} | changes
    np.savez(tmp_path / "bad.npz", **{key: value for key, value in values.items() if value is not None})
    with pytest.raises(UserError, match=f"bad.npz: .*{message}"):
        sources.load("npz", tmp_path / "bad.npz")


def test_what_is_no_npz(tmp_path):
    whole = io.BytesIO()
    np.savez(whole, images=images(4), labels=np.arange(4))
    for content in (b"", b"<html></html>", whole.getvalue()[:-40], b"\x80\x04\x95"):
        (tmp_path / "bad.npz").write_bytes(content)
        with pytest.raises(UserError, match="bad.npz: is no npz file"):
            sources.load("npz", tmp_path / "bad.npz")
    damaged = bytearray(whole.getvalue())
    damaged[damaged.index(b"images.npy") + 200] ^= 255  # inside the pixels: the archive's checksum fails
    (tmp_path / "bad.npz").write_bytes(damaged)
    with pytest.raises(UserError, match="bad.npz: cannot be read"):
        sources.load("npz", tmp_path / "bad.npz")


def test_names_and_shares_that_do_not_exist():
    with pytest.raises(
        UserError,
        match="data.name is 'cifar', expected one of digits, digits_cluttered, fashion_mnist, folder, idx, npz, ",
    ):
        sources.load("cifar")
    with pytest.raises(UserError, match="split is 'val', expected one of train, validation, test"):
        sources.load("digits", split="val")
    with pytest.raises(UserError, match="data.validation is 1.0"):
        sources.load("digits", validation=1.0)
    for name in ("folder", "npz", "idx"):
        with pytest.raises(UserError, match="needs data.path"):
            sources.load(name)
    with pytest.raises(UserError, match="data.path is 'here'"):
        sources.load("digits", "here")


# folders


def test_a_folder_with_splits_matches_classes_by_name(tmp_path):
    """PITFALLS R28: "10" sorts before "2"; the other splits are made in another order and lack a class."""
    names = [str(i) for i in range(11)]
    make_folder(tmp_path, names, place="train")
    make_folder(tmp_path, list(reversed(names[2:])), count=2, place="val")
    make_folder(tmp_path, names[:2], count=1, place="test")
    (tmp_path / "train" / ".cache").mkdir()
    (tmp_path / "train" / "0" / ".hidden.png").write_bytes(b"")
    (tmp_path / "train" / "0" / "notes.txt").write_text("none")
    train, validation, test = (sources.load("folder", tmp_path, split) for split in sources.SPLITS)
    assert train.class_names == tuple(sorted(names)) == validation.class_names == test.class_names
    assert train.class_names[2] == "10" and len(train) == 55 and len(validation) == 18 and len(test) == 2
    for source in (train, validation, test):
        for label, file, name in zip(source.labels, source.files, source.ids, strict=True):
            assert pathlib.Path(file).parent.name == source.class_names[label] == name.split("/")[1]
    assert train.ids[0] == "train/0/0.png" and train.ignored == ("train/0/notes.txt",)
    assert "no example of class '0', '1'" in validation.notes[0]
    with pytest.raises(TypeError, match="different sizes"):
        train.read([0])


def test_a_folder_split_by_seed(tmp_path):
    make_folder(tmp_path, ["a", "b"], count=10)
    make_folder(tmp_path, ["rare"], count=2)
    parts = [sources.load("folder", tmp_path, split) for split in sources.SPLITS]
    assert [np.bincount(part.labels, minlength=3).tolist() for part in parts] == [[6, 6, 1], [2, 2, 0], [2, 2, 1]]
    assert len({name for part in parts for name in part.ids}) == 22
    assert "no example of class 'rare'" in parts[1].notes[0] and not parts[0].notes
    again = sources.load("folder", tmp_path / "." / "", "test")
    assert again.ids == parts[2].ids and again.fingerprint == parts[2].fingerprint


def test_a_folder_without_validation_takes_a_share_of_train(tmp_path):
    make_folder(tmp_path, ["a", "b"], place="train")
    assert [len(sources.load("folder", tmp_path, split)) for split in ("train", "validation")] == [8, 2]
    assert sources.load("folder", tmp_path, "test") is None
    assert sources.load("folder", tmp_path, "validation", validation=0) is None
    assert len(sources.load("folder", tmp_path, validation=0)) == 10


def test_links_are_followed_once(tmp_path):
    make_folder(tmp_path / "elsewhere", ["a", "b"], count=3)
    made = tmp_path / "links" / "train"
    made.mkdir(parents=True)
    (made / "a").symlink_to(tmp_path / "elsewhere" / "a")
    (made / "b").mkdir()
    (made / "b" / "1.png").symlink_to(tmp_path / "elsewhere" / "b" / "1.png")
    (made / "b" / "circle").symlink_to(made)
    source = sources.load("folder", tmp_path / "links", validation=0)
    assert source.ids == ("train/a/0.png", "train/a/1.png", "train/a/2.png", "train/b/1.png")


def test_bad_folders(tmp_path):
    def fails(path, message, split="train"):
        with pytest.raises(UserError, match=message):
            sources.load("folder", path, split)

    fails(tmp_path / "none", "none: no such folder")
    fails(tmp_path, "no class folders")
    make_folder(tmp_path, ["a", "b"], place="train")
    (tmp_path / "train" / "empty").mkdir()
    fails(tmp_path, "train/empty: class 'empty' has no images")
    (tmp_path / "train" / "empty").rmdir()
    make_folder(tmp_path, ["a", "zebra"], place="val")
    fails(tmp_path, "val: unknown class 'zebra'; train has 'a', 'b'", "validation")
    (tmp_path / "test").mkdir()
    Image.new("RGB", (2, 2)).save(tmp_path / "test" / "1.png")
    fails(tmp_path, "test: 1 images .* beside the class folders", "test")
    (tmp_path / "valid").mkdir()
    fails(tmp_path, "both val and valid exist")
    make_folder(tmp_path / "flat", ["x"])
    (tmp_path / "flat" / "val").mkdir()
    fails(tmp_path / "flat", "has val but no folder 'train'")


def test_reading_data_imports_no_tensorflow(tmp_path):
    """PITFALLS R33, R37: folders, npz and idx are read without TensorFlow, installed or not."""
    make_folder(tmp_path, ["a", "b"], place="train")
    code = (
        "import sys; sys.modules['tensorflow'] = sys.modules['tensorflow_datasets'] = None\n"  # any import would fail
        "from vitplast_jax.data import decode, pipeline, sources\n"
        f"source = decode.check(sources.load('folder', {str(tmp_path)!r}, validation=0))\n"
        "batch = next(pipeline.train_batches(source, 4, 0, size=(8, 8)))\n"
        "print(batch['image'].shape)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "(4, 8, 8, 3)", done.stderr


def test_npz_files_that_order_their_classes_otherwise_are_mapped_by_name(tmp_path):
    images = np.zeros((4, 8, 8), np.uint8)
    np.savez(tmp_path / "train.npz", images=images, labels=[0, 1, 0, 1], class_names=["cat", "dog"])
    np.savez(tmp_path / "test.npz", images=images, labels=[0, 1, 1, 1], class_names=["dog", "cat"])
    test = sources.load("npz", tmp_path, "test")
    assert [test.class_names[label] for label in test.labels] == ["dog", "cat", "cat", "cat"]
    np.savez(tmp_path / "test.npz", images=images, labels=[0, 1, 1, 1], class_names=["dog", "cow"])
    with pytest.raises(UserError, match="unknown class cow"):
        sources.load("npz", tmp_path, "test")
    np.savez(tmp_path / "test.npz", images=images, labels=[0, 1, 1, 1])
    with pytest.raises(UserError, match="must both name their classes"):
        sources.load("npz", tmp_path, "test")


@pytest.mark.parametrize(
    "labels, names, says",
    [
        ([0, 1, 2], ["a", "a", "b"], "the same name twice"),
        ([0, 20_000_000, 1], None, "the highest label is 20000000"),
    ],
)
def test_npz_classes_that_make_no_sense_are_refused(tmp_path, labels, names, says):
    arrays = {"images": np.zeros((3, 8, 8), np.uint8), "labels": labels} | ({"class_names": names} if names else {})
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(UserError, match=says):
        sources.load("npz", tmp_path / "x.npz")


def test_splits_are_found_whatever_their_case_and_one_class_is_none(tmp_path):
    from PIL import Image

    for place in ("Train/a", "Train/b", "Testing/a", "Testing/b", "up/data/a", "up/data/b"):
        (tmp_path / place).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / place / "x.png")
    (tmp_path / "own").mkdir()
    (tmp_path / "Train").rename(tmp_path / "own" / "Train")
    (tmp_path / "Testing").rename(tmp_path / "own" / "Testing")
    assert sources.load("folder", tmp_path / "own", "test").class_names == ("a", "b")
    with pytest.raises(UserError, match="only one class folder, 'data'"):
        sources.load("folder", tmp_path / "up")
