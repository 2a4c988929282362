"""From per-example results to the numbers of an evaluation.

In: losses, predictions and labels of every example, once. Out: accuracy, balanced accuracy, loss, count, per-class
accuracy, confusion matrix. Sums are taken in float64 over the true number of examples.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np


class Evaluation:
    """Collects per-example results batch by batch; padded rows (mask False) are left out."""

    def __init__(self, num_classes: int):
        self.confusion = np.zeros((num_classes, num_classes), np.int64)
        self.loss_sum = 0.0

    def add(self, results: Mapping[str, Any]):
        """Adds a batch of "loss", "prediction", "label" and "mask"."""
        mask = np.asarray(results["mask"])
        self.loss_sum += float(np.asarray(results["loss"], np.float64)[mask].sum())
        np.add.at(self.confusion, (np.asarray(results["label"])[mask], np.asarray(results["prediction"])[mask]), 1)

    def summary(self) -> dict[str, Any]:
        """``accuracy balanced_accuracy loss count``; accuracies are fractions of 1."""
        count = int(self.confusion.sum())
        recalls = [recall for recall in self.per_class() if recall is not None]
        return {
            "accuracy": float(np.trace(self.confusion) / count),
            "balanced_accuracy": float(np.mean(recalls)),
            "loss": self.loss_sum / count,
            "count": count,
        }

    def per_class(self) -> list[float | None]:
        """The accuracy within each true class; None for a class without examples."""
        totals = self.confusion.sum(1)
        return [float(self.confusion[c, c] / total) if total else None for c, total in enumerate(totals)]


def evaluate(batches: Iterable[Mapping], run_batch, num_classes: int) -> Evaluation:
    """Runs ``run_batch`` over batches and collects the results."""
    evaluation = Evaluation(num_classes)
    for batch in batches:
        evaluation.add(run_batch(batch))
    return evaluation
