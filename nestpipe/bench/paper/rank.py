"""One rank of `bench paper`, on its own host. Rank 0 prints one record per line, as JSON."""

import argparse
import json
import os
from collections.abc import Iterator

import torch

from nestpipe.bench.paper.paced import Paces, ranks_records, schedule_records
from nestpipe.bench.paper.real import robustness_records
from nestpipe.bench.paper.workload import QUICK, QUICK_REAL, RealSize, Size
from nestpipe.distributed import World
from nestpipe.store.cores import usable_cores

PARTS = ("schedules", "ranks", "robustness")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", choices=PARTS)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rate")
    parser.add_argument("--dense-ms", type=float, default=0.0)
    parser.add_argument("--lookup-us-per-key", type=float, default=0.0)
    options = parser.parse_args()
    world = World.from_environment(device="cpu")
    torch.set_num_threads(max(1, usable_cores() // world.size))
    for record in _records(options, world):
        if world.rank == 0:
            print(json.dumps({**record, "rate": options.rate}), flush=True)
    world.control.all_reduce_sum(torch.zeros(1))
    os._exit(0)  # does not wait for lanes, which wait for further steps


def _records(options: argparse.Namespace, world: World) -> Iterator[dict[str, int | float | str | bool]]:
    size = QUICK if options.quick else Size()
    if options.part == "schedules":
        return schedule_records(size, world)
    if options.part == "ranks":
        return ranks_records(size, world, Paces(options.dense_ms, options.lookup_us_per_key))
    return robustness_records(QUICK_REAL if options.quick else RealSize(), world)


if __name__ == "__main__":
    main()
