"""Device preprocessing against torchvision (golden, and live under the `parity` mark), Pillow and hand-made values.

The golden tests/data/preprocess_torchvision.npz is written by `python tests/test_preprocess.py` where torchvision is
installed; its provenance (command, versions, seed) lies in it under the key `provenance`.
"""

import itertools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from vitplast_jax.data import preprocess
from vitplast_jax.data.preprocess import Augmentation
from vitplast_jax.models.specs import Preprocessing

GOLDEN = pathlib.Path(__file__).parent / "data" / "preprocess_torchvision.npz"
BOXES = [[0, 0, 19, 25], [3, 5, 11, 17], [18, 24, 1, 1], [2, 0, 4, 25]]
SIZES = [(14, 14), (30, 9)]
EVALUATIONS = [((19, 25), (12, 12), 0.9), ((25, 19), (32, 32), 1.0), ((31, 13), (10, 10), 0.75)]
CROPS = [  # height, width, scale, ratio; the last three need the fallback, for every way an image can be too long
    (28, 28, (0.08, 1.0), (3 / 4, 4 / 3)),
    (375, 500, (0.08, 1.0), (3 / 4, 4 / 3)),
    (33, 48, (0.5, 1.0), (0.9, 1.1)),
    (4, 90, (0.9, 1.0), (3 / 4, 4 / 3)),
    (90, 4, (0.9, 1.0), (3 / 4, 4 / 3)),
    (3, 3, (1.5, 2.0), (3 / 4, 4 / 3)),
]


# as the training step does: compiled (one operation at a time, every shape would be compiled forty times)
crop_resize = jax.jit(preprocess.crop_resize, static_argnames=("size", "interpolation", "resized"))
crop_boxes = jax.jit(preprocess.crop_boxes, static_argnames=("heights", "widths", "scale", "ratio"))
resize_for_evaluation = jax.jit(preprocess.resize_for_evaluation, static_argnums=(1, 2))
augment = jax.jit(preprocess.augment, static_argnums=(2, 3))


def noise(height, width, count=1, channels=3, seed=0):
    return np.random.RandomState(seed).randint(0, 256, (count, height, width, channels), np.uint8)


def uniforms(count=64, seed=1):
    return np.random.RandomState(seed).random_sample((count, preprocess.CROP_TRIES, 4)).astype(np.float32)


def with_draws(tries, function):
    """Calls a function of torch that draws area and ratio (and, where they fit, row and column) from our [tries, 4]."""
    import torch

    used = []  # the columns of `tries` that were drawn so far, one a call

    def draw(low, high, column):
        used.append(column)
        return low + tries[used.count(0) - 1, column] * (high - low)

    def uniform_(tensor, low, high):
        return tensor.fill_(draw(float(low), float(high), 1 if used and used[-1] == 0 else 0))

    def randint(low, high, size):
        return torch.tensor([int(draw(low, high, 3 if used[-1] == 2 else 2))])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "uniform_", uniform_)
        patch.setattr(torch, "randint", randint)
        return function()


def torchvision_reference():
    """What torchvision makes of the cases above; float tensors, antialiased."""
    import torch
    from torchvision.transforms import CenterCrop, RandomResizedCrop, Resize
    from torchvision.transforms import functional as F

    modes = {"bilinear": F.InterpolationMode.BILINEAR, "bicubic": F.InterpolationMode.BICUBIC}
    out = {}
    image = torch.from_numpy(noise(19, 25)[0]).permute(2, 0, 1).float()
    for (i, box), (j, size), name in itertools.product(enumerate(BOXES), enumerate(SIZES), modes):
        cropped = F.resized_crop(image, *box, list(size), modes[name], antialias=True)
        out[f"crop/{name}/{i}/{j}"] = cropped.permute(1, 2, 0).numpy()
    for k, ((height, width), size, crop_pct) in enumerate(EVALUATIONS):
        image = torch.from_numpy(noise(height, width)[0]).permute(2, 0, 1).float()
        resized = Resize(int(size[0] / crop_pct), modes["bicubic"], antialias=True)(image)
        out[f"evaluation/{k}"] = CenterCrop(size)(resized).permute(1, 2, 0).numpy()
    for k, (height, width, scale, ratio) in enumerate(CROPS):
        image = torch.zeros(3, height, width)
        boxes = [
            with_draws(tries, lambda: RandomResizedCrop.get_params(image, list(scale), list(ratio)))  # noqa: B023
            for tries in uniforms().astype(np.float64)
        ]
        out[f"boxes/{k}"] = np.asarray(boxes, np.int32)
    return out


