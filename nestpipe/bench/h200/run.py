"""`bench h200`: an accelerator, and a host whose memory holds the tables. Each part takes minutes."""

from collections.abc import Callable, Iterator
from typing import Annotated

import typer

from nestpipe.bench.h200 import four_ranks, one_rank, pool, robustness, stages
from nestpipe.bench.h200.models import compiled
from nestpipe.bench.h200.models import run as models
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
    "pool": _in_this_process(pool.records),
    "stages": _in_this_process(stages.records),
    "robustness": _in_this_process(robustness.records),
    "compiled": _in_this_process(compiled.records),
}

MODELS = "models"


def records(
    quick: bool,
    *,
    part: Annotated[str, typer.Option("--part", help=f"One of {', '.join((*PARTS, MODELS))}.")],
    model: Annotated[
        str | None, typer.Option("--model", help=f"Only this model of part models: {', '.join(models.names())}.")
    ] = None,
) -> Iterator[Record]:
    if part not in (*PARTS, MODELS):
        raise ValueError(f"--part is {part!r}, must be one of {', '.join((*PARTS, MODELS))}")
    if model is not None and (part != MODELS or model not in models.names()):
        raise ValueError(f"--model is {model!r}; with --part {MODELS} it may be {', '.join(models.names())}")
    device = default_device()
    if device == "cpu":
        raise ValueError("bench h200 needs an accelerator, and torch finds none here")
    return models.records(World(device=device), quick, model) if part == MODELS else PARTS[part](device, quick)


BENCHMARK = Benchmark(
    "h200",
    records,
    "Tables in host memory with an accelerator: whole steps of one rank and of four, and single stages.",
    result="h200-{part}",
)
