"""`bench scale`: the host's work for one rank's step, in worlds of up to 1,536 ranks and with up to 200 tables.

One rank does its own work. A channel emulates the others: it returns what was sent, arranged so that two ranks request
every owned key. A rank has the same number of distinct keys in every case, so only costs that depend on ranks or tables
grow. The time spent in the channel does not count. The rank has one thread.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn, cast

import numpy as np
import torch
from torch import Tensor

from nestpipe.bench.harness.benchmark import Benchmark
from nestpipe.bench.harness.pairs import alternate, one_thread, spread
from nestpipe.bench.harness.report import Record
from nestpipe.data.batch import Batch, Jagged
from nestpipe.distributed import Channel, Notice
from nestpipe.distributed.mesh import Mesh
from nestpipe.embedding.cluster import GIVEN_ORDER
from nestpipe.embedding.dedup import BatchDedup, dedup_batch
from nestpipe.embedding.exchange.distributed import DistributedExchange
from nestpipe.embedding.group import FeatureGroups, group_features
from nestpipe.embedding.memory import memory_on
from nestpipe.embedding.resident import ResidentRows
from nestpipe.embedding.table import Feature, Pooled, Table

DIM = 64
SEED = 1
NUM_KEYS = 40_000
"""Distinct keys of a rank's batch."""
NUM_SAMPLES = 400
USES_A_KEY = 2
"""Occurrences of each key in the batch."""
RANKS = (2, 16, 128, 1024, 1536)
TABLES = (1, 26, 200)
MICRO_BATCHES = (1, 8)
NUM_ROUNDS = 21
STAGES = ("dedup", "route", "plan", "send", "return", "sums")


@dataclass(frozen=True)
class Case:
    ranks: int
    tables: int
    num_micro_batches: int


class EchoChannel:
    """Returns what was sent. Ranks 2 i and 2 i + 1 request from this rank the keys that it requests from rank 2 i."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size
        self.mesh = Mesh(self.rank, size)
        self.seconds = 0.0
        """Time spent in this channel."""
        self.own_keys = torch.empty(0, dtype=torch.uint8)
        """Message of the keys that this rank owns itself, which it does not send."""
        self._pairs = torch.arange(size) // 2 * 2

    def all_to_all_equal(self, parts: Tensor) -> Tensor:
        began = time.perf_counter()
        received = parts[self._pairs]
        self.seconds += time.perf_counter() - began
        return received

    def all_to_all(
        self,
        message: Tensor,
        send_bytes: list[int],
        received: Tensor,
        receive_bytes: list[int],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        began = time.perf_counter()
        self._answer(message, send_bytes, received)
        self.seconds += time.perf_counter() - began
        meanwhile()

    def _answer(self, message: Tensor, send_bytes: list[int], received: Tensor) -> None:
        parts = list(message.split(send_bytes))
        parts[0] = self.own_keys
        torch.cat([parts[pair] for pair in self._pairs[1:].tolist()], out=received)

    def raise_agreed(self, error: Exception | None, failed: list[int]) -> NoReturn:
        raise RuntimeError(f"ranks {failed} failed: {error}")


class RowChannel(EchoChannel):
    """Returns what was sent, cut or padded with zeros: it does not matter which rows arrive."""

    def _answer(self, message: Tensor, send_bytes: list[int], received: Tensor) -> None:
        size = min(len(message), len(received))
        received[:size] = message[:size]
        received[size:] = 0


def make_features(num_tables: int) -> dict[str, Feature]:
    tables = [Table(f"table{t:03}", DIM) for t in range(num_tables)]
    return {table.name: Pooled(table) for table in tables}


def make_batch(num_tables: int, num_keys: int) -> Batch:
    """Makes a batch in which every table has an equal share of the distinct keys, and every key occurs twice."""
    generator = torch.Generator().manual_seed(SEED)
    keys = {}
    for t, share in enumerate(torch.arange(num_keys).tensor_split(num_tables)):
        distinct = share * 7919 + t
        values = distinct.repeat(USES_A_KEY)[torch.randperm(USES_A_KEY * len(share), generator=generator)]
        offsets = torch.linspace(0, len(values), NUM_SAMPLES + 1, dtype=torch.float64).round().long()
        keys[f"table{t:03}"] = Jagged(values, offsets)
    return Batch(keys)


class Rank:
    """One rank's step in a world of this size, up to the sum of gradients."""

    def __init__(self, case: Case, features: FeatureGroups, batch: Batch) -> None:
        self.case = case
        self._features = features
        self._batch = batch
        self._channel = EchoChannel(case.ranks)
        self._memory = memory_on(torch.device("cpu"))
        self._rows = RowChannel(case.ranks)
        channels = cast(Channel, self._channel), cast(Channel, self._rows), cast(Channel, self._rows)
        self._exchange = DistributedExchange(*channels, self._memory)
        keys = self._dedup()
        self._channel.own_keys = _own_message(keys)
        route = self._exchange.route(keys, features, Notice())
        assert route is not None
        owned = route.owner_dedups[0]
        assert 2 * len(owned.keys) == len(owned.key_index), "every owned key is asked for by two ranks"
        self._resident = [
            ResidentRows(o.group, o.keys, o.table_offsets, torch.randn(len(o.keys), o.group.num_columns))
            for o in route.owner_dedups
        ]
        sizes = [keys.groups[0].num_rows(i) for i in range(case.num_micro_batches)]
        self._gradients = [torch.randn(size, DIM) for size in sizes]

    def _dedup(self) -> BatchDedup:
        return dedup_batch(self._features, self._batch, self.case.num_micro_batches, self.case.ranks, 1, GIVEN_ORDER)

    def step(self) -> dict[str, float]:
        """Returns milliseconds by stage."""
        times: dict[str, float] = {}
        self._channels = self._channel, self._rows
        micro_batches = range(self.case.num_micro_batches)
        with _Timed(times, "dedup", self._channels):
            keys = self._dedup()
        with _Timed(times, "route", self._channels):
            route = self._exchange.route(keys, self._features, Notice())
        assert route is not None
        with _Timed(times, "plan", self._channels):
            plan = self._exchange.plan(route, "once")
        with _Timed(times, "send", self._channels):
            opened = self._exchange.open(route, plan, self._resident)
            for i in micro_batches:
                opened.send_rows(i)
                opened.rows(i)
        with _Timed(times, "return", self._channels):
            for i in micro_batches:
                opened.return_gradients(i, [self._gradients[i]])
        with _Timed(times, "sums", self._channels):
            opened.sum_gradients()
        return times


