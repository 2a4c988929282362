"""What all tests share: eight CPU devices, a small real config, one comparison of trees. Warnings: .pytest.ini."""

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

# Before anything imports jax: the number of devices is read once.
os.environ["JAX_PLATFORMS"] = "cpu"
FLAGS = ["--xla_force_host_platform_device_count=8", os.environ.get("XLA_FLAGS", "")]
if "--xla_backend_optimization_level" not in FLAGS[1]:
    FLAGS.append("--xla_backend_optimization_level=0")  # compiling is most of the time; see .ci/run
os.environ["XLA_FLAGS"] = " ".join(FLAGS)
# Tests compile the same small programs again and again; what one worker of a run has compiled serves all of them.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _CACHE = tempfile.TemporaryDirectory(prefix="vitplast_jax_tests_")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _CACHE.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
os.environ["VITPLAST_NO_REEXEC"] = "1"  # commands started by tests keep their process as it is

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture
def small_config():
    """`small_config("mha", **overrides)`: configs/quickstart.py shrunk to a few steps; keys as in `data__shift`."""

    def make(argument="mha", **overrides):
        from vitplast_jax.command import load_config

        small = {
            "steps": 6,
            "warmup_steps": 2,
            "batch_size": 16,
            "eval_every": 3,
            "checkpoint_every": 3,
            "log_every": 1,
        }
        small |= {"measure__images": 8, "measure__batch_size": 4, **overrides}
        pairs = [(key.replace("__", "."), value) for key, value in small.items()]
        return load_config(f"{REPOSITORY / 'configs/quickstart.py'}:{argument}", pairs)

    return make


@pytest.fixture
def tree_allclose():
    """`tree_allclose(a, b, rtol, atol)`: same structure, shapes and dtypes, and values that close; says where not."""

    def check(a, b, rtol=1e-5, atol=1e-6):
        import jax

        assert jax.tree.structure(a) == jax.tree.structure(b)
        for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
            x, y, place = np.asarray(x), np.asarray(y), jax.tree_util.keystr(path)
            assert (x.shape, x.dtype) == (y.shape, y.dtype), place
            np.testing.assert_allclose(x.astype(np.float64), y.astype(np.float64), rtol, atol, err_msg=place)

    return check
