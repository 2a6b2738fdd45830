"""Part one-rank of `bench h200`: HSTU in bf16 with a table in host memory, schedules against the dense model alone.

The schedules share one store; each has its own model. They take turns, a stretch of steps each. The first steps of a
stretch, in which the pipeline fills, do not count. Two dense-only runs take turns with them: forward, backward and
optimizer on rows that are on the device already, one with the same micro-batches and one with unsplit batches.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from nestpipe.bench.h200.data import Shape, make_batches
from nestpipe.bench.h200.digests import digest_records
from nestpipe.bench.harness.pairs import spread
from nestpipe.bench.harness.report import Record
from nestpipe.data.batch import Batch
from nestpipe.distributed import World
from nestpipe.embedding.cluster import BY_KEYS
from nestpipe.embedding.dedup import BatchDedup
from nestpipe.embedding.features import Embeddings
from nestpipe.embedding.group import group_features
from nestpipe.embedding.memory import memory_on
from nestpipe.embedding.model_rows import ModelRows
from nestpipe.embedding.optim import RowWiseAdagrad
from nestpipe.embedding.table import Feature, Sequence, Table
from nestpipe.models import HSTU
from nestpipe.pipelining.stage import STAGES
from nestpipe.pipelining.step_times import StepTimes
from nestpipe.store import HostStore
from nestpipe.train.fit_result import FitResult
from nestpipe.train.trainer import Trainer

NUM_MICRO_BATCHES = 8
FILL_ROWS = 250_000


@dataclass(frozen=True)
class Size:
    """Sizes of the measurement."""

    num_rows: int = 20_000_000
    small_rows: int = 1_000_000
    dim: int = 512
    num_layers: int = 4
    num_heads: int = 8
    num_rounds: int = 5
    steps: int = 26
    left_out: int = 5
    """Steps at the beginning of a stretch that do not count."""
    warm_up: int = 9
    """Steps of the first stretch, which does not count."""
    shapes: tuple[Shape, ...] = (Shape(), Shape(num_distinct=120_000, overlap=0.5))
    num_threads: int = 12
    """Threads of the store. The launching thread and the lanes need cores too."""


QUICK = Size(
    num_rows=20_000,
    small_rows=10_000,
    dim=32,
    num_layers=1,
    num_heads=2,
    num_rounds=2,
    steps=8,
    left_out=3,
    warm_up=8,
    shapes=(Shape(16, 32, 8, num_distinct=400, num_batches=3),),
    num_threads=2,
)


def records(world: World, quick: bool) -> Iterator[Record]:
    size = QUICK if quick else Size()
    torch.set_num_threads(1)  # small operations of lanes are slower if they wait for other threads on busy cores
    features = features_of(size.dim)
    store = filled_store(size, size.num_rows, features)
    for shape in size.shapes:
        yield from _compared(world, size, shape, features, store)
    yield _by_rows(world, size, features, store)
    yield from digest_records(world, quick)


def features_of(dim: int) -> dict[str, Feature]:
    table = Table("item", dim, optimizer=RowWiseAdagrad(0.01))
    return {name: Sequence(table) for name in ("history", "target", "negatives")}


def filled_store(size: Size, num_rows: int, features: dict[str, Feature]) -> HostStore:
    store = HostStore(size.num_threads)
    table = features["history"].table
    store.create_table(table.spec(seed=0))
    store.reserve(table.name, num_rows)
    records = torch.randn(FILL_ROWS, size.dim + 1, generator=torch.Generator().manual_seed(0)) * 0.02
    records[:, -1] = 0.1
    for keys in torch.arange(num_rows).split(FILL_ROWS):
        store.scatter(table.name, keys, records[: len(keys)], 0)
    return store


def make_model(size: Size, shape: Shape, device: torch.device) -> nn.Module:
    width = size.dim // size.num_heads
    sizes = (size.dim, shape.length, size.num_layers, size.num_heads, width, width)
    return HSTU(*sizes, dropout=0.0, negatives_per="sample").to(device)


def make_trainer(
    world: World,
    size: Size,
    shape: Shape,
    features: dict[str, Feature],
    store: HostStore,
    schedule: str,
    num_micro_batches: int = NUM_MICRO_BATCHES,
) -> Trainer:
    trainer = Trainer(
        make_model(size, shape, world.device),
        features,
        dense_optimizer=lambda parameters: torch.optim.AdamW(parameters, 1e-4, fused=True),
        world=world,
        schedule=schedule,
        num_micro_batches=num_micro_batches,
        num_threads=size.num_threads,
        check_split=False,
        autocast=torch.bfloat16,
        resident_bytes="minimum",
    )
    trainer.store = store
    return trainer


class DenseOnly:
    """The dense model's steps on resident rows, each batch split into `num_parts`."""

    def __init__(
        self,
        world: World,
        size: Size,
        shape: Shape,
        features: dict[str, Feature],
        batches: list[Batch],
        num_parts: int,
        autocast: bool = True,
    ) -> None:
        self._autocast = autocast
        self.features = group_features(features)
        self.device = world.device
        self.model = make_model(size, shape, world.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4, fused=True)
        self.weight = batches[0].weights[""]
        memory, split = memory_on(world.device), (num_parts, 1, size.num_threads, BY_KEYS)
        made = [memory.prepare_batch(self.features, batch, *split) for batch in batches[:2]]
        self.batches = [memory.upload_batch(batch) for batch in made]
        rows = torch.randn(shape.num_distinct, size.dim, device=world.device) * 0.02
        self.rows = [[rows[: b.groups[0].num_rows(i)].clone() for i in range(num_parts)] for b in self.batches]

    def step_ms(self, steps: int) -> list[float]:
        number = itertools.count()

        def step() -> None:
            which = next(number) % 2
            self._step(self.batches[which], self.rows[which])

        return device_step_ms(step, steps, self.device)

    def _step(self, batch: BatchDedup, rows: list[Tensor]) -> None:
        self.model.zero_grad()
        for i, inputs in enumerate(batch.inputs):
            variable = ModelRows(rows[i].detach().requires_grad_())
            embeddings = Embeddings(self.features, batch.groups, i, [variable])
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast):
                loss = self.model(embeddings, inputs) / self.weight
            loss.backward()
        self.optimizer.step()


