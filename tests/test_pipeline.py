"""Batches: their order, every example once, the same numbers whoever makes them, clean ends and named errors."""

import itertools
import pathlib
import threading

import jax
import numpy as np
import pytest
from PIL import Image

from vitplast_jax.data import decode, pipeline, preprocess, sources
from vitplast_jax.errors import UserError
from vitplast_jax.models.specs import Preprocessing


def fixed(count):
    images = np.arange(count, dtype=np.uint8)[:, None, None, None] * np.ones((1, 2, 2, 1), np.uint8)
    labels = np.arange(count, dtype=np.int32) % 3
    return sources.Source("npz", "train", labels, ("a", "b", "c"), tuple(map(str, range(count))), images)


@pytest.fixture(scope="module")
def ragged(tmp_path_factory):
    """Twelve images of different sizes in two classes."""
    root = tmp_path_factory.mktemp("ragged")
    random = np.random.RandomState(0)
    for i in range(12):
        folder = root / "train" / "ab"[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        small = Image.fromarray(random.randint(0, 256, (5, 5, 3), np.uint8))
        small.resize((random.randint(10, 40), random.randint(10, 40)), Image.Resampling.BICUBIC).save(
            folder / f"{i}.png"
        )
    return sources.load("folder", root, validation=0)


def take(count, *args, **kw):
    iterator = pipeline.train_batches(*args, **kw)
    batches = list(itertools.islice(iterator, count))
    iterator.close()
    return batches


def assert_same(one, other):
    for a, b in zip(one, other, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            np.testing.assert_array_equal(a[key], b[key])


def test_batches_hold_what_their_indices_say():
    source = fixed(20)
    for batch in take(7, source, 6, seed=3):
        assert {key: (value.dtype.name, value.shape) for key, value in batch.items()} == {
            "image": ("uint8", (6, 2, 2, 1)),
            "label": ("int32", (6,)),
            "index": ("int32", (6,)),
        }
        np.testing.assert_array_equal(batch["image"][:, 0, 0, 0], batch["index"])
        np.testing.assert_array_equal(batch["label"], batch["index"] % 3)


def test_every_epoch_is_another_permutation_and_runs_on_into_the_next():
    order = np.concatenate([batch["index"] for batch in take(15, fixed(20), 8, seed=0)])  # six epochs
    epochs = [tuple(order[i * 20 : (i + 1) * 20]) for i in range(6)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs) and len(set(epochs)) == 6
    other = np.concatenate([batch["index"] for batch in take(15, fixed(20), 8, seed=1)])
    assert not {tuple(other[i * 20 : (i + 1) * 20]) for i in range(6)} & set(epochs)


def test_a_start_in_the_middle_continues_the_same_order():
    """PITFALLS R35: 20 steps straight are 7 steps and 13 more from another iterator."""
    source = fixed(30)
    straight = take(20, source, 8, seed=5)
    assert_same(straight, take(7, source, 8, seed=5) + take(13, source, 8, seed=5, start=7))
    assert_same(straight[13:], take(7, source, 8, seed=5, start=13))


def test_a_batch_may_exceed_the_set():
    (batch,) = take(1, fixed(5), 12, seed=0)
    assert sorted(batch["index"][:5]) == sorted(batch["index"][5:10]) == list(range(5))


def test_processes_share_the_same_global_batch_in_contiguous_rows():
    source = fixed(30)
    whole = take(5, source, 12, seed=2, start=3)
    for count in (2, 4):
        parts = [take(5, source, 12, seed=2, start=3, process_index=i, process_count=count) for i in range(count)]
        joined = [{key: np.concatenate([part[key] for part in step]) for key in step[0]} for step in zip(*parts)]  # noqa: B905
        assert_same(whole, joined)
    with pytest.raises(UserError, match="batch_size 12 cannot be shared equally by 5 processes"):
        next(pipeline.train_batches(source, 12, seed=2, process_count=5))
    with pytest.raises(UserError, match="batch_size is 0"):
        next(pipeline.evaluation_batches(source, 0))


@pytest.mark.parametrize("batch_size", [1, 64, 100, 2000])
@pytest.mark.parametrize("processes", [1, 4])
def test_evaluation_counts_every_example_once(batch_size, processes):
    """PITFALLS R26: 1003 examples, whatever the batch size; processes see equally many batches of one shape."""
    if batch_size % processes:
        pytest.skip("not divisible")
    labels = np.arange(1003, dtype=np.int32) % 7
    source = sources.Source(
        "npz", "test", labels, tuple("abcdefg"), tuple(map(str, labels)), np.zeros((1003, 1, 1, 1), np.uint8)
    )
    seen, steps = [], set()
    for i in range(processes):
        batches = list(pipeline.evaluation_batches(source, batch_size, process_index=i, process_count=processes))
        steps.add(len(batches))
        for batch in batches:
            assert batch["image"].shape == (batch_size // processes, 1, 1, 1) and batch["mask"].dtype == bool
            np.testing.assert_array_equal(batch["label"], labels[batch["index"]])
            seen.append(batch["index"][batch["mask"]])
    assert len(steps) == 1
    assert sorted(np.concatenate(seen)) == list(range(1003))


# ragged sets: the host crops and resizes


crop_resize = jax.jit(preprocess.crop_resize, static_argnames=("size", "interpolation"))
resize_for_evaluation = jax.jit(preprocess.resize_for_evaluation, static_argnums=(1, 2))
CROP = preprocess.Augmentation(crop_scale=(0.2, 0.9), flip=True, interpolation="bilinear")


def test_the_host_crops_the_box_that_the_device_would_draw(ragged):
    seed = 2**32 - 1  # the largest that a config may have
    batch = take(1, ragged, 6, seed=seed, start=9, size=(16, 16), augmentation=CROP)[0]
    draws = np.asarray(jax.jit(preprocess.crop_uniforms)(preprocess.example_keys(seed, 9, np.arange(6))))
    for place in (0, 5):
        index = batch["index"][place]
        pixels = decode.decode_file(ragged.files[index])
        box = preprocess.crop_boxes(draws[place : place + 1], *pixels.shape[:2], CROP.crop_scale, CROP.crop_ratio)
        device = crop_resize(pixels[None], box, size=(16, 16), interpolation="bilinear")[0]
        gap = np.abs(np.asarray(device) - batch["image"][place])
        assert gap.max() <= 1 and gap.mean() <= 0.35, place


def test_neither_threads_nor_processes_change_a_number(ragged):
    options = {"seed": 2**32 - 1, "start": 2, "size": (12, 10), "augmentation": CROP}
    whole = take(3, ragged, 12, **options)
    assert whole[0]["image"].shape == (12, 12, 10, 3)
    assert_same(whole, take(3, ragged, 12, threads=5, **options))
    halves = [take(3, ragged, 12, process_index=i, process_count=2, **options) for i in range(2)]
    assert_same(whole, [{key: np.concatenate([a[key], b[key]]) for key in a} for a, b in zip(*halves, strict=True)])
    # another step crops elsewhere: here the same examples come again in every step, with other pixels
    first, second = ({int(i): x.tobytes() for i, x in zip(b["index"], b["image"], strict=True)} for b in whole[:2])
    assert first.keys() == second.keys() and all(first[i] != second[i] for i in first)


def test_the_host_cuts_the_window_that_the_device_would(ragged):
    window = preprocess.Augmentation(window=0.6, interpolation="bilinear")
    batch = take(1, ragged, 6, seed=1, start=4, size=(6, 6), augmentation=window)[0]
    keys = preprocess.example_keys(1, 4, np.arange(6))
    augment = jax.jit(preprocess.augment, static_argnums=(2, 3))
    for place in (0, 5):
        pixels = decode.decode_file(ragged.files[batch["index"][place]])
        device = augment(pixels[None], keys[place : place + 1], (6, 6), window)[0]
        assert np.abs(np.asarray(device) - batch["image"][place]).max() <= 1, place


def test_large_jpegs_are_decoded_smaller_where_that_is_hardly_seen(tmp_path):
    random = np.random.RandomState(0)
    for i in range(2):
        (tmp_path / "ab"[i]).mkdir()
        small = Image.fromarray(random.randint(0, 256, (12, 16, 3), np.uint8))
        small.resize((640, 480 + 10 * i), Image.Resampling.BICUBIC).save(tmp_path / "ab"[i] / "1.jpg", quality=95)
    source = sources.load("folder", tmp_path, validation=0, split="train")
    looked = decode.check(source)
    assert looked.sizes.tolist() == [[480, 640, 3], [490, 640, 3]]
    crop = preprocess.Augmentation(crop_scale=(0.5, 1.0))
    (exact,), (fast,) = (take(1, s, 6, seed=0, size=(32, 32), augmentation=crop) for s in (source, looked))
    gap = np.abs(exact["image"].astype(int) - fast["image"])
    assert 0 < gap.mean() < 2.5 and gap.max() < 20  # levels of 255; JPEG libraries differ
    assert [decode.shrinking((0, 0, *box), (224, 224)) for box in ((375, 500), (896, 900), (4000, 3000))] == [1, 2, 4]
    assert decode.open_image(source.files[0], shrink=4).size == (160, 120)


def test_without_a_crop_ragged_images_are_squashed(ragged):
    (batch,) = take(1, ragged, 3, seed=0, size=(9, 9))
    for index, image in zip(batch["index"], batch["image"], strict=True):
        with Image.open(ragged.files[index]) as file:
            np.testing.assert_array_equal(image, file.convert("RGB").resize((9, 9), Image.Resampling.BILINEAR))


@pytest.mark.parametrize("resize", ["shorter", "squash"])
def test_evaluation_of_ragged_sets_is_the_devices_to_one_level(ragged, resize):
    preprocessing = Preprocessing(crop_pct=0.8, resize=resize, interpolation="bilinear")
    batches = list(pipeline.evaluation_batches(ragged, 8, (12, 12), preprocessing))
    assert [batch["mask"].sum() for batch in batches] == [8, 4]
    np.testing.assert_array_equal(batches[1]["image"][4:], 0)
    for index, image in zip(batches[1]["index"][:2], batches[1]["image"][:2], strict=True):
        pixels = decode.decode_file(ragged.files[index])
        device = resize_for_evaluation(pixels[None], (12, 12), preprocessing)[0]
        assert np.abs(np.asarray(device) - image).max() <= 1


def test_a_broken_file_stops_the_run_with_its_name_and_leaves_no_thread(ragged, tmp_path):
    files = list(ragged.files)
    broken = tmp_path / "broken.png"
    broken.write_bytes(pathlib.Path(files[3]).read_bytes()[:60])
    files[3] = str(broken)
    source = sources.Source("folder", "train", ragged.labels, ragged.class_names, ragged.ids, files=tuple(files))
    before = threading.active_count()
    with pytest.raises(UserError, match=r"broken.png \(example 3\): "):
        for _ in pipeline.train_batches(source, 4, seed=0, size=(8, 8)):
            pass
    with pytest.raises(UserError, match=r"broken.png \(example 3\): "):
        list(pipeline.evaluation_batches(source, 4, (8, 8), Preprocessing()))
    assert threading.active_count() == before


def test_an_iterator_that_is_left_stops_its_threads(ragged):
    before = threading.active_count()
    iterator = pipeline.train_batches(ragged, 4, seed=0, size=(8, 8))
    next(iterator)
    assert threading.active_count() > before
    iterator.close()
    assert threading.active_count() == before
    for _ in pipeline.train_batches(ragged, 4, seed=0, size=(8, 8)):
        break  # dropped, not closed
    assert threading.active_count() == before
