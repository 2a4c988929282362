"""Angles, norms and the bound of adapters' matrices, by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from vitplast_jax import models, peft
from vitplast_jax.errors import UserError
from vitplast_jax.models import specs
from vitplast_jax.peft import geometry

SPEC = specs.ViTSpec("small", (8, 8), (4, 4), width=16, depth=2, heads=2, hidden=32, num_classes=3)


def test_angles_by_hand():
    matrix = [[1.0, 0.0], [1.0, 1.0], [-2.0, 0.0], [0.0, 0.0]]
    np.testing.assert_allclose(sorted(geometry.angles(matrix, "rows")), [45.0, 135.0, 180.0], atol=1e-5)
    np.testing.assert_allclose(geometry.angles(matrix, "columns"), [np.degrees(np.arccos(1 / 6**0.5))])


def test_rows_describe_every_matrix_of_a_lora(tmp_path):
    model = peft.attach(models.create_model(SPEC), rank=4, projection="ao", targets=("v", "fc1@1"), normalize=True)
    rows = geometry.describe(model)
    assert [(row["block"], row["target"]) for row in rows][::5] == [(0, "v"), (1, "v"), (1, "fc1")]
    by_name = {row["matrix"]: row for row in rows[:5]}
    # Columns of a normalised AO matrix are orthonormal; what starts from zero adds nothing.
    assert by_name["down"]["column_angle"] == pytest.approx(90.0, abs=1e-3)
    assert by_name["down"]["spectral_norm"] == pytest.approx(1.0, abs=1e-5)
    assert by_name["down"]["frobenius_norm"] == pytest.approx(2.0, abs=1e-5)
    assert by_name["delta"]["spectral_norm"] == pytest.approx(0.0, abs=1e-6)
    assert by_name["merged"]["frobenius_norm"] == pytest.approx(by_name["kernel"]["frobenius_norm"], rel=1e-6)
    with pytest.raises(UserError, match="the model has none in its slots"):
        geometry.describe(models.create_model(SPEC))

    from vitplast_jax.reports import plots

    found = next(geometry.matrices_of(model))[2]
    plots.plot_angles({name: geometry.angles(matrix, "rows") for name, matrix in found.items()}, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 5_000


def test_the_bound_by_hand_and_against_random_signs():
    matrix, features = np.diag([3.0, 1.0]), np.asarray([[1.0, 0.0], [0.0, 2.0], [2.0, 0.0], [0.0, 4.0]])
    assert geometry.rademacher_bound(matrix, features) == pytest.approx(3 * 5 / 4)
    signs = np.random.RandomState(0).choice([-1.0, 1.0], (4096, 4))
    # sup over ||w|| <= 3 of <w, sum of signed features> / m is 3 times the norm of that sum.
    complexity = 3 * np.linalg.norm(signs @ features, axis=1).mean() / 4
    assert complexity <= geometry.rademacher_bound(matrix, jnp.asarray(features))
