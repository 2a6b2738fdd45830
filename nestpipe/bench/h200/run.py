"""`bench h200`: an accelerator, and a host whose memory holds the tables. Each part takes minutes."""

from collections.abc import Callable, Iterator
from pathlib import Path
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
    "pool": _in_this_process(pool.records),
    "stages": _in_this_process(stages.records),
    "robustness": _in_this_process(robustness.records),
    "compiled": _in_this_process(compiled.records),
}

MODELS, FOUR_RANKS = "models", "four-ranks"
ALL_PARTS = (*PARTS, MODELS, FOUR_RANKS)
BACKENDS = ("gloo", "nccl")


def records(
    quick: bool,
    *,
    part: Annotated[str, typer.Option("--part", help=f"One of {', '.join(ALL_PARTS)}.")],
    model: Annotated[
        str | None, typer.Option("--model", help=f"Only this model of part models: {', '.join(models.names())}.")
    ] = None,
    backend: Annotated[
        str, typer.Option("--backend", help="Of part four-ranks: gloo, or nccl through loopback sockets.")
    ] = "gloo",
    traces: Annotated[
        Path | None, typer.Option("--traces", help="Folder for short traces of part four-ranks, one of each schedule.")
    ] = None,
) -> Iterator[Record]:
    if part not in ALL_PARTS:
        raise ValueError(f"--part is {part!r}, must be one of {', '.join(ALL_PARTS)}")
    if backend not in BACKENDS:
        raise ValueError(f"--backend is {backend!r}, must be one of {', '.join(BACKENDS)}")
    if traces is not None and not traces.is_dir():
        raise ValueError(f"the folder {traces} of --traces does not exist")
    if model is not None and (part != MODELS or model not in models.names()):
        raise ValueError(f"--model is {model!r}; with --part {MODELS} it may be {', '.join(models.names())}")
    device = default_device()
    if device == "cpu":
        raise ValueError("bench h200 needs an accelerator, and torch finds none here")
    if part == FOUR_RANKS:
        return four_ranks.records(device, quick, backend, traces)
    return models.records(World(device=device), quick, model) if part == MODELS else PARTS[part](device, quick)


BENCHMARK = Benchmark(
    "h200",
    records,
    "Tables in host memory with an accelerator: whole steps of one rank and of four, and single stages.",
    result="h200-{part}",
)