def _own_message(batch: BatchDedup) -> Tensor:
    """Returns the keys that rank 0 owns itself, in the form of a message."""
    group = batch.groups[0]
    own = slice(int(group.counts[0].sum()))
    return torch.cat([group.keys[own].view(torch.uint8), group.uses[own].flatten()])


class _Timed:
    """Times a block, without the time spent in channels."""

    def __init__(self, times: dict[str, float], name: str, channels: Sequence[EchoChannel]) -> None:
        self._times, self._name, self._channels = times, name, channels

    def __enter__(self) -> None:
        for channel in self._channels:
            channel.seconds = 0.0
        self._began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        seconds = time.perf_counter() - self._began - sum(channel.seconds for channel in self._channels)
        self._times[self._name] = seconds * 1e3


def records(quick: bool) -> Iterator[Record]:
    with one_thread():
        yield from _records(quick)


BENCHMARK = Benchmark(
    "scale", records, "The host's work for one rank's step in worlds of up to 1,536 ranks, with up to 200 tables."
)


def _records(quick: bool) -> Iterator[Record]:
    ranks, tables, num_keys = (RANKS, TABLES, NUM_KEYS) if not quick else ((2, 16, 1536), (1, 200), 4_000)
    batches = {t: make_batch(t, num_keys) for t in tables}
    features = {t: group_features(make_features(t)) for t in tables}
    cases = [Case(r, t, n) for n in MICRO_BATCHES for t in tables for r in ranks]
    steps = {case: Rank(case, features[case.tables], batches[case.tables]).step for case in cases}
    rounds = alternate(steps, 2 if quick else NUM_ROUNDS)
    for case in cases:
        yield _record(case, rounds, num_keys)


def _record(case: Case, rounds: dict[Case, list[dict[str, float]]], num_keys: int) -> Record:
    totals = {c: [sum(stages.values()) for stages in times] for c, times in rounds.items()}
    record: dict[str, float] = {
        "ranks": case.ranks,
        "tables": case.tables,
        "num_micro_batches": case.num_micro_batches,
        "threads": 1,
        "dim": DIM,
        "num_keys": num_keys,
        "seed": SEED,
        "host_ms": statistics.median(totals[case]),
    }
    for stage in STAGES:
        record[f"{stage}_ms"] = statistics.median(times[stage] for times in rounds[case])
    if case.ranks == max(RANKS):
        record |= spread("host_growth", _ratios(totals, case, Case(16, case.tables, case.num_micro_batches)))
    if case.ranks == 16 and case.tables == max(TABLES):
        record |= spread("table_growth", _ratios(totals, case, Case(16, 1, case.num_micro_batches)))
    return record


def _ratios(totals: dict[Case, list[float]], case: Case, base: Case) -> list[float]:
    return [float(ratio) for ratio in np.array(totals[case]) / np.array(totals[base])]
