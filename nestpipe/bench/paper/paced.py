"""Tables of `bench paper` with paced compute: schedules, micro-batches, and numbers of ranks.

Dense compute and reads of the store take time but no processor, and the link between hosts is slow. So lookup, exchange
and compute are on resources of their own, as on large machines, though all ranks share a few cores. Their times are
chosen so that serial's step has the published shares.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from nestpipe.bench.harness.pairs import alternate, spread
from nestpipe.bench.harness.ways import Rounds, Way, medians
from nestpipe.bench.network.loop import SEED, Loop, Paced, make_features
from nestpipe.bench.paper.published import (
    DENSE_MS,
    SERIAL,
    SPLIT_EXCHANGE_MS,
    UNSPLIT_EXCHANGE_MS,
    counterpart,
)
from nestpipe.bench.paper.workload import Size, SlowStore, overlap_of, sliding_batches
from nestpipe.distributed import World
from nestpipe.embedding.table import make_store, tables_of

Record = dict[str, int | float | str | bool]

SERIAL_WAY, UNSPLIT = Way("serial", 1), Way("inter", 1)
STALE_WAY = Way("inter", 1, stale=True)
CALIBRATED_STEPS = 8


@dataclass(frozen=True)
class Paces:
    dense_ms: float
    """Dense compute of a batch."""
    lookup_us_per_key: float
    """Time that the store takes for each key that is read."""


class Bench:
    """Loops on one world, with equal paces."""

    def __init__(self, size: Size, world: World) -> None:
        self.size, self.world = size, world
        self.threads = torch.get_num_threads()
        self.batches = sliding_batches(size, world.rank, world.size)
        self.overlap = overlap_of(self.batches)

    def loops(self, ways: Sequence[Way], paces: Paces) -> dict[Way, Loop]:
        """Makes loops, each with a store of its own that has all rows, and sets their paces."""
        features, loops = make_features(self.size.dim), {}
        for way in ways:
            store = make_store(tables_of(features), SEED, self.threads, SlowStore)
            loops[way] = Loop(way, Paced(self.size), features, self.batches, self.world, self.threads, store)
        for loop in loops.values():
            loop.turn(self.size.num_batches)  # creates every row and touches all memory
            set_pace(loop, paces)
        return loops

    def calibrated(self) -> Paces:
        """Returns the paces with which serial's step has the published shares of lookup and exchange."""
        serial = self.loops([SERIAL_WAY], Paces(0.0, 0.0))[SERIAL_WAY]
        store = serial.pipeline.store
        assert isinstance(store, SlowStore)
        read_before, steps = store.num_read, min(CALIBRATED_STEPS, self.size.num_batches)
        times = [serial.turn(steps) for _ in range(3)]
        num_read = self._mean_over_ranks((store.num_read - read_before) / (3 * (steps + 1)))
        exchange_ms = statistics.median(fields["exposed_exchange_ms"] for fields in times)
        lookup_ms = statistics.median(fields["exposed_lookup_ms"] for fields in times)
        assert SERIAL.lookup_ms is not None
        assert SERIAL.exchange_ms is not None
        wanted_ms = exchange_ms * SERIAL.lookup_ms / SERIAL.exchange_ms
        return Paces(exchange_ms * DENSE_MS / SERIAL.exchange_ms, max(wanted_ms - lookup_ms, 0.0) / num_read * 1e3)

    def rounds(self, ways: Sequence[Way], paces: Paces, num_rounds: int) -> Rounds:
        loops = self.loops(ways, paces)
        turns = {way: partial(loop.turn, self.size.counted) for way, loop in loops.items()}
        return alternate(turns, num_rounds)

    def identity(self, table: str, way: Way, paces: Paces, num_rounds: int) -> Record:
        return {
            "table": table,
            "compute": "paced",
            "schedule": way.schedule,
            "num_micro_batches": way.num_micro_batches,
            "window": way.window,
            "method": way.method,
            "stale": way.stale,
            "ranks": self.world.size,
            "threads": self.threads,
            "dim": self.size.dim,
            "batch_size": self.size.batch_size,
            "overlap": self.overlap,
            "num_rounds": num_rounds,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "seed": SEED,
            "paced_ms": paces.dense_ms,
            "lookup_us_per_key": paces.lookup_us_per_key,
        }

    def _mean_over_ranks(self, value: float) -> float:
        mine = torch.full((self.world.size, 1), value, dtype=torch.float64)
        return float(self.world.control.all_to_all_equal(mine).mean())


