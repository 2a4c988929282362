"""The real TFDS builder of Fashion-MNIST, fed with Debian's files, without a network (needs the extra `prepare`)."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from vitplast_jax.data import arrays, decode, memory, prepared, sources

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow (extra `prepare`) is absent"),
    pytest.mark.skipif(not os.path.isdir(arrays.FASHION_MNIST_PATH), reason="dataset-fashion-mnist is not installed"),
]
REPOSITORY = Path(__file__).resolve().parent.parent


def place_downloads(folder):
    """Debian's files (the same data, compressed anew) under the names that TFDS gives what it has downloaded."""
    import tensorflow_datasets as tfds
    from etils import epath
    from tensorflow_datasets.core.download import resource

    folder.mkdir()
    for url, info in tfds.builder("fashion_mnist", data_dir=str(folder / "none")).url_infos.items():
        if "/fashion-mnist." in url:
            name = url.rpartition("/")[2]
            path = folder / resource.get_dl_fname(url, info.checksum)
            shutil.copy(Path(arrays.FASHION_MNIST_PATH) / name, path)
            resource.write_info_file(
                url=url, path=epath.Path(path), dataset_name="fashion_mnist", original_fname=name, url_info=info
            )


def run_tool(*arguments):
    argv = [sys.executable, "tools/prepare_dataset.py", *map(str, arguments)]
    return subprocess.run(argv, capture_output=True, text=True, cwd=REPOSITORY, check=False)


def test_fashion_mnist_is_prepared_once_and_read_without_tensorflow(tmp_path):
    place_downloads(tmp_path / "downloads")
    command = ("fashion_mnist_tfds", "--output", tmp_path / "out", "--downloads", tmp_path / "downloads")
    first = run_tool(*command)
    assert first.returncode == 0, first.stderr
    assert "60,000 train" in first.stdout and "10,000 test" in first.stdout
    again = run_tool(*command)
    assert again.returncode == 0 and "nothing to do" in again.stdout
    assert prepared.read_manifest(str(tmp_path / "out"))["source"] == "tfds:fashion_mnist:3.0.1"
    test = memory.keep(decode.check(sources.load("tfds", str(tmp_path / "out"), "test")), 1e9)
    assert test.class_names == arrays.FASHION_MNIST_CLASSES
    images = arrays.read_idx(f"{arrays.FASHION_MNIST_PATH}/t10k-images-idx3-ubyte.gz", 3)
    labels = arrays.read_idx(f"{arrays.FASHION_MNIST_PATH}/t10k-labels-idx1-ubyte.gz", 1)
    ours = sorted(
        (image.tobytes(), int(label)) for image, label in zip(np.asarray(test.images), test.labels, strict=True)
    )
    assert ours == sorted((image.tobytes(), int(label)) for image, label in zip(images, labels, strict=True))


def test_without_network_the_files_are_named_each_time(tmp_path):
    """PITFALLS R32."""
    for _ in range(2):
        run = run_tool("fashion_mnist_tfds", "--output", tmp_path / "out")
        if run.returncode == 0 or "no network" not in run.stderr:
            pytest.skip("there is a network")
        line = run.stderr.splitlines()[-1]
        assert run.returncode == 1 and line.startswith("error: fashion_mnist_tfds cannot be downloaded: no network")
        assert "train-images-idx3-ubyte.gz (26,421,880 bytes)" in line and "from http://fashion-mnist." in line
        assert line.endswith("into a folder for --manual")
        assert not list(tmp_path.iterdir())
