"""How good predicted clicks are; in float64. Labels are 0 or 1.

What the data does not define is nan: everything without samples, and the AUC and the normalised entropy of labels that
are all equal. Scores that are nan, labels other than 0 and 1, and shapes that differ are refused.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def auc(scores: Tensor, labels: Tensor) -> float:
    """The share of pairs (clicked, not clicked) in which the clicked one has the higher score; a tie counts half."""
    scores, labels = _checked(scores, labels)
    values, which = scores.unique(return_inverse=True)
    # Counts, not sums of floats: exact for any number of samples below 2^31.
    clicked = torch.bincount(which[labels == 1], minlength=len(values))
    others = torch.bincount(which[labels == 0], minlength=len(values))
    num_pairs = int(clicked.sum()) * int(others.sum())
    if num_pairs == 0:
        return math.nan
    twice_won = clicked * (2 * (others.cumsum(0) - others) + others)
    return int(twice_won.sum()) / (2 * num_pairs)


def log_loss(logits: Tensor, labels: Tensor) -> float:
    """The mean binary cross-entropy, in nats."""
    logits, labels = _checked(logits, labels)
    return float(F.binary_cross_entropy_with_logits(logits, labels)) if len(labels) else math.nan


def normalised_entropy(logits: Tensor, labels: Tensor) -> float:
    """The log loss divided by that of always predicting the labels' mean: 1 for knowing nothing more, 0 for all."""
    rate = float(labels.double().mean())
    if not 0 < rate < 1:
        return log_loss(logits, labels) * math.nan  # still refuses what is to be refused
    return log_loss(logits, labels) / -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))


def _checked(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    if scores.dim() != 1 or scores.shape != labels.shape:
        raise ValueError(
            f"scores and labels must be 1-dimensional and as many, got {list(scores.shape)} and {list(labels.shape)}"
        )
    scores, labels = scores.detach().double(), labels.detach().double()
    if bool(scores.isnan().any()):
        raise ValueError(f"{int(scores.isnan().sum())} of {len(scores)} scores are nan")
    if not bool(((labels == 0) | (labels == 1)).all()):
        raise ValueError("labels must be 0 or 1")
    return scores, labels