def set_pace(loop: Loop, paces: Paces) -> None:
    assert isinstance(loop.model, Paced)
    assert isinstance(loop.pipeline.store, SlowStore)
    loop.model.sleep_ms = paces.dense_ms
    loop.pipeline.store.ms_per_key = paces.lookup_us_per_key / 1e3


def schedule_records(size: Size, world: World) -> Iterator[Record]:
    """Yields the records of the tables end_to_end and micro_batches."""
    bench = Bench(size, world)
    paces = bench.calibrated()
    many = size.num_micro_batches
    ways = [SERIAL_WAY, STALE_WAY, UNSPLIT, Way("intra", many), Way("nested", many)]
    rounds = bench.rounds(ways, paces, size.end_to_end_rounds)
    for way in ways:
        identity = bench.identity("end_to_end", way, paces, size.end_to_end_rounds)
        yield identity | end_to_end_figures(way, rounds, paces.dense_ms)
    splits = [
        Way("nested", number, window, method)
        for number in size.splits
        for method in ("none", "spectral")
        for window in ("resend", "once")
    ]
    rounds = bench.rounds([UNSPLIT, *splits], paces, size.num_rounds)
    for way in (UNSPLIT, *splits):
        identity = bench.identity("micro_batches", way, paces, size.num_rounds)
        yield identity | split_figures(way, rounds, size.batch_size)


def end_to_end_figures(way: Way, rounds: Rounds, dense_ms: float) -> Record:
    """Returns the times of a way, its ratios to serial, and the published figures."""
    pairs = list(zip(rounds[way], rounds[SERIAL_WAY], strict=True))
    figures: Record = {**medians(rounds[way]), **counterpart(way.schedule, way.stale).fields()}
    figures |= spread("step_over_dense", [mine["step_ms"] / dense_ms for mine, _ in pairs])
    if way == SERIAL_WAY:
        for name in ("lookup", "exchange"):
            figures |= spread(f"{name}_share", [mine[f"exposed_{name}_ms"] / mine["step_ms"] for mine, _ in pairs])
        return figures
    figures |= spread("speedup_vs_serial", [serial["step_ms"] / mine["step_ms"] for mine, serial in pairs])
    for name in ("lookup", "exchange"):
        field = f"exposed_{name}_ms"
        figures |= spread(f"exposed_{name}_fraction", [mine[field] / serial[field] for mine, serial in pairs])
    return figures


def split_figures(way: Way, rounds: Rounds, batch_size: int) -> Record:
    """Returns the times of a way, and its exchange relative to that of the unsplit batch."""
    pairs = list(zip(rounds[way], rounds[UNSPLIT], strict=True))
    samples = batch_size // way.num_micro_batches
    figures: Record = {"micro_batch_size": samples, **medians(rounds[way])}
    byte_fields = ("exchanged_row_bytes_per_step", "exchanged_gradient_bytes_per_step")
    ratios = {
        "speedup_vs_unsplit": [unsplit["step_ms"] / mine["step_ms"] for mine, unsplit in pairs],
        "exchanged_bytes_vs_unsplit": [
            sum(mine[name] for name in byte_fields) / max(sum(unsplit[name] for name in byte_fields), 1)
            for mine, unsplit in pairs
        ],
        "busy_exchange_vs_unsplit": [mine["busy_exchange_ms"] / unsplit["busy_exchange_ms"] for mine, unsplit in pairs],
        "exposed_exchange_fraction": [
            mine["exposed_exchange_ms"] / unsplit["exposed_exchange_ms"] for mine, unsplit in pairs
        ],
    }
    for name, values in ratios.items():
        figures |= spread(name, values)
    if way.window == "resend" and way.method == "none" and samples in SPLIT_EXCHANGE_MS:
        figures["published_exchange_vs_unsplit"] = SPLIT_EXCHANGE_MS[samples] / UNSPLIT_EXCHANGE_MS
    return figures


def ranks_records(size: Size, world: World, paces: Paces) -> Iterator[Record]:
    """Yields records of the table ranks, for the number of ranks that this world has."""
    bench = Bench(size, world)
    ways = [SERIAL_WAY, STALE_WAY, Way("nested", size.num_micro_batches)]
    rounds = bench.rounds(ways, paces, size.num_rounds)
    for way in ways:
        yield bench.identity("ranks", way, paces, size.num_rounds) | {**medians(rounds[way])}
