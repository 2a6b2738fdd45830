"""Metrics of clicks against their definitions, pair by pair and sample by sample.

Fails, for example, if auc counts a tie as won or as lost, or if normalised_entropy divides by that of the scores.
"""

import math

import pytest
import torch
from torch import Tensor

from nestpipe.evaluation.clicks import auc, log_loss, normalised_entropy


def slow_auc(scores: list[float], labels: list[int]) -> float:
    clicked = [score for score, label in zip(scores, labels, strict=True) if label == 1]
    others = [score for score, label in zip(scores, labels, strict=True) if label == 0]
    won = sum(1.0 if one > other else 0.5 if one == other else 0.0 for one in clicked for other in others)
    return won / (len(clicked) * len(others))


def slow_log_loss(logits: list[float], labels: list[int]) -> float:
    chances = [1 / (1 + math.exp(-logit)) for logit in logits]
    return sum(-math.log(p if label else 1 - p) for p, label in zip(chances, labels, strict=True)) / len(labels)


def random_case(seed: int, num_samples: int, num_levels: int | None) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(num_samples, generator=generator, dtype=torch.float64)
    labels = (torch.rand(num_samples, generator=generator) < torch.sigmoid(scores)).float()
    labels[:2] = torch.tensor([0.0, 1.0])
    return (scores if num_levels is None else (scores * num_levels).round() / num_levels), labels


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_samples", [2, 3, 50, 400])
@pytest.mark.parametrize("num_levels", [None, 1, 5])
def test_against_the_definitions(seed: int, num_samples: int, num_levels: int | None) -> None:
    scores, labels = random_case(seed, num_samples, num_levels)
    lists = scores.tolist(), labels.int().tolist()
    rate = sum(lists[1]) / num_samples
    assert auc(scores, labels) == pytest.approx(slow_auc(*lists), rel=1e-14)
    assert log_loss(scores, labels) == pytest.approx(slow_log_loss(*lists), rel=1e-12)
    knowing_nothing = slow_log_loss([math.log(rate / (1 - rate))] * num_samples, lists[1])
    assert normalised_entropy(scores, labels) == pytest.approx(slow_log_loss(*lists) / knowing_nothing, rel=1e-12)


def test_by_hand() -> None:
    labels = torch.tensor([0, 1, 0, 1])
    assert auc(torch.tensor([1, 2, 3, 4]), labels) == 0.75
    assert auc(torch.tensor([4, 3, 2, 1]), labels) == 0.25
    assert auc(torch.tensor([2, 2, 2, 2]), labels) == 0.5
    assert auc(torch.tensor([1, 1, 1, 2]), labels) == 0.75
    assert auc(torch.tensor([-math.inf, 0.0, -1.0, math.inf]), labels) == 1.0
    assert log_loss(torch.zeros(4), labels) == pytest.approx(math.log(2))


def test_knowing_the_rate_alone_is_one() -> None:
    labels = torch.tensor([1.0, 0.0, 0.0, 0.0])
    assert normalised_entropy(torch.full((4,), math.log(1 / 3), dtype=torch.float64), labels) == pytest.approx(1.0)
    assert normalised_entropy(torch.zeros(4), labels) > 1.1
    assert normalised_entropy(torch.tensor([20.0, -20.0, -20.0, -20.0]), labels) < 1e-8


def test_scores_are_compared_in_float64() -> None:
    """In float32 these two are equal."""
    scores = torch.tensor([1.0, 1.0 + 1e-12], dtype=torch.float64)
    assert auc(scores, torch.tensor([0.0, 1.0])) == 1.0


def test_counts_stay_exact() -> None:
    """In float32 the number of pairs would be rounded."""
    num_clicked, num_others = 9001, 9011
    scores = torch.cat([torch.ones(num_clicked), torch.zeros(num_others)])
    labels = scores.clone()
    scores[0] = -1.0
    assert auc(scores, labels) == (num_clicked - 1) / num_clicked


def test_large_logits_stay_finite() -> None:
    assert log_loss(torch.tensor([800.0, -800.0]), torch.tensor([0.0, 1.0])) == 800.0


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_labels_that_are_all_equal(label: float) -> None:
    scores, labels = torch.tensor([0.0, 1.0]), torch.full((2,), label)
    assert math.isnan(auc(scores, labels))
    assert math.isnan(normalised_entropy(scores, labels))
    assert log_loss(scores, labels) == pytest.approx(slow_log_loss([0.0, 1.0], [int(label)] * 2), rel=1e-12)


@pytest.mark.parametrize("metric", [auc, log_loss, normalised_entropy])
def test_nothing_is_nan(metric) -> None:
    assert math.isnan(metric(torch.empty(0), torch.empty(0)))


@pytest.mark.parametrize("metric", [auc, log_loss, normalised_entropy])
def test_refusals(metric) -> None:
    with pytest.raises(ValueError, match="1 of 2 scores are nan"):
        metric(torch.tensor([0.0, math.nan]), torch.tensor([0.0, 1.0]))
    for labels in ([0.5, 1.0], [2.0, 2.0], [math.nan, 0.0]):
        with pytest.raises(ValueError, match="labels must be 0 or 1"):
            metric(torch.zeros(2), torch.tensor(labels))
    for shape in ((3,), (2, 1)):
        with pytest.raises(ValueError, match="1-dimensional and of equal length"):
            metric(torch.zeros(2), torch.zeros(shape))
