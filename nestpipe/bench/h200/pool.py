"""Part pool of `bench h200`: the row pool from the fewest slots to room for the whole table, on skewed keys.

Every batch is drawn anew, so that what stays resident is what the distribution repeats. The store is filled, and the
hottest keys are resident, before the measurement begins.
"""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestpipe.bench.h200.one_rank import mean_fields
from nestpipe.bench.h200.preload import preload
from nestpipe.bench.harness.keys import SKEW
from nestpipe.bench.harness.report import Record
from nestpipe.data.batch import Batch, Jagged
from nestpipe.distributed import World
from nestpipe.embedding.optim import Adagrad
from nestpipe.embedding.table import Pooled, Table
from nestpipe.store import HostStore, unique
from nestpipe.train.fit_result import FitResult
from nestpipe.train.trainer import Trainer

FILL_ROWS = 250_000


@dataclass(frozen=True)
class Size:
    num_rows: int = 20_000_000
    dim: int = 128
    num_distinct: int = 300_000
    num_drawn: int = 1_500_000
    """Keys that have at least num_distinct distinct ones."""
    steps: int = 30
    left_out: int = 6
    """Steps at the beginning that do not count."""
    keys_per_sample: int = 16
    num_threads: int = 12


QUICK = Size(20_000, 16, 400, 4_000, 8, 3, 4, 2)
CAPACITIES: tuple[float, ...] = (0.0, 0.1, 0.25, 1.0)
"""Share of the table's rows that have a slot; 0 for the minimum."""


class OneFeature(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(dim, 512), nn.ReLU(), nn.Linear(512, 1))

    def forward(self, embeddings: dict[str, Tensor], inputs: dict[str, Tensor]) -> Tensor:
        logits = self.layers(embeddings["item"]).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, torch.zeros_like(logits), reduction="sum")


def records(world: World, quick: bool) -> Iterator[Record]:
    size = QUICK if quick else Size()
    torch.set_num_threads(size.num_threads)
    store, batches = _filled_store(size), _make_batches(size)
    torch.set_num_threads(1)  # small operations of lanes are slower if they wait for other threads on busy cores
    least: dict[str, float] | None = None
    for capacity in CAPACITIES:
        figures = _measured(world, size, store, batches, capacity)
        least = least or figures
        ratio = figures["host_bytes_per_step"] / least["host_bytes_per_step"]
        identity = {"ranks": 1, "num_rows": size.num_rows, "dim": size.dim, "num_distinct": size.num_distinct}
        yield {"capacity": capacity, **identity, **figures, "host_bytes_vs_minimum": ratio}


def _table(size: Size) -> Table:
    return Table("item", size.dim, optimizer=Adagrad(0.01, initial_accumulator=0.1))


def _filled_store(size: Size) -> HostStore:
    store = HostStore(size.num_threads)
    store.create_table(_table(size).spec(seed=0))
    store.reserve("item", size.num_rows)
    records = torch.randn(FILL_ROWS, 2 * size.dim, generator=torch.Generator().manual_seed(0)).abs_() * 0.02
    for keys in torch.arange(size.num_rows).split(FILL_ROWS):
        store.scatter("item", keys, records[: len(keys)], 0)
    return store


def _make_batches(size: Size) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [_make_batch(size, generator) for _ in range(size.steps)]


def _make_batch(size: Size, generator: torch.Generator) -> Batch:
    """Draws keys until there are num_distinct distinct ones."""
    keys = _keys_of_ranks(_zipf_ranks(size, generator), size)
    _, inverse = unique(keys, size.num_threads)
    is_last = (inverse == size.num_distinct - 1).nonzero()
    if len(is_last) == 0:
        raise RuntimeError(f"{size.num_drawn} keys have fewer than {size.num_distinct} distinct ones")
    num_samples = int(is_last[0]) // size.keys_per_sample + 1
    offsets = torch.arange(num_samples + 1) * size.keys_per_sample
    return Batch({"item": Jagged(keys[: int(offsets[-1])], offsets)})


def _zipf_ranks(size: Size, generator: torch.Generator) -> Tensor:
    """Draws ranks by the inverse of the continuous distribution: a search among all ranks would take minutes."""
    drawn = torch.rand(size.num_drawn, generator=generator, dtype=torch.float64)
    exponent = 1 - SKEW
    ranks = (1 - drawn * (1 - float(size.num_rows) ** exponent)) ** (1 / exponent) - 1
    clamped: Tensor = ranks.long().clamp_(max=size.num_rows - 1)
    return clamped


def _keys_of_ranks(ranks: Tensor, size: Size) -> Tensor:
    """Scatters hot keys over the table: the factor has no divisor in common with the number of rows."""
    return ranks * 7_919 % size.num_rows


def _measured(world: World, size: Size, store: HostStore, batches: list[Batch], capacity: float) -> dict[str, float]:
    table = _table(size)
    trainer = Trainer(
        OneFeature(size.dim).to(world.device),
        {"item": Pooled(table)},
        dense_optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-3),
        world=world,
        schedule="nested",
        num_threads=size.num_threads,
        check_split=False,
        resident_bytes="minimum",
    )
    trainer.store = store
    if capacity > 0:
        _preload(trainer, size, int(capacity * size.num_rows))
    result = FitResult()
    trainer.fit(batches, result=result)
    assert trainer.pool is not None
    times = list(result.times)[size.left_out :]
    means = {name: statistics.mean(step.sizes[name] for step in times) for name in times[0].sizes}
    fields = mean_fields(times)
    return {
        "step_ms": fields["step_ms"],
        "busy_host_ms": fields["busy_host_ms"],
        "exposed_lookup_ms": fields["exposed_lookup_ms"],
        "hit_rate": 1 - means["retrieved_keys_per_step"] / means["owned_keys_per_step"],
        "retrieved_bytes_per_step": means["retrieved_bytes_per_step"],
        "written_back_bytes_per_step": means["written_back_bytes_per_step"],
        "host_bytes_per_step": means["retrieved_bytes_per_step"] + means["written_back_bytes_per_step"],
        "resident_rows": trainer.pool.num_rows,
        "resident_bytes": trainer.pool.num_bytes,
    }


def _preload(trainer: Trainer, size: Size, num_slots: int) -> None:
    """Gives the trainer a pool with the hottest keys, the hottest used last."""
    pieces = torch.arange(num_slots).flip(0).split(1_000_000)
    preload(trainer, [num_slots], ({"item": _keys_of_ranks(ranks, size)} for ranks in pieces))
