"""Measures a workload: serial and nested training, the dense part alone, and plain torch, in turns."""

import gc
import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from nestpipe.bench.h200.digests import deterministic
from nestpipe.bench.h200.models.baselines import DenseStep, PlainStep, record_bytes
from nestpipe.bench.h200.models.workload import Workload, keys_of_ranks
from nestpipe.bench.h200.one_rank import device_step_ms, mean_fields
from nestpipe.bench.h200.preload import preload
from nestpipe.bench.harness.pairs import spread
from nestpipe.bench.harness.report import Record
from nestpipe.data.batch import Batch
from nestpipe.distributed import World
from nestpipe.embedding.group import group_features
from nestpipe.embedding.table import Table
from nestpipe.store import Store
from nestpipe.train.fit_result import FitResult
from nestpipe.train.trainer import Trainer

NUM_THREADS = 12
"""Threads of the store. The launching thread and the lanes need cores too."""
FILL_ROWS = 250_000
PRELOADED_KEYS = 100_000
"""Keys of a feature that are made resident at a time."""
NUM_BATCHES = 12
DIGEST_STEPS = 6


@dataclass(frozen=True)
class Length:
    """Length of the measurement."""

    num_rounds: int = 5
    serial_steps: int = 9
    steps: int = 24
    left_out: int = 4
    """Steps at the beginning of a round that do not count, because the pipeline fills."""


QUICK = Length(num_rounds=2, serial_steps=5, steps=6, left_out=3)


def compare(world: World, workload: Workload, length: Length) -> Iterator[Record]:
    """Yields a record for serial and one for nested."""
    rounds = _measure(world, workload, length)
    gc.collect()  # the next workload needs the memory
    serial, nested, dense, plain = (rounds[name] for name in ("serial", "nested", "dense", "plain"))
    identity: Record = {
        "model": workload.name,
        "ranks": 1,
        "num_micro_batches": workload.num_micro_batches,
        "tables": len(workload.dims),
        "num_rows": workload.num_rows,
        "batch_size": workload.batch_size,
        "threads": NUM_THREADS,
    }
    baselines = {
        "dense_unsplit_ms": statistics.median(r["step_ms"] for r in dense),
        "rows_on_device_ms": statistics.median(r["step_ms"] for r in plain),
    }
    digests = _digests(world, workload.small)
    for schedule, mine in (("serial", serial), ("nested", nested)):
        figures = {field: statistics.median(r[field] for r in mine) for field in mine[0]}
        ratios = spread("step_over_dense_unsplit", _ratios(mine, dense)) | spread(
            "step_vs_rows_on_device", _ratios(mine, plain)
        )
        if schedule == "nested":
            ratios |= spread("nested_vs_serial", _ratios(nested, serial))
            ratios["digests_equal"] = int(digests["serial"] == digests["nested"])
        yield {"schedule": schedule, **identity, **figures, **baselines, **ratios}


def _ratios(mine: list[dict[str, float]], others: list[dict[str, float]]) -> list[float]:
    return [m["step_ms"] / other["step_ms"] for m, other in zip(mine, others, strict=True)]


def _measure(world: World, workload: Workload, length: Length) -> dict[str, list[dict[str, float]]]:
    num_steps, num_rounds = {"serial": length.serial_steps, "nested": length.steps}, length.num_rounds + 1
    torch.set_num_threads(NUM_THREADS)
    # Batches that never repeat show what stays resident; if everything does, a few are enough.
    batches = workload.batches(NUM_BATCHES if workload.resident_share is None else num_rounds * length.steps)
    trainers = {schedule: make_trainer(world, workload, schedule) for schedule in num_steps}
    for trainer in trainers.values():
        fill(trainer.store, trainer.tables, workload.num_rows)
    torch.set_num_threads(1)  # small operations of lanes are slower if they wait for other threads on busy cores
    make_resident(trainers["nested"], workload)
    steps: dict[str, Callable[[], None]] = {
        "dense": DenseStep(workload, batches[0], world.device),
        "plain": PlainStep(workload, batches[:4], world.device),
    }
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in (*trainers, *steps)}
    for number in range(num_rounds):  # the first round warms up
        means = {}
        for schedule, trainer in trainers.items():
            first = number * length.steps
            stretch = list(itertools.islice(itertools.cycle(batches), first, first + num_steps[schedule]))
            means[schedule] = train_stretch(trainer, stretch, length.left_out)
        for name, step in steps.items():
            times = device_step_ms(step, length.steps, world.device)[length.left_out :]
            means[name] = {"step_ms": statistics.mean(times)}
        if number > 0:
            for name, fields in means.items():
                rounds[name].append(fields)
    return rounds


def make_trainer(world: World, workload: Workload, schedule: str) -> Trainer:
    share = workload.resident_share
    tables = [Table(name, dim, optimizer=workload.optimizer) for name, dim in workload.dims.items()]
    slot_bytes = sum(workload.num_rows * record_bytes(table) for table in tables)
    return Trainer(
        workload.make_model(workload).to(world.device),
        workload.features,
        dense_optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-3, fused=world.device.type == "cuda"),
        world=world,
        schedule=schedule,
        num_micro_batches=workload.num_micro_batches,
        num_threads=NUM_THREADS,
        check_split=False,
        autocast=torch.bfloat16,
        compiled=workload.compiled,
        resident_bytes="auto" if share is None else int(share * slot_bytes),
    )


def fill(store: Store, tables: list[Table], num_rows: int) -> None:
    """Gives every table all its rows."""
    for table in tables:
        width = store.spec(table.name).num_columns
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(min(FILL_ROWS, num_rows), width, generator=generator).abs_() * 0.02
        for keys in torch.arange(num_rows).split(len(rows)):
            store.scatter(table.name, keys, rows[: len(keys)], 0)


def make_resident(trainer: Trainer, workload: Workload) -> None:
    """Makes the hottest rows resident, the hottest last."""
    share = 1.0 if workload.resident_share is None else workload.resident_share
    number = int(share * workload.num_rows)
    groups = group_features(trainer.features).groups
    first_features = {workload.table_of(name): name for name in reversed(list(workload.lists))}
    empty = torch.empty(0, dtype=torch.int64)

    def pieces() -> Iterator[dict[str, torch.Tensor]]:
        for ranks in torch.arange(number).flip(0).split(PRELOADED_KEYS):
            keys = keys_of_ranks(ranks, workload.num_rows)
            yield {name: keys if first_features[workload.table_of(name)] == name else empty for name in workload.lists}

    preload(trainer, [number * len(group.tables) for group in groups], pieces())


def train_stretch(trainer: Trainer, batches: list[Batch], left_out: int) -> dict[str, float]:
    """Trains for a stretch, and returns means over its counted steps."""
    result = FitResult()
    trainer.fit(batches, result=result)
    times = list(result.times)[left_out:]
    means = {name: statistics.mean(step.sizes[name] for step in times) for name in times[0].sizes}
    return {
        **mean_fields(times),
        "hit_rate": 1 - means["retrieved_keys_per_step"] / means["owned_keys_per_step"],
        "host_bytes_per_step": means["retrieved_bytes_per_step"] + means["written_back_bytes_per_step"],
    }


def _digests(world: World, workload: Workload) -> dict[str, str]:
    digests = {}
    with deterministic():
        for schedule in ("serial", "nested"):
            trainer = make_trainer(world, workload, schedule)
            trainer.fit(workload.batches(DIGEST_STEPS))
            digests[schedule] = trainer.digest()
    return digests
