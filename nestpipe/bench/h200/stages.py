"""Part stages of `bench h200`: retrieve and write-back of the row pool, each against what the machine can do."""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from nestpipe.bench.h200.one_rank import Size, features_of, filled_store
from nestpipe.bench.harness.pairs import spread
from nestpipe.bench.harness.report import Record
from nestpipe.data.batch import Batch, Jagged
from nestpipe.device.streams import finish
from nestpipe.device.transfer import host_empty
from nestpipe.distributed import Notice, World
from nestpipe.embedding.capacity import Capacity
from nestpipe.embedding.dedup import dedup_batch
from nestpipe.embedding.group import group_features
from nestpipe.embedding.memory import memory_on
from nestpipe.embedding.resident import Growth
from nestpipe.embedding.route import OwnerDedup, route_alone
from nestpipe.embedding.row_pool import RowPool
from nestpipe.embedding.table import Feature


@dataclass(frozen=True)
class StageSize:
    """Sizes of the measurement."""

    num_distinct: int = 240_000
    num_rounds: int = 15
    num_rows: int = 8_000_000
    dim: int = 512
    num_threads: int = 12
    """Threads of the store and of the ceilings. The launching thread and the lanes need cores too."""


QUICK = StageSize(2_000, 3, num_rows=20_000, dim=32, num_threads=2)


def records(world: World, quick: bool) -> Iterator[Record]:
    stage = QUICK if quick else StageSize()
    size, device = Size(num_rows=stage.num_rows, dim=stage.dim, num_threads=stage.num_threads), world.device
    torch.set_num_threads(size.num_threads)
    features = features_of(size.dim)
    store = filled_store(size, size.num_rows, features)
    generator = torch.Generator().manual_seed(1)
    keys = [torch.randperm(size.num_rows, generator=generator)[: stage.num_distinct] for _ in range(3)]
    owned = [_owned(features, chosen) for chosen in keys]
    table = torch.randn(size.num_rows, size.dim + 1)
    memory = memory_on(device)
    (group,) = group_features(features).groups
    pool = RowPool([group], store, memory, Capacity("minimum", device))
    pool.open(store)
    pool.grow(Growth((stage.num_distinct,), 0))  # no two batches fit: all keys are missing
    staged = host_empty((stage.num_distinct, group.num_columns), torch.float32, device)
    on_device = torch.empty_like(staged, device=device)

    def host_gather(i: int) -> None:
        torch.index_select(table, 0, keys[i], out=staged)

    def host_scatter(i: int) -> None:
        table.index_copy_(0, keys[i], staged)

    up = (host_gather, lambda i: on_device.copy_(staged, non_blocking=True))
    down = (host_scatter, lambda i: staged.copy_(on_device, non_blocking=True))
    identity = {"rows": stage.num_distinct, "dim": size.dim, "threads": size.num_threads, "num_rows": size.num_rows}
    yield {
        "stage": "retrieve",
        **identity,
        **_against(lambda i: _retrieve(pool, owned[i], None), up, stage, staged.nbytes, device, "retrieve"),
    }
    yield {
        "stage": "write_back",
        **identity,
        **_against(
            lambda i: pool.flush(),
            down,
            stage,
            staged.nbytes,
            device,
            "write_back",
            lambda i: _retrieve(pool, owned[i], 1),
        ),
    }


def _retrieve(pool: RowPool, dedups: list[OwnerDedup], step: int | None) -> None:
    """Makes rows resident, and changes them if there is a step."""
    pool.settle(pool.retrieve(dedups), step)


def _owned(features: dict[str, Feature], keys: Tensor) -> list[OwnerDedup]:
    empty = Jagged(keys[:0], torch.zeros(2, dtype=torch.int64))
    batch = Batch({"history": Jagged(keys, torch.tensor([0, len(keys)])), "target": empty, "negatives": empty})
    route = route_alone(dedup_batch(group_features(features), batch, 1, 1), Notice())
    assert route is not None
    return route.owner_dedups


def _against(
    ours: Callable[[int], object],
    ceilings: tuple[Callable[[int], object], Callable[[int], object]],
    stage: StageSize,
    num_bytes: int,
    device: torch.device,
    name: str,
    prepare: Callable[[int], object] = lambda i: None,
) -> dict[str, float]:
    """Compares our time, which includes host memory and bus, with the slower of the two alone. prepare: is not
    timed."""
    times: list[list[float]] = [[], [], []]
    for number in range(stage.num_rounds + 1):
        prepare(number % 3)
        for which, work in enumerate((ours, *ceilings)):
            torch.set_num_threads(1 if work is ours else stage.num_threads)  # as in training: lanes share the cores
            seconds = _timed(partial(work, number % 3), device)
            if number > 0:
                times[which].append(seconds)
    ratios = [max(host, bus) / mine for mine, host, bus in zip(*times, strict=True)]
    rates = {
        f"{what}_gb_per_second": num_bytes / statistics.median(seconds) / 1e9
        for what, seconds in zip((name, "host_ceiling", "bus_ceiling"), times, strict=True)
    }
    return {**rates, **spread(f"{name}_vs_ceiling", ratios)}


def _timed(work: Callable[[], object], device: torch.device) -> float:
    finish(device)
    started = time.perf_counter()
    work()
    finish(device)
    return time.perf_counter() - started
