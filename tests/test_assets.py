"""The shipped model: small, described, as good as its provenance says, and timm's too."""

import json
import os
from pathlib import Path

import jax
import numpy as np
import pytest

from vitplast_jax import models, trees
from vitplast_jax.data import arrays, sources
from vitplast_jax.training import inputs
from vitplast_jax.weights import convert, places

NAME = "vit_pico_patch4_28.fashion_mnist"
PATH = os.path.join(places.ASSETS, f"{NAME}.safetensors")
DESCRIBED = json.loads(Path(PATH.replace(".safetensors", ".json")).read_text(encoding="utf-8"))


def test_it_is_small_and_says_where_it_comes_from():
    assert os.path.getsize(PATH) < 3_000_000
    provenance = DESCRIBED["provenance"]
    assert provenance["test_accuracy"] >= 0.90
    assert {"command", "seed", "versions", "data", "licence"} <= provenance.keys()
    assert places.identity(NAME)["sha256"] == provenance["sha256"]


def test_it_loads_by_its_name_with_its_classes_and_preprocessing():
    loaded = convert.load(NAME)
    assert loaded.class_names == tuple(DESCRIBED["class_names"]) and len(loaded.class_names) == 10
    assert loaded.spec.preprocessing == models.Preprocessing(interpolation="bilinear", crop_pct=1.0)
    assert trees.count(loaded.params) == 569_962


def test_the_sample_is_of_its_pretraining_images():
    with np.load(PATH.replace(".safetensors", ".sample.npz"), allow_pickle=False) as sample:
        images, labels = sample["images"], sample["labels"]
    assert images.dtype == np.uint8 and images.shape[1:] == (28, 28, 1) and len(images) == len(labels) >= 512
    assert set(labels) == set(range(10))
    if os.path.isdir(arrays.FASHION_MNIST_PATH):
        train = sources.load("fashion_mnist", split="train", validation=0)
        known = {image.tobytes() for image in train.images}
        assert all(image.tobytes() in known for image in images)


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir(arrays.FASHION_MNIST_PATH), reason="dataset-fashion-mnist is not installed")
def test_its_accuracy_is_what_its_provenance_says():
    test = sources.load("fashion_mnist", split="test")
    model = convert.load_model(NAME)
    prepare = inputs.make_evaluation_preparation(model.spec, "float32", ragged=False)
    static, params = models.structure(model.spec), models.parameters(model)
    predict = jax.jit(lambda images: models.apply(static, params, {}, prepare(images)).argmax(-1))
    predictions = np.concatenate([predict(test.images[i : i + 1000]) for i in range(0, 10_000, 1000)])
    assert np.mean(predictions == test.labels) == pytest.approx(DESCRIBED["provenance"]["test_accuracy"], abs=2e-4)


@pytest.mark.parity
def test_timm_loads_it_by_its_arguments_and_gives_the_same_logits():
    import torch
    from safetensors.torch import load_file
    from timm.models.vision_transformer import VisionTransformer

    net = VisionTransformer(img_size=28, patch_size=4, embed_dim=96, depth=5, num_heads=3, num_classes=10).eval()
    net.load_state_dict(load_file(PATH), strict=True)
    images = np.random.RandomState(0).randn(4, 28, 28, 3).astype(np.float32)
    with torch.no_grad():
        expected = net(torch.from_numpy(images.transpose(0, 3, 1, 2))).numpy()
    with jax.default_matmul_precision("highest"):
        got = convert.load_model(NAME)(images)
    np.testing.assert_allclose(got, expected, atol=1e-5 * np.abs(expected).max())
