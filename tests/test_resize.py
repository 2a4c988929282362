"""Position tables against torch's own interpolation (goldens of timm's resample_abs_pos_embed)."""

import goldens
import numpy as np
import pytest

from vitplast_jax.weights import resize

CASES = goldens.golden("positions")["cases"]


def name(case):
    kernel = "antialias" if case["antialias"] else f"plain+{case.get('offset', 0)}"
    return f"{case['old']}-{case['new']}-{kernel}"


@pytest.mark.parametrize("case", CASES, ids=name)
def test_equals_torch(case):
    table = np.array(case["table"], np.float32)
    offset = case.get("offset", 0.0)
    ours = resize.resize_positions(table, case["prefix"], case["old"], case["new"], case["antialias"], offset)
    expected = np.array(case["result"], np.float32)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("side", [16, 24, 48])
def test_dinov2s_grid_equals_torch(side):
    """PITFALLS R01: JAX's kernel would be 8 % off here, antialias 80 % (37 to 16)."""
    told = goldens.golden("positions_37")
    grid = np.random.default_rng(told["seed"]).standard_normal((1, 2, 37, 37), np.float32)
    table = grid.transpose(0, 2, 3, 1).reshape(1, 37 * 37, 2)
    ours = resize.resize_positions(table, 0, (37, 37), (side, side), antialias=False).reshape(side, side, 2)
    expected = np.load(goldens.DATA / "positions_37.npz")[str(side)]
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5)
    wrong = resize.resize_positions(table, 0, (37, 37), (side, side), antialias=True).reshape(side, side, 2)
    assert np.linalg.norm(wrong - expected) > 0.02 * np.linalg.norm(expected)


def test_prefix_rows_and_dtype_stay():
    table = np.arange(2 * 5, dtype=np.float16).reshape(1, 5, 2)
    ours = resize.resize_positions(table, 1, (2, 2), (3, 3))
    assert ours.dtype == np.float16 and ours.shape == (1, 10, 2)
    np.testing.assert_array_equal(ours[:, :1], table[:, :1])


def test_same_grid_is_the_same_table():
    table = np.ones((1, 4, 2), np.float32)
    assert resize.resize_positions(table, 0, (2, 2), (2, 2)) is table


def test_weights_of_the_plain_kernel_by_hand():
    # 2 -> 4 points: the first sits at -0.25, so its taps are at -2, -1, 0, 1, distances 1.75, .75, .25, 1.25 with a =
    # -0.75; the three left of 1 read the edge.
    def near(x):
        return 1.25 * x**3 - 2.25 * x**2 + 1

    def far(x):
        return -0.75 * (x**3 - 5 * x**2 + 8 * x - 4)

    matrix = resize.cubic_matrix(2, 4, antialias=False)
    np.testing.assert_allclose(matrix[0], [far(1.75) + near(0.75) + near(0.25), far(1.25)], atol=1e-12)
    np.testing.assert_allclose(matrix.sum(1), 1, atol=1e-12)
