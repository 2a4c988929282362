"""The paper's means and p-values from its cells (ORACLES A3), corrections by hand, coverage by simulation."""

import math

import numpy as np
import pytest

from vitplast_jax.reports import paper, statistics

CELLS = {name: [row[i] for row in paper.ACCURACY.values()] for i, name in enumerate(paper.CONFIGS)}


def test_the_papers_row_of_means():
    means = [round(statistics.summarise(CELLS[name])["mean"], 2) for name in paper.CONFIGS]
    assert means == [90.75, 90.68, 90.31, 89.93, 89.82, 90.85, 64.22]


@pytest.mark.parametrize(
    ("other", "t", "wilcoxon"),
    [("fc1", 0.435, 0.375), ("fc2", 0.0037, 0.0049), ("ln2", 0.075, 0.021), ("ln1", 0.024, 0.0015)],
)
def test_the_papers_p_values(other, t, wilcoxon):
    assert statistics.paired_t(CELLS["mha"], CELLS[other]) == pytest.approx(t, rel=0.02)
    assert statistics.wilcoxon_greater(CELLS["mha"], CELLS[other]) == pytest.approx(wilcoxon, rel=0.025)


def test_compare_corrects_the_family():
    rows = statistics.compare({name: CELLS[name] for name in ("mha", "fc1", "fc2", "ln2", "ln1")}, "mha")
    assert [row["config"] for row in rows] == ["fc1", "fc2", "ln2", "ln1"] and rows[0]["pairs"] == 11
    assert rows[1]["difference"] == pytest.approx(90.75 - 90.31, abs=0.01)
    # smallest first: .00374 x 4, .0242 x 3, .0746 x 2, .435 x 1
    assert [row["t_holm"] for row in rows] == pytest.approx([0.435, 0.0150, 0.149, 0.0726], rel=5e-3)


def test_holm_by_hand():
    assert statistics.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])  # 0.04 x 1 is raised to 0.03 x 2
    assert statistics.holm([0.6, None, 0.7]) == [1.0, None, 1.0]
    assert statistics.holm([]) == []


def test_wilcoxon_counts_sign_flips():
    # 1, 2, 3 all positive: one of 8 sign patterns reaches the rank sum 6
    assert statistics.wilcoxon_greater([1, 2, 3], [0, 0, 0]) == pytest.approx(1 / 8)
    assert statistics.wilcoxon_greater([0, 0, 0], [1, 2, 3]) == pytest.approx(1.0)
    assert statistics.wilcoxon_greater([1, 2, 3, 5], [0, 0, 0, 5]) == pytest.approx(1 / 8)  # no difference, no vote
    rng = np.random.default_rng(0)
    assert statistics.wilcoxon_greater(rng.normal(2, 1, 40), np.zeros(40)) < 1e-6


def test_too_little_to_say():
    assert statistics.paired_t([1.0], [0.5]) is None and statistics.paired_t([1, 2], [0, 1]) is None
    assert statistics.wilcoxon_greater([1.0, 2.0], [1.0, 2.0]) is None
    assert statistics.summarise([0.5]) == {"mean": 0.5, "std": None, "count": 1, "low": None, "high": None}
    assert statistics.rank_agreement([1, 1, 1], [1, 2, 3])["spearman"] is None
    assert statistics.rank_agreement([1, 2, 3], [1, 2, 3])["spearman_low"] is None
    with pytest.raises(ValueError, match="one length"):
        statistics.paired_t([1, 2], [1])


def test_summary_by_hand():
    found = statistics.summarise([1.0, 2.0, 3.0])
    # t(0.975, 2) = 4.30265
    assert (found["mean"], found["std"], found["count"]) == (2.0, 1.0, 3)
    assert found["high"] - 2 == pytest.approx(4.30265 / math.sqrt(3), rel=1e-5)
    assert found["high"] - 2 == pytest.approx(2 - found["low"])


def test_rank_agreement_by_hand():
    # 1 2 3 4 5 against 2 1 4 3 5: sum d^2 = 4, rho = 1 - 6 * 4 / 120; two of ten pairs are discordant, tau = 0.6
    found = statistics.rank_agreement([1, 2, 3, 4, 5], [20, 10, 40, 30, 50])
    assert (found["items"], found["spearman"], found["kendall"]) == (5, pytest.approx(0.8), pytest.approx(0.6))
    assert found["spearman_p"] == pytest.approx(16 / 120)  # Kendall's tables: P(rho >= 0.8 | n = 5) = 0.0667 one-sided
    half = 1.959964 * math.sqrt((1 + 0.32) / 2)
    assert found["spearman_low"] == pytest.approx(math.tanh(math.atanh(0.8) - half))
    assert found["kendall_high"] == pytest.approx(math.tanh(math.atanh(0.6) + 1.959964 * math.sqrt(0.437)))


def test_perfect_agreement_of_few_items_is_not_certainty():
    found = statistics.rank_agreement([1, 2, 3, 4, 5], [1, 4, 9, 16, 25])
    assert found["spearman"] == found["kendall"] == found["spearman_high"] == found["kendall_high"] == 1.0
    assert found["spearman_p"] == pytest.approx(2 / 120)
    assert 0.0 < found["spearman_low"] < 0.5 and found["kendall_low"] < 0.5
    opposite = statistics.rank_agreement([1, 2, 3, 4, 5], [5, 4, 3, 2, 1])
    assert opposite["spearman_low"] == -1.0 and opposite["spearman_high"] == pytest.approx(-found["spearman_low"])


def test_intervals_of_rank_correlation_cover():
    """95 % intervals hold the true Spearman correlation of a bivariate normal in about 95 % of 300 samples of 15."""
    rng, rho = np.random.default_rng(3), 0.6
    truth = 6 / math.pi * math.asin(rho / 2)
    samples = rng.multivariate_normal([0, 0], [[1, rho], [rho, 1]], size=(300, 15))
    found = [statistics.rank_agreement(sample[:, 0], sample[:, 1]) for sample in samples]
    covered = np.mean([row["spearman_low"] <= truth <= row["spearman_high"] for row in found])
    assert 0.92 <= covered <= 0.98


def test_the_papers_numbers_are_found_by_name():
    assert paper.accuracy("cifar100")["mha"] == pytest.approx(0.9265)
    assert paper.accuracy("plasticity/cifar10_c/snow_5")["fc1"] == pytest.approx(0.9552)
    found = [paper.row_for(name) for name in ("cifar10_c/gaussian_noise_5", "domainnet/clipart", "pet", "flowers102")]
    assert found == ["gaussian_noise", "clipart", "pet", "flowers102"]
    others = ("digits", "cifar10_c/snow_4", "vtab/cifar100", "fgvc/flowers", "domainnet/real")
    assert [paper.accuracy(name) for name in others] == [None] * 5
