"""Metrics of ranks: hit rate, NDCG and MRR of one target for each user. Without users all are nan."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nestpipe.data.batch import Jagged
from nestpipe.distributed import Channel
from nestpipe.evaluation.ranking import Queries, rank_targets
from nestpipe.registry import metrics

if TYPE_CHECKING:
    from nestpipe.train.trainer import Trainer


def hit_rate(ranks: Tensor, at: int) -> float:
    """Returns the share of users whose target is among the first `at` items."""
    return float((ranks <= at).double().mean()) if len(ranks) else math.nan


def ndcg(ranks: Tensor, at: int) -> float:
    """Returns the mean of 1 / log2(rank + 1), with 0 for targets that are not among the first `at` items."""
    return _mean([1 / math.log2(rank + 1) if rank <= at else 0.0 for rank in ranks.tolist()])


def mrr(ranks: Tensor) -> float:
    """Returns the mean of 1 / rank."""
    return _mean([1 / rank for rank in ranks.tolist()])


def _mean(values: list[float]) -> float:
    """Rounds once, so that the order of users does not matter."""
    return math.fsum(values) / len(values) if values else math.nan


@metrics.register("ranking")
class RankMetrics:
    """Hit rate, NDCG and MRR of each sample's target among all items, by the vector that the model's `encode` returns.

    corpus: keys of the table, or n for the keys 0 .. n - 1. Results: hr_at_10, ndcg_at_10, ... for each number in `at`,
    mrr, num_items, num_untrained_items.
    """

    method = "encode"

    def __init__(
        self,
        trainer: "Trainer",
        corpus: Tensor | int,
        at: Sequence[int] = (10, 50),
        target: str = "target",
        history: str = "history",
        normalise: bool = True,
    ) -> None:
        for name in (target, history):
            if name not in trainer.features:
                raise ValueError(f"there is no feature {name!r} to rank by; there are {sorted(trainer.features)}")
        if not at or min(at) < 1:
            raise ValueError(f"at is {list(at)}, must be numbers of first places, at least 1 each")
        self._trainer = trainer
        self._corpus = corpus
        self._at = tuple(at)
        self._target = target
        self._history = history
        self._normalise = normalise
        self._table = trainer.features[target].table
        self._parts: list[Queries] = []

    def update(self, outputs: Tensor, inputs: Mapping[str, Tensor], keys: Mapping[str, Jagged]) -> None:
        target, history = keys[self._target], keys[self._history]
        if not bool((target.lengths == 1).all()):
            raise ValueError(f"feature {self._target!r} must have one key for each sample")
        self._parts.append(Queries(outputs.detach().cpu(), target.values, Jagged(history.values, history.offsets)))

    def compute(self, channel: Channel) -> dict[str, float]:
        queries = _joined(self._parts, self._table.dim)
        ranked = rank_targets(queries, self._corpus, self._table, self._trainer.store, channel, self._normalise)
        parts = channel.all_gather_bytes(ranked.ranks.view(torch.uint8))
        ranks = torch.cat([part.clone().view(torch.int64) for part in parts])
        computed = {f"hr_at_{at}": hit_rate(ranks, at) for at in self._at}
        computed |= {f"ndcg_at_{at}": ndcg(ranks, at) for at in self._at}
        computed["mrr"] = mrr(ranks)
        return computed | {"num_items": ranked.num_items, "num_untrained_items": ranked.num_untrained_items}


def _joined(parts: list[Queries], dim: int) -> Queries:
    if not parts:
        return Queries(torch.empty(0, dim), torch.empty(0, dtype=torch.int64), Jagged.from_lists([]))
    lengths = torch.cat([part.histories.lengths for part in parts])
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return Queries(
        torch.cat([part.users for part in parts]),
        torch.cat([part.targets for part in parts]),
        Jagged(torch.cat([part.histories.values for part in parts]), offsets),
    )
