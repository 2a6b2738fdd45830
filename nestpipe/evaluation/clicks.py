"""Metrics of predicted clicks, in float64. Labels are 0 or 1.

A metric that is not defined is nan: without samples all are, and if all labels are equal, AUC and normalised entropy
are. Scores that are nan, labels other than 0 and 1, and shapes that differ are refused.
"""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from nestpipe.data.batch import Jagged
from nestpipe.distributed import Channel
from nestpipe.registry import metrics


def auc(scores: Tensor, labels: Tensor) -> float:
    """Returns the share of pairs (clicked, not clicked) in which the clicked one scores higher; a tie counts half."""
    scores, labels = _checked(scores, labels)
    values, ranks = scores.unique(return_inverse=True)
    # Counts, not sums of floats: exact for any number of samples below 2^31.
    clicked = torch.bincount(ranks[labels == 1], minlength=len(values))
    others = torch.bincount(ranks[labels == 0], minlength=len(values))
    num_pairs = int(clicked.sum()) * int(others.sum())
    if num_pairs == 0:
        return math.nan
    twice_won = clicked * (2 * (others.cumsum(0) - others) + others)
    return int(twice_won.sum()) / (2 * num_pairs)


def log_loss(logits: Tensor, labels: Tensor) -> float:
    """Returns the mean binary cross-entropy, in nats."""
    logits, labels = _checked(logits, labels)
    return float(F.binary_cross_entropy_with_logits(logits, labels)) if len(labels) else math.nan


def normalised_entropy(logits: Tensor, labels: Tensor) -> float:
    """Returns the log loss divided by that of always predicting the mean of the labels."""
    rate = float(labels.double().mean())
    if not 0 < rate < 1:
        return log_loss(logits, labels) * math.nan  # log_loss still checks its arguments
    return log_loss(logits, labels) / -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))


def _checked(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    if scores.dim() != 1 or scores.shape != labels.shape:
        raise ValueError(
            f"scores and labels must be 1-dimensional and of equal length, got {list(scores.shape)} and "
            f"{list(labels.shape)}"
        )
    scores, labels = scores.detach().double(), labels.detach().double()
    if bool(scores.isnan().any()):
        raise ValueError(f"{int(scores.isnan().sum())} of {len(scores)} scores are nan")
    if not bool(((labels == 0) | (labels == 1)).all()):
        raise ValueError("labels must be 0 or 1")
    return scores, labels


@metrics.register("clicks")
class ClickMetrics:
    """AUC, log loss and normalised entropy of predicted clicks.

    If the data has the true probability of each click, as synthetic data has, the metrics of that probability are
    there too, under names that end with "_ceiling".
    """

    method = "predict"

    def __init__(self) -> None:
        self._logits: list[Tensor] = []
        self._clicks: list[Tensor] = []
        self._ceilings: list[Tensor] = []

    def update(self, outputs: Tensor, inputs: Mapping[str, Tensor], keys: Mapping[str, Jagged]) -> None:
        self._logits.append(outputs.double())
        self._clicks.append(inputs["click"].double())
        if "click_probability" in inputs:
            self._ceilings.append(inputs["click_probability"].double().logit())

    def compute(self, channel: Channel) -> dict[str, float]:
        columns = (self._logits, self._clicks, self._ceilings)
        logits, clicks, ceilings = (_all_ranks(column, channel) for column in columns)
        computed = _click_metrics(logits, clicks)
        if len(ceilings) == len(clicks) > 0:
            computed |= {f"{name}_ceiling": value for name, value in _click_metrics(ceilings, clicks).items()}
        return computed


def _click_metrics(logits: Tensor, labels: Tensor) -> dict[str, float]:
    return {
        "auc": auc(logits, labels),
        "log_loss": log_loss(logits, labels),
        "normalised_entropy": normalised_entropy(logits, labels),
    }


def _all_ranks(parts: list[Tensor], channel: Channel) -> Tensor:
    mine = torch.cat([torch.empty(0, dtype=torch.float64), *parts])
    return torch.cat([part.clone().view(torch.float64) for part in channel.all_gather_bytes(mine.view(torch.uint8))])
