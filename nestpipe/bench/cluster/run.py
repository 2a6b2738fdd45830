"""`bench cluster`: how each way of splitting a batch distributes its keys, and how long it takes."""

import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.bench.cluster.bisection import bisection_parts
from nestpipe.bench.harness.benchmark import Benchmark
from nestpipe.bench.harness.pairs import one_thread, take_turns
from nestpipe.bench.harness.report import Record
from nestpipe.data.batch import Batch, Jagged
from nestpipe.data.dataset import Batches, Dataset
from nestpipe.data.synthetic.clicks import ClickData
from nestpipe.data.synthetic.sequences import SequenceData
from nestpipe.embedding.cluster import CLUSTER_METHODS, Clustering
from nestpipe.store import unique

SEED = 1
NUM_BATCHES = 4
NUM_ROUNDS = 5
"""Rounds over all batches. The figure is the median of all 20 times."""
BISECTION = "bisection"
"""Recursive bisection: a reference for the others, too slow to train with."""


@dataclass(frozen=True)
class Case:
    data: str
    batch_size: int
    num_micro_batches: int


CASES = (Case("seq", 512, 4), Case("seq", 2048, 8), Case("ctr", 4096, 4), Case("ctr", 16384, 8))
DATA: dict[str, Callable[[int], Dataset]] = {"seq": SequenceData, "ctr": ClickData}

Parts = list[Tensor]


@dataclass(frozen=True)
class Numbered:
    """A batch whose keys are numbered as by the requester's dedup."""

    features: list[Jagged]
    num_distinct: int

    @staticmethod
    def from_batch(batch: Batch) -> "Numbered":
        """Numbers the keys of all features together, as their keys differ."""
        features = list(batch.keys.values())
        distinct, inverse = unique(torch.cat([feature.values for feature in features]))
        numbers = inverse.split([len(feature.values) for feature in features])
        numbered = [Jagged(n.contiguous(), feature.offsets) for n, feature in zip(numbers, features, strict=True)]
        return Numbered(numbered, len(distinct))

    def num_used(self, samples: Tensor) -> int:
        """Returns the number of distinct keys of these samples."""
        used = torch.zeros(self.num_distinct, dtype=torch.bool)
        for feature in self.features:
            used[feature.take(samples).values] = True
        return int(used.sum())


def records(quick: bool) -> Iterator[Record]:
    with one_thread():
        for case in CASES:
            yield from _case(case, 1 if quick else NUM_BATCHES, 3 if quick else NUM_ROUNDS, 8 if quick else 1)


BENCHMARK = Benchmark(
    "cluster",
    records,
    "How clustering distributes keys over micro-batches, and its time, against the given order and bisection.",
)


def _case(case: Case, num_batches: int, num_rounds: int, scale: int) -> Iterator[Record]:
    source = Batches(DATA[case.data](SEED), case.batch_size // scale)
    batches = [Numbered.from_batch(next(source)) for _ in range(num_batches)]
    given = [_measured(batch, _split(batch, "none", case.num_micro_batches)) for batch in batches]
    for method in ("none", "minhash", "spectral", BISECTION):
        results = [_measured(batch, _split(batch, method, case.num_micro_batches)) for batch in batches]
        yield {
            "data": case.data,
            "batch_size": case.batch_size // scale,
            "num_micro_batches": case.num_micro_batches,
            "method": method,
            "seed": SEED,
            "threads": 1,
            "num_batches": num_batches,
            **{field: statistics.mean(result[field] for result in results) for field in results[0]},
            "imbalance_most": max(result["imbalance"] for result in results),
            "recovery": statistics.mean(
                (none["expansion"] - result["expansion"]) / (none["expansion"] - 1)
                for none, result in zip(given, results, strict=True)
            ),
            "cluster_ms": _milliseconds(batches, method, case.num_micro_batches, num_rounds),
        }


def _split(batch: Numbered, method: str, num_parts: int) -> Parts:
    if method in CLUSTER_METHODS:
        return Clustering(method).parts(batch.features, batch.num_distinct, num_parts)
    return bisection_parts(batch.features, batch.num_distinct, num_parts)


def _measured(batch: Numbered, parts: Parts) -> dict[str, float]:
    num_used = [batch.num_used(part) for part in parts]
    cost = Clustering().costs(batch.features)
    costs = [float(cost[part].sum()) for part in parts]
    between = costs[1:-1]
    return {
        "expansion": sum(num_used) / batch.num_distinct,
        "head_share": num_used[0] / batch.num_distinct,
        "tail_share": num_used[-1] / batch.num_distinct,
        "imbalance": max(between) / statistics.mean(between),
        "head_cost": costs[0] / statistics.mean(between),
        "tail_cost": costs[-1] / statistics.mean(between),
    }


def _milliseconds(batches: list[Numbered], method: str, num_parts: int, num_rounds: int) -> float:
    works = [lambda batch=batch: _split(batch, method, num_parts) for batch in batches]
    times = take_turns(works, 1 if method == BISECTION else num_rounds)
    return statistics.median(itertools.chain.from_iterable(times)) * 1e3
