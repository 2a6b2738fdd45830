"""Runs the workloads of part models."""

from collections.abc import Iterator

import torch

from nestpipe.bench.h200.models import hstu, measure, recipes
from nestpipe.bench.h200.models.networks import workloads
from nestpipe.bench.harness.report import Record
from nestpipe.distributed import World


def names() -> list[str]:
    return [*(workload.name for workload in workloads()), "hstu", *recipes.RECIPES]


def records(world: World, quick: bool, model: str | None) -> Iterator[Record]:
    """model: runs this one only."""
    for workload in workloads():
        if model in (None, workload.name):
            length = measure.QUICK if quick else measure.Length()
            yield from measure.compare(world, workload.small if quick else workload, length)
    torch.set_num_threads(1)
    if model in (None, "hstu"):
        yield from hstu.compare(world, quick)
    for name in recipes.RECIPES:
        if model in (None, name):
            yield from recipes.compare(world, name, quick)