def device_step_ms(step: Callable[[], None], steps: int, device: torch.device) -> list[float]:
    """Returns the time that the device takes for each of the steps."""
    if device.type == "cpu":
        return [_host_ms(step) for _ in range(steps)]
    moments = [torch.Event(device, enable_timing=True) for _ in range(steps + 1)]
    moments[0].record(torch.accelerator.current_stream(device))
    for moment in moments[1:]:
        step()
        moment.record(torch.accelerator.current_stream(device))
    moments[-1].synchronize()
    return [begin.elapsed_time(end) for begin, end in itertools.pairwise(moments)]


def _host_ms(step: Callable[[], None]) -> float:
    started = time.perf_counter()
    step()
    return (time.perf_counter() - started) * 1e3


def _compared(
    world: World, size: Size, shape: Shape, features: dict[str, Feature], store: HostStore
) -> Iterator[Record]:
    batches = make_batches(shape, size.small_rows)
    spread_keys(batches, size.num_rows // size.small_rows)
    trainers = {s: make_trainer(world, size, shape, features, store, s) for s in ("serial", "inter", "nested")}
    parts = {"dense": NUM_MICRO_BATCHES, "dense_unsplit": 1}
    dense = {name: DenseOnly(world, size, shape, features, batches, num_parts) for name, num_parts in parts.items()}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in (*dense, *trainers)}
    for number in range(size.num_rounds + 1):  # the first round warms up
        for name, trainer in trainers.items():
            means = stretch(trainer, batches, size, is_first=number == 0)
            if number > 0:
                rounds[name].append(means)
        for name, dense_only in dense.items():
            times = dense_only.step_ms(size.steps)[size.left_out :]
            if number > 0:
                rounds[name].append({"step_ms": statistics.mean(times)})
    identity = {
        "ranks": 1,
        "num_micro_batches": NUM_MICRO_BATCHES,
        "dim": size.dim,
        "num_distinct": shape.num_distinct,
        "overlap": shape.overlap,
        "num_rows": size.num_rows,
        "threads": size.num_threads,
        "steps": size.num_rounds * (size.steps - size.left_out),
    }
    for name in ("serial", "inter", "nested"):
        yield {"schedule": name, **identity, **_figures(name, rounds)}


