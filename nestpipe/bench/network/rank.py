"""One rank of `bench network`, on its own host. Rank 0 prints one record per line, as JSON."""

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from nestpipe.bench.harness.pairs import alternate, spread
from nestpipe.bench.harness.ways import Rounds, Shares, Way, medians, ratios, shares_of
from nestpipe.bench.network.loop import (
    MODELS,
    QUICK,
    SEED,
    Loop,
    Paced,
    Size,
    exchanges_of,
    make_batches,
    make_features,
)
from nestpipe.bench.network.overlap import QUICK_KEYS, KeySize, OverlapPart
from nestpipe.distributed import World
from nestpipe.embedding.cluster import BY_KEYS
from nestpipe.recipe.trace_file import write_trace
from nestpipe.store.cores import usable_cores

Record = dict[str, int | float | str | bool]

TRACED_STEPS = 6
PACE = 1.5
"""Time of paced dense compute, relative to serial's exchange time."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rate")
    parser.add_argument("--burst-bytes", type=int)
    parser.add_argument("--parts", nargs="+")
    parser.add_argument("--traces", type=Path)
    options = parser.parse_args()
    world = World.from_environment(device="cpu")
    bench = Bench(QUICK if options.quick else Size(), world, options.traces)
    for record in bench.records(options.rate, options.burst_bytes, options.parts):
        if world.rank == 0:
            print(json.dumps(record), flush=True)
    world.control.all_reduce_sum(torch.zeros(1))
    os._exit(0)  # does not wait for lanes, which wait for further steps


class Bench:
    """The measurement, as this rank takes part in it."""

    def __init__(self, size: Size, world: World, traces: Path | None) -> None:
        self.size = size
        self._traces = traces
        self.world = world
        self.threads = max(1, usable_cores() // world.size)
        torch.set_num_threads(self.threads)
        self.batches = make_batches(size, world.rank, world.size)
        totals, smallest = exchanges_of(self.batches, size, world.rank, world.size)
        by_rank = self._by_rank([*totals, smallest])
        self.shares: Shares = shares_of(by_rank[:, :3].sum(0).tolist())
        self.smallest_exchange_bytes = int(by_rank[:, 3].min())

    def records(self, rate: str, burst_bytes: int, parts: list[str]) -> Iterator[Record]:
        yield self._link(rate, burst_bytes)
        if "schedules" in parts:
            yield from self._schedules()
        if "overlap" in parts:
            keys = QUICK_KEYS if self.size == QUICK else KeySize()
            yield from OverlapPart(self.size, keys, self.world, self.threads).records()

    def _schedules(self) -> Iterator[Record]:
        many = self.size.num_micro_batches
        ways = [Way("serial", 1), Way("serial", many), Way("inter", 1), Way("nested", many)]
        yield from self._compare("paced", [*ways, Way("intra", many), Way("nested", many, "resend")])
        yield from self._compare("real", ways)

    def _link(self, rate: str, burst_bytes: int) -> Record:
        """Measures megabytes per second in one direction: if only rank 0 sends, and if both ranks do."""
        size = self.size
        sent = {"one_way": size.probe_bytes if self.world.rank == 0 else 0, "two_way": size.probe_bytes}
        received = {"one_way": size.probe_bytes - sent["one_way"], "two_way": size.probe_bytes}
        record: Record = {
            "rate": rate,
            "ranks": self.world.size,
            "threads": self.threads,
            "burst_bytes": burst_bytes,
            "smallest_exchange_bytes": self.smallest_exchange_bytes,
            "probe_bytes": size.probe_bytes,
        }
        for name in sent:
            speeds = [size.probe_bytes / 1e6 / self._probe(sent[name], received[name]) for _ in range(size.num_probes)]
            record |= spread(f"{name}_mb_per_second", speeds)
        return record

    def _probe(self, send_bytes: int, receive_bytes: int) -> float:
        """Returns the seconds of an exchange, until all ranks have received it."""
        other = 1 - self.world.rank
        sent = [0, 0]
        received = [0, 0]
        sent[other], received[other] = send_bytes, receive_bytes
        output, source = torch.empty(receive_bytes, dtype=torch.uint8), torch.ones(send_bytes, dtype=torch.uint8)
        dist.barrier()
        started = time.perf_counter()
        dist.all_to_all_single(output, source, received, sent)
        dist.barrier()
        return time.perf_counter() - started

    def _compare(self, compute: str, ways: list[Way]) -> Iterator[Record]:
        size = self.size
        features, loops = make_features(size.dim), {}
        for way in ways:
            loops[way] = Loop(way, MODELS[compute](size), features, self.batches, self.world, self.threads)
        for loop in loops.values():
            loop.turn(size.num_batches)  # creates every row and touches all memory
        sleep_ms = self._set_pace(loops) if compute == "paced" else 0.0
        turns = {way: partial(loop.turn, size.counted) for way, loop in loops.items()}
        rounds = alternate(turns, size.num_rounds, warm_up_rounds=0)
        for way in ways:
            yield self._record(way, compute, rounds, sleep_ms)
        if self._traces is not None and compute == "paced":
            for way in (Way("serial", 1), Way("nested", size.num_micro_batches)):
                loops[way].turn(TRACED_STEPS)
                write_trace(loops[way].spans, self.world, self._traces / f"{way.schedule}.json")
        for loop in loops.values():
            loop.close()

    def _set_pace(self, loops: dict[Way, Loop]) -> float:
        serial, size = loops[Way("serial", 1)], self.size
        exchange_ms = statistics.median(serial.turn(size.num_batches)["exposed_exchange_ms"] for _ in range(5))
        sleep_ms = PACE * exchange_ms  # means over ranks, so the same number on all of them
        for loop in loops.values():
            assert isinstance(loop.model, Paced)
            loop.model.sleep_ms = sleep_ms
        return sleep_ms

    def _record(self, way: Way, compute: str, rounds: Rounds, sleep_ms: float) -> Record:
        record: Record = {
            "part": "schedules",
            "compute": compute,
            "schedule": way.schedule,
            "num_micro_batches": way.num_micro_batches,
            "window": way.window,
            "method": BY_KEYS.method,
            "ranks": self.world.size,
            "threads": self.threads,
            "dim": self.size.dim,
            "batch_size": self.size.batch_size,
            "num_rounds": self.size.num_rounds,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "seed": SEED,
            **medians(rounds[way]),
            **ratios(way, rounds, self.shares, compute),
        }
        if compute == "paced" and way == Way("serial", 1):
            exchange_ms = statistics.median(values["exposed_exchange_ms"] for values in rounds[way])
            record |= {"paced_ms": sleep_ms, "paced_over_exchange": sleep_ms / exchange_ms}
        return record

    def _by_rank(self, numbers: list[int]) -> torch.Tensor:
        mine = torch.tensor(numbers, dtype=torch.float64)
        return self.world.control.all_to_all_equal(mine.expand(self.world.size, -1))


if __name__ == "__main__":
    main()
