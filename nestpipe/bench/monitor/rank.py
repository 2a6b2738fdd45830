"""One rank of `bench monitor`, on its own host. It trains a run for each fault.

Rank 0 prints a line of JSON before each run, when all ranks are ready for it, and one after it.
"""

import argparse
import json
import os
import time
import timeit
from itertools import islice
from pathlib import Path

import torch

from nestpipe.bench.monitor.workload import trouble
from nestpipe.distributed import World
from nestpipe.distributed.stamps import Stamps
from nestpipe.pipelining.schedule import operations
from nestpipe.pipelining.stage_work import StageWork
from nestpipe.recipe.run import run
from nestpipe.recipe.text import load_config

POLL_SECONDS = 0.01
GO = "go"
"""Prefix of the files that the benchmark makes when a run may begin."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--kinds", nargs="+")
    parser.add_argument("--victim", type=int)
    options = parser.parse_args()
    world = World.from_environment(device="cpu")
    torch.set_num_threads(1)
    for kind in options.kinds:
        trouble.num_ranks = world.size
        trouble.reads_slowly = kind == "disk" and world.rank == options.victim
        trouble.hot_owner = options.victim if kind == "owner" else None
        world.control.all_reduce_sum(torch.zeros(1))
        _print(world, {"ready": kind})
        while not (options.folder / f"{GO}-{kind}").exists():
            time.sleep(POLL_SECONDS)
        config = load_config(options.recipe, [f"logging.dir={options.folder / kind}"]).resolved(1, 1)
        summary = run(config, world)
        _print(
            world, {"done": kind, "step_ms": summary["step_ms"], "stamps_share": _stamps_ms(world) / summary["step_ms"]}
        )
    world.control.all_reduce_sum(torch.zeros(1))
    os._exit(0)


def _stamps_ms(world: World) -> float:
    """Returns what it costs to keep the time stamps of a step: those of its operations and collectives."""
    stamps, work, number = Stamps(), StageWork(), 20_000

    def add() -> None:
        stamps.add(time.perf_counter_ns(), time.perf_counter_ns())
        work.end("retrieve", 0, work.begin())

    num_operations = sum(op.batch == 2 for op in islice(operations("nested", 1, cross_batch=True), 200))
    num_collectives = 2 * len(world.step_channels)  # route has four of them
    return (num_operations + num_collectives) * timeit.timeit(add, number=number) / number * 1e3


def _print(world: World, line: dict[str, object]) -> None:
    if world.rank == 0:
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