def check_against(reference):
    images = np.repeat(noise(19, 25), len(BOXES), axis=0)
    for (j, size), name in itertools.product(enumerate(SIZES), preprocess.INTERPOLATIONS):
        for i, ours in enumerate(crop_resize(images, np.asarray(BOXES), size=size, interpolation=name)):
            np.testing.assert_allclose(ours, reference[f"crop/{name}/{i}/{j}"], atol=0.05, rtol=0, err_msg=str(size))
    for k, ((height, width), size, crop_pct) in enumerate(EVALUATIONS):
        ours = resize_for_evaluation(noise(height, width), size, Preprocessing(crop_pct=crop_pct))[0]
        np.testing.assert_allclose(ours, np.clip(reference[f"evaluation/{k}"], 0, 255), atol=0.05, rtol=0)
    for k, (height, width, scale, ratio) in enumerate(CROPS):
        host = preprocess.crop_boxes(uniforms(), height, width, scale, ratio)
        device = crop_boxes(jnp.asarray(uniforms()), heights=height, widths=width, scale=scale, ratio=ratio)
        for ours in (host, device):
            np.testing.assert_array_equal(ours, reference[f"boxes/{k}"], err_msg=str(CROPS[k]))


def test_equals_torchvisions_golden():
    with np.load(GOLDEN) as golden:
        check_against(golden)


@pytest.mark.parity
def test_equals_torchvision():
    pytest.importorskip("torchvision")
    reference = torchvision_reference()
    check_against(reference)
    with np.load(GOLDEN) as golden:
        for name, value in reference.items():
            np.testing.assert_allclose(golden[name], value, atol=1e-3, err_msg=name)


def test_the_golden_covers_drawn_and_central_boxes():
    with np.load(GOLDEN) as golden:
        assert len(np.unique(golden["boxes/1"], axis=0)) > 60  # 64 draws
        assert golden["boxes/3"].tolist() == [[0, 42, 4, 5]] * 64  # 4 x 90: no wide crop, round(4 * 4/3) = 5 columns
        assert golden["boxes/4"].tolist() == [[42, 0, 5, 4]] * 64
        assert golden["boxes/5"].tolist() == [[0, 0, 3, 3]] * 64  # too large an area: the whole image
        assert "torchvision" in str(golden["provenance"])


def test_the_crop_reads_nothing_outside_of_its_box():
    image = np.zeros((1, 12, 12, 1), np.uint8)
    image[:, 4:8, 4:8] = 200
    for name in preprocess.INTERPOLATIONS:
        for size in [(9, 9), (2, 2)]:
            out = crop_resize(image, np.asarray([[4, 4, 4, 4]]), size=size, interpolation=name)
            np.testing.assert_allclose(out, 200, atol=1e-4)


def test_resize_by_hand():
    image = np.asarray([0, 100, 200, 40], np.uint8).reshape(1, 1, 4, 1)
    box = np.asarray([[0, 0, 1, 4]])
    # halving with the triangle of width 4: centre 1 sees pixels 0..2 at distances .5 .5 1.5 -> weights 3/7 3/7 1/7
    expected = [(3 * 0 + 3 * 100 + 200) / 7, (100 + 3 * 200 + 3 * 40) / 7]
    np.testing.assert_allclose(
        crop_resize(image, box, size=(1, 2), interpolation="bilinear").ravel(), expected, rtol=1e-6
    )
    # doubling: between 0 and 100 at 1/4 and 3/4; the border repeats
    out = crop_resize(image, box, size=(1, 8), interpolation="bilinear").ravel()
    np.testing.assert_allclose(out, [0, 25, 75, 125, 175, 160, 80, 40], atol=1e-4)
    np.testing.assert_allclose(
        crop_resize(image, box, size=(1, 4), interpolation="bicubic").ravel(), image.ravel(), atol=1e-4
    )


