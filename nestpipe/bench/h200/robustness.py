"""Part robustness of `bench h200`: the step over the dense part, for other row dims, layers and sequence lengths.

The base case is HSTU of part one-rank in one micro-batch, with the fewest resident rows. Every other case changes one
size of it. The paper of this method varies the same sizes over the same values. A longer sequence comes with a smaller
batch, so that a batch keeps its number of tokens and fits into the device's memory.

The store has fewer rows than that of part one-rank: a table of 20M rows of 1,024 would take 82 GB of host memory. The
row optimizer, the distinct keys of a batch and the overlap of batches are those of part one-rank.
"""

import gc
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from nestpipe.bench.h200.data import Shape, make_batches
from nestpipe.bench.h200.models.hstu import over_dense, turns_with_dense
from nestpipe.bench.h200.one_rank import (
    QUICK,
    DenseOnly,
    Size,
    features_of,
    filled_store,
    make_trainer,
    spread_keys,
)
from nestpipe.bench.harness.report import Record
from nestpipe.distributed import World
from nestpipe.store import HostStore

NUM_ROWS = 8_000_000
"""Rows of the table: 33 GB with the largest dim."""
FULL = Size(num_rows=NUM_ROWS, steps=16)
SMALL = replace(
    QUICK,
    num_rows=2_000,
    small_rows=1_000,
    dim=16,
    num_layers=2,
    steps=4,
    left_out=2,
    warm_up=4,
    shapes=(Shape(8, 8, 4, num_distinct=60, num_batches=3),),
)
FEWEST_SAMPLES = 2


@dataclass(frozen=True)
class Case:
    """One case: the base, or the base with another value of the size that `varied` names."""

    varied: str
    dim: int
    num_layers: int
    length: int


def cases(size: Size) -> list[Case]:
    """Lists the base case and then the others: those of the base's dim first, because they share its store."""
    base = Case("base", size.dim, size.num_layers, size.shapes[0].length)
    layers, lengths = (base.num_layers // 2, base.num_layers * 2), (base.length * 2, base.length * 4)
    return [
        base,
        *(replace(base, varied="num_layers", num_layers=number) for number in layers if number > 0),
        *(replace(base, varied="length", length=length) for length in lengths),
        *(replace(base, varied="dim", dim=dim) for dim in (base.dim * 3 // 2, base.dim * 2)),
    ]


def records(world: World, quick: bool) -> Iterator[Record]:
    size = SMALL if quick else FULL
    torch.set_num_threads(1)
    base_ratio: float | None = None
    store: HostStore | None = None
    for case in cases(size):
        sized = replace(size, dim=case.dim, num_layers=case.num_layers)
        if store is None or store.spec("item").dim != case.dim:
            store = None  # two stores would not fit into host memory
            gc.collect()
            store = filled_store(sized, size.num_rows, features_of(case.dim))
        record = _measured(world, sized, case, store)
        base_ratio = base_ratio if base_ratio is not None else float(record["step_over_dense_unsplit"])
        yield {**record, "robustness_difference": float(record["step_over_dense_unsplit"]) - base_ratio}


def _measured(world: World, size: Size, case: Case, store: HostStore) -> Record:
    """Measures a case. If the device has no room for its batch, tries with half of it."""
    batch_size = size.shapes[0].batch_size * size.shapes[0].length // case.length
    while True:
        try:
            return _record(world, size, case, store, batch_size)
        except torch.OutOfMemoryError:
            if batch_size < 2 * FEWEST_SAMPLES:
                raise
        batch_size //= 2  # here the error is gone, and with it the frames that hold the tensors
        _free_memory()


def _free_memory() -> None:
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def _record(world: World, size: Size, case: Case, store: HostStore, batch_size: int) -> Record:
    shape = size.shapes[0]
    share = batch_size * case.length / (shape.batch_size * shape.length)
    shape = replace(shape, batch_size=batch_size, length=case.length, num_distinct=int(shape.num_distinct * share))
    features = features_of(case.dim)
    batches = make_batches(shape, size.small_rows)
    spread_keys(batches, size.num_rows // size.small_rows)
    trainer = make_trainer(world, size, shape, features, store, "nested", num_micro_batches=1)
    dense = DenseOnly(world, size, shape, features, batches, 1)
    rounds = turns_with_dense({"nested": trainer}, dense, batches, size)
    del trainer, dense
    _free_memory()
    return {
        "schedule": "nested",
        "model": "hstu",
        "varied": case.varied,
        "dim": case.dim,
        "num_layers": case.num_layers,
        "length": case.length,
        "batch_size": batch_size,
        "num_distinct": shape.num_distinct,
        "overlap": shape.overlap,
        "ranks": 1,
        "num_micro_batches": 1,
        "num_rows": size.num_rows,
        "threads": size.num_threads,
        "steps": size.num_rounds * (size.steps - size.left_out),
        **over_dense(rounds["nested"], rounds["dense"]),
    }