def _figures(name: str, rounds: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    mine, serial, dense, unsplit = (rounds[key] for key in (name, "serial", "dense", "dense_unsplit"))
    figures = {field: statistics.median(r[field] for r in mine) for field in mine[0]}
    figures["dense_only_ms"] = statistics.median(r["step_ms"] for r in dense)
    figures["dense_unsplit_ms"] = statistics.median(r["step_ms"] for r in unsplit)
    pairs = list(zip(mine, serial, strict=True))
    if name == "nested":
        for field, baseline in (("step_over_dense_only", dense), ("step_over_dense_unsplit", unsplit)):
            ratios = [m["step_ms"] / d["step_ms"] for m, d in zip(mine, baseline, strict=True)]
            figures |= spread(field, ratios)
    if name != "serial":
        figures |= spread("speedup_vs_serial", [s["step_ms"] / m["step_ms"] for m, s in pairs])
        hidden = [1 - m["exposed_lookup_ms"] / s["exposed_lookup_ms"] for m, s in pairs]
        figures |= spread("lookup_hidden_fraction", hidden)
    if name == "inter":
        hidden = [(s["step_ms"] - m["step_ms"]) / s["exposed_lookup_ms"] for m, s in pairs]
        figures |= spread("lookup_hidden_end_to_end", hidden)
    return figures


def _by_rows(world: World, size: Size, features: dict[str, Feature], store: HostStore) -> Record:
    """Compares the same steps with few rows in the table and with many."""
    shape = size.shapes[0]
    few, many = make_batches(shape, size.small_rows), make_batches(shape, size.small_rows)
    spread_keys(many, size.num_rows // size.small_rows)
    small = filled_store(size, size.small_rows, features)
    few_trainer = make_trainer(world, size, shape, features, small, "nested")
    many_trainer = make_trainer(world, size, shape, features, store, "nested")
    ratios = []
    for number in range(size.num_rounds + 1):
        few_ms = stretch(few_trainer, few, size, is_first=number == 0)["step_ms"]
        many_ms = stretch(many_trainer, many, size, is_first=number == 0)["step_ms"]
        if number > 0:
            ratios.append(few_ms / many_ms)
    rows = {"num_rows": size.num_rows, "small_rows": size.small_rows, "threads": size.num_threads}
    return {"schedule": "nested", "ranks": 1, **rows, **spread("step_1m_vs_20m", ratios)}


def spread_keys(batches: list[Batch], distance: int) -> None:
    """Multiplies all keys by the distance, which spreads them over a larger table."""
    for number, batch in enumerate(batches):
        keys = {name: replace(jagged, values=jagged.values * distance) for name, jagged in batch.keys.items()}
        batches[number] = replace(batch, keys=keys)


def stretch(trainer: Trainer, batches: list[Batch], size: Size, is_first: bool) -> dict[str, float]:
    """Trains for a stretch, and returns means over its counted steps."""
    result = FitResult()
    trainer.fit(itertools.cycle(batches), size.warm_up if is_first else size.steps, result=result)
    return mean_fields(result.times[size.left_out :])


def mean_fields(times: list[StepTimes]) -> dict[str, float]:
    fields = {"step_ms": statistics.mean(step.step_ms for step in times)}
    for name, stage in STAGES.items():
        mean = statistics.mean(step.stages[name] for step in times)
        fields[stage.time_field] = fields.get(stage.time_field, 0.0) + mean
    fields["overlap_sync_ms"] = 0.0
    for name in ("busy_host_ms", "busy_input_ms"):
        fields[name] = statistics.mean(step.busy.get(name, 0.0) for step in times)
    return fields