def test_mirror_and_offset_are_those_of_the_output():
    image, box = noise(8, 8), np.asarray([[1, 2, 5, 4]])
    plain = np.asarray(crop_resize(image, box, size=(6, 6), interpolation="bilinear"))
    both = crop_resize(
        image, box, size=(6, 6), interpolation="bilinear", offset=np.asarray([[2, -1]]), mirror=np.asarray([True])
    )
    mirrored = plain[:, :, ::-1]
    expected = np.zeros_like(plain)
    expected[:, :4, 1:] = mirrored[:, 2:, :5]  # starts two rows down, one column to the left of the image
    np.testing.assert_allclose(both, expected, atol=1e-4)


@pytest.mark.parametrize("shape", [(37, 50), (64, 41), (20, 20)])
def test_agrees_with_pillow_to_one_level(shape):
    image = np.asarray(Image.fromarray(noise(9, 9)[0]).resize(shape[::-1], Image.Resampling.BICUBIC))
    box = (5, 3, 14, 12)
    ours = np.asarray(crop_resize(image[None], np.asarray([box]), size=(28, 28), interpolation="bilinear"))[0]
    part = Image.fromarray(image[5:19, 3:15])
    gap = np.abs(ours - np.asarray(part.resize((28, 28), Image.Resampling.BILINEAR), np.float32))
    assert gap.mean() <= 0.35 and gap.max() <= 1


def test_evaluation_geometry_by_hand():
    def geometry(height, width, size, **kw):
        return preprocess.evaluation_geometry(height, width, size, Preprocessing(**kw))

    assert geometry(375, 500, (224, 224), crop_pct=0.875) == ((256, 341), (16, 58))  # torchvision's classic
    assert geometry(500, 375, (224, 224), crop_pct=1.0) == ((298, 224), (37, 0))
    assert geometry(375, 500, (224, 224), crop_pct=0.9) == ((248, 330), (12, 53))
    assert geometry(375, 500, (224, 224), crop_pct=0.9, resize="squash") == ((224, 224), (0, 0))
    assert geometry(28, 28, (28, 28), crop_pct=1.0) == ((28, 28), (0, 0))
    assert geometry(100, 100, (32, 64), crop_pct=1.0) == ((64, 64), (16, 0))  # covers, then cuts


def test_crops_stay_inside_and_keep_their_share_and_ratio():
    draws = np.random.RandomState(0).random_sample((4000, 10, 4)).astype(np.float32)
    top, left, height, width = preprocess.crop_boxes(draws, 300, 400, (0.08, 1.0), (3 / 4, 4 / 3)).T
    assert min(top.min(), left.min()) == 0 and (top + height).max() == 300 and (left + width).max() == 400
    share, ratio = height * width / 120_000, width / height
    assert 0.079 < share.min() and share.max() <= 1 and 0.74 < ratio.min() and ratio.max() < 1.35
    # where everything fits, the area is uniform and the logarithm of the ratio symmetrical
    small = preprocess.crop_boxes(draws, 300, 300, (0.1, 0.3), (3 / 4, 4 / 3)).astype(float)
    assert abs((small[:, 2] * small[:, 3] / 90_000).mean() - 0.2) < 0.003
    assert abs(np.log(small[:, 3] / small[:, 2]).mean()) < 0.01


def test_the_last_place_of_a_crop_can_be_drawn_but_not_passed():
    almost_one = np.nextafter(np.float32(1), np.float32(0))
    draws = np.full((1, 10, 4), almost_one, np.float32)
    case = {"heights": 10_000_000, "widths": 10_000_000, "scale": (0.01, 0.01), "ratio": (1.0, 1.0)}
    for box in (preprocess.crop_boxes(draws, **case), crop_boxes(jnp.asarray(draws), **case)):
        assert np.asarray(box).tolist() == [[9_000_000, 9_000_000, 1_000_000, 1_000_000]]


