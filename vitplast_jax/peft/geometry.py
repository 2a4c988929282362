"""How do the matrices of an adapter lie: are their rows and columns orthogonal, how large is what they add?

In: a model with LoRA in its slots (AO or free), or any matrix. Out: angles in degrees, norms, one row for each matrix
of each target; a bound on the Rademacher complexity from real features. AOFT (arXiv 2507.13260) observes that rows and
columns of pretrained kernels are nearly orthogonal, and those of trained LoRA factors not. The columns of an AO matrix
are so by construction: look at its rows and at the product too.
"""

from collections.abc import Iterator

import numpy as np

from vitplast_jax import models
from vitplast_jax.errors import UserError
from vitplast_jax.peft.merge import layers_of


def angles(matrix, axis: str) -> np.ndarray:
    """Angles between all pairs of rows or of columns.

    Args:
      matrix: [n, m].
      axis: "rows" or "columns".
    Returns:
      [pairs] degrees from 0 to 180, of the pairs of vectors that are not zero.
    """
    vectors = np.asarray(matrix, np.float64)
    vectors = vectors if axis == "rows" else vectors.T
    norms = np.linalg.norm(vectors, axis=1)
    units = vectors[norms > 0] / norms[norms > 0, None]
    cosines = (units @ units.T)[np.triu_indices(len(units), 1)]
    return np.degrees(np.arccos(np.clip(cosines, -1.0, 1.0)))


def matrices_of(model: models.ViT) -> Iterator[tuple[int, str, dict[str, np.ndarray]]]:
    """(block, target, {"kernel", "down", "up", "delta"}) of each LoRA: kernel [n, m] is the base's part of the Linear.

    Of AO from zero, down and up are AO(p) and AO(q)^T of the vectors that train; delta is what is really added.

    Raises:
      UserError: the model has no LoRA.
    """
    if model.slots is None or model.slots.method != "lora":
        raise UserError("the geometry of an adapter is that of LoRA: the model has none in its slots")
    for index, block in enumerate(model.blocks):
        for _, layer, _ in layers_of(block, index):
            for (name, first, end), (part, _, _) in (
                zip(layer.slot.ranges, layer.slot.parts, strict=True) if layer.slot is not None else ()
            ):
                kernel = np.asarray(layer.kernel[...], np.float32)[:, first:end]
                down, up = (np.asarray(matrix) for matrix in part.matrices())
                delta = down @ up
                rank = model.slots.rank_of(index)
                yield index, name, {"kernel": kernel, "down": down[:, :rank], "up": up[:rank], "delta": delta}


def describe(model: models.ViT) -> list[dict]:
    """One row for each matrix of each LoRA: angles (mean and standard deviation, degrees) and norms.

    Fields: block, target, matrix ("kernel", "down", "up", "delta", "merged"), row_angle, row_angle_std, column_angle,
    column_angle_std (None where there are no two vectors), spectral_norm, frobenius_norm. "merged" is the kernel after
    training, kernel + delta.
    """
    rows = []
    for block, target, found in matrices_of(model):
        for name, matrix in (found | {"merged": found["kernel"] + found["delta"]}).items():
            row = {"block": block, "target": target, "matrix": name}
            for axis in ("row", "column"):
                between = angles(matrix, f"{axis}s")
                row[f"{axis}_angle"] = float(between.mean()) if between.size else None
                row[f"{axis}_angle_std"] = float(between.std()) if between.size else None
            row["spectral_norm"] = float(np.linalg.norm(matrix, 2))
            row["frobenius_norm"] = float(np.linalg.norm(matrix))
            rows.append(row)
    return rows


def rademacher_bound(matrix, features) -> float:
    """An upper bound on the empirical Rademacher complexity of the linear maps that are no larger than this one.

    For ``{x -> <w, x> : ||w||_2 <= B}`` it is at most ``B sqrt(sum_i ||x_i||^2) / m`` (Shalev-Shwartz and Ben-David,
    Understanding Machine Learning, lemma 26.10); with ``B = ||W||_2``, which no output direction of W exceeds, it holds
    for every unit combination of the outputs. Smaller norms, and so nearly orthogonal rows, mean a smaller bound:
    that is the argument of arXiv 2507.13260.

    Args:
      matrix: W [n, m].
      features: what the layer is given, [..., n]; m counts the rows.
    """
    rows = np.asarray(features, np.float64).reshape(-1, np.shape(matrix)[0])
    return float(np.linalg.norm(np.asarray(matrix, np.float64), 2) * np.linalg.norm(rows) / len(rows))
