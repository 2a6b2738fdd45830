"""`bench h200`: an accelerator, and a host whose memory holds the tables. Each part takes minutes."""

from collections.abc import Callable, Iterator
from typing import Annotated

import typer

from nestpipe.bench.h200 import four_ranks, models, one_rank, pool, stages
from nestpipe.bench.harness.benchmark import Benchmark
from nestpipe.bench.harness.report import Record
from nestpipe.device.streams import default_device
from nestpipe.distributed import World

Part = Callable[[str, bool], Iterator[Record]]
"""(device, quick) -> records."""


def _in_this_process(measure: Callable[[World, bool], Iterator[Record]]) -> Part:
    """Returns a part that measures in this process, in a world of one rank."""
    return lambda device, quick: measure(World(device=device), quick)


PARTS: dict[str, Part] = {
    "one-rank": _in_this_process(one_rank.records),
    "four-ranks": four_ranks.records,
    "models": _in_this_process(models.records),
    "pool": _in_this_process(pool.records),
    "stages": _in_this_process(stages.records),
}


def records(
    quick: bool, *, part: Annotated[str, typer.Option("--part", help=f"One of {', '.join(PARTS)}.")]
) -> Iterator[Record]:
    if part not in PARTS:
        raise ValueError(f"--part is {part!r}, must be one of {', '.join(PARTS)}")
    device = default_device()
    if device == "cpu":
        raise ValueError("bench h200 needs an accelerator, and torch finds none here")
    return PARTS[part](device, quick)


BENCHMARK = Benchmark(
    "h200",
    records,
    "Tables in host memory with an accelerator: whole steps of one rank and of four, and single stages.",
    result="h200-{part}",
)