def test_keys_depend_on_seed_step_and_place_alone():
    data = jax.random.key_data
    all_keys = data(preprocess.example_keys(7, 3, np.arange(8)))
    np.testing.assert_array_equal(data(preprocess.example_keys(7, 3, np.arange(4, 8))), all_keys[4:])
    by_hand = jax.random.fold_in(jax.random.fold_in(jax.random.key(7), 3), 5)
    np.testing.assert_array_equal(data(by_hand), all_keys[5])
    everything = [data(preprocess.example_keys(seed, step, np.arange(8))) for seed in (0, 1) for step in (0, 1)]
    assert len(np.unique(np.concatenate(everything), axis=0)) == 32


def test_augmentation_is_the_same_in_parts_and_differs_between_examples():
    images = np.repeat(noise(16, 16), 6, axis=0)
    augmentation = Augmentation(crop_scale=(0.3, 1.0), flip=True, shift=0.2)
    whole = augment(images, preprocess.example_keys(0, 4, np.arange(6)), (12, 12), augmentation)
    half = augment(images[3:], preprocess.example_keys(0, 4, np.arange(3, 6)), (12, 12), augmentation)
    np.testing.assert_allclose(whole[3:], half, atol=1e-4)
    assert whole.shape == (6, 12, 12, 3) and whole.dtype == jnp.float32
    assert len(np.unique(np.asarray(whole).reshape(6, -1), axis=0)) == 6


def test_nothing_random_is_nothing_changed():
    images = noise(8, 8, count=3)
    keys = preprocess.example_keys(0, 0, np.arange(3))
    np.testing.assert_array_equal(augment(images, keys, (8, 8), Augmentation()), images)
    grey = noise(8, 8, count=3, channels=1)
    out = augment(grey, keys, (8, 8), Augmentation())
    np.testing.assert_array_equal(out, np.repeat(grey, 3, axis=-1))


def test_half_of_the_images_flip_whichever_way_it_is_computed():
    images = np.repeat(noise(4, 4), 400, axis=0)
    keys = preprocess.example_keys(0, 0, np.arange(400))
    out = np.asarray(augment(images, keys, (4, 4), Augmentation(flip=True)))
    same = (out == images).all(axis=(1, 2, 3))
    flipped = (out == images[:, :, ::-1]).all(axis=(1, 2, 3))
    assert (same ^ flipped).all() and 150 < flipped.sum() < 250
    # the general path (here with a crop of everything) flips the same ones, and the host's share changes no flip
    everything = Augmentation(crop_scale=(1.0, 1.0), crop_ratio=(1.0, 1.0), flip=True)
    np.testing.assert_allclose(augment(images, keys, (4, 4), everything), out, atol=1e-3)
    np.testing.assert_array_equal(augment(images, keys, (4, 4), everything.after_host()), out)


def test_shifts_move_whole_pixels_and_let_black_in():
    images = np.full((200, 10, 10, 1), 255, np.uint8)
    keys = preprocess.example_keys(0, 0, np.arange(200))
    out = np.asarray(augment(images, keys, (10, 10), Augmentation(shift=0.2)))[..., 0]
    assert set(np.unique(np.round(out, 2))) <= {0.0, 255.0}
    rows = (out.max(axis=2) > 0).sum(axis=1)
    assert set(rows) == {8, 9, 10}  # by up to a fifth of ten
    assert (out[:, 0].max(axis=1) == 0).any() and (out[:, -1].max(axis=1) == 0).any()  # both ways


def test_normalise_by_hand():
    """PITFALLS R23: the middle grey of 0.5/0.5 weights is zero; ImageNet's statistics go channel by channel."""
    grey = np.full((1, 1, 1, 3), 127.5, np.float32)
    np.testing.assert_array_equal(preprocess.normalise(grey, Preprocessing()), 0)
    imagenet = Preprocessing(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    white = preprocess.normalise(np.full((1, 1, 1, 3), 255, np.uint8), imagenet)
    np.testing.assert_allclose(white.ravel(), [2.2489083, 2.4285715, 2.64], rtol=1e-5)
    assert white.dtype == jnp.float32


def test_a_window_is_cut_out_of_the_resized_image_and_mirrored_after_that():
    images = noise(16, 16, count=40)
    keys = preprocess.example_keys(0, 0, np.arange(40))
    out = np.asarray(augment(images, keys, (12, 12), Augmentation(window=0.75, flip=True)))  # 12 / 0.75 = 16: no resize
    offsets = preprocess.window_offsets(np.asarray(preprocess.crop_uniforms(keys)), (16, 16), (12, 12))
    assert offsets.min() == 0 and offsets.max() == 4 and offsets.shape == (40, 2)
    flipped = 0
    for image, (top, left), cut in zip(images, offsets, out, strict=True):
        window = image[top : top + 12, left : left + 12]
        mirrored = np.abs(cut - window[:, ::-1]).max() < 1e-2
        flipped += mirrored
        np.testing.assert_allclose(cut, window[:, ::-1] if mirrored else window, atol=1e-2)
    assert 8 < flipped < 32
    assert Augmentation(window=0.75, flip=True).after_host() == Augmentation(flip=True)
    assert preprocess.covering(300, 400, (224, 224), 0.875) == (256, 341)


def test_colours_by_hand():
    image = np.asarray([[[[200.0, 100.0, 0.0], [40.0, 40.0, 40.0]]]], np.float32)
    grey = 200 * 0.2989 + 100 * 0.587  # of the first pixel

    def adjusted(*factors):
        return np.asarray(preprocess.adjust_colours(image, np.asarray([factors], np.float32)))[0, 0]

    np.testing.assert_allclose(adjusted(1, 1, 1), image[0, 0], atol=1e-4)
    np.testing.assert_allclose(adjusted(0.5, 1, 1), image[0, 0] / 2, atol=1e-4)
    np.testing.assert_allclose(adjusted(2, 1, 1), [[255, 200, 0], [80, 80, 80]], atol=1e-4)
    np.testing.assert_allclose(adjusted(1, 0, 1), np.full((2, 3), (grey + 39.996) / 2), atol=1e-2)
    np.testing.assert_allclose(adjusted(1, 1, 0), [[grey] * 3, [39.996] * 3], atol=1e-2)


@pytest.mark.parity
def test_colours_are_torchvisions():
    import torch
    from torchvision.transforms import functional as F

    image = noise(9, 7)[0]
    theirs = torch.from_numpy(image).permute(2, 0, 1).float() / 255
    theirs = F.adjust_saturation(F.adjust_contrast(F.adjust_brightness(theirs, 1.2), 0.6), 1.5)
    ours = preprocess.adjust_colours(image[None].astype(np.float32), np.asarray([[1.2, 0.6, 1.5]], np.float32))[0]
    np.testing.assert_allclose(ours, theirs.permute(1, 2, 0).numpy() * 255, atol=0.05)


def test_mixtures_have_the_share_that_they_say():
    ones, zeros = np.ones((200, 10, 10, 1), np.float32), np.zeros((200, 10, 10, 1), np.float32)
    keys = preprocess.example_keys(0, 0, np.arange(200))
    mix = jax.jit(preprocess.mix, static_argnums=(3, 4))
    for mixup, cutmix in ((0.8, 0.0), (0.0, 1.0), (0.8, 1.0)):
        images, share = (np.asarray(x) for x in mix(ones, zeros, keys, mixup, cutmix))
        np.testing.assert_allclose(images.mean((1, 2, 3)), share, atol=1e-5)
        assert share.min() >= 0 and share.max() <= 1 and share.std() > 0.15
        whole = np.isin(images, (0, 1)).all((1, 2, 3)).mean()  # CutMix alone leaves pixels as they were
        assert (whole < 0.1, whole == 1, 0.3 < whole < 0.7)[(mixup > 0) + 2 * (cutmix > 0) - 1]
    np.testing.assert_allclose(mix(ones[3:], zeros[3:], keys[3:], 0.8, 1.0)[1], share[3:], atol=1e-6)


if __name__ == "__main__":
    import platform

    import torch
    import torchvision

    versions = f"torchvision {torchvision.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    provenance = f"python tests/test_preprocess.py; {versions}; numpy RandomState seeds 0 (images) and 1 (draws)"
    np.savez_compressed(GOLDEN, provenance=provenance, **torchvision_reference())
