"""Digests in `bench h200`: on an accelerator every schedule gives serial's digest, in float32 and in bfloat16."""

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nestpipe.bench.h200.data import Shape, make_batches
from nestpipe.bench.harness.report import Record
from nestpipe.distributed import World
from nestpipe.embedding.optim import RowWiseAdagrad
from nestpipe.embedding.table import Sequence, Table
from nestpipe.models import HSTU
from nestpipe.pipelining.schedule import SCHEDULES
from nestpipe.train.trainer import Trainer

NUM_MICRO_BATCHES = 8
STEPS = 8
DIM, NUM_HEADS = 64, 2
SHAPE = Shape(batch_size=64, length=64, num_negatives=16, num_distinct=3000, num_batches=3)
QUICK_SHAPE = Shape(batch_size=16, length=8, num_negatives=4, num_distinct=100, num_batches=3)
DTYPES: dict[str, torch.dtype | None] = {"float32": None, "bfloat16": torch.bfloat16}
"""Types that the dense model computes in. Rows and their state are float32."""


def digest_records(world: World, quick: bool) -> Iterator[Record]:
    """Yields a record per dtype and schedule. All ranks call it.

    Consecutive batches share a third of their keys, whose rows stay on the device in schedules that overlap batches.
    """
    shape = QUICK_SHAPE if quick else SHAPE
    steps = 3 if quick else STEPS
    with deterministic():
        for dtype in DTYPES:
            expected = _digest(world, shape, steps, "serial", dtype)
            for schedule in SCHEDULES[1:]:
                digest = _digest(world, shape, steps, schedule, dtype)
                yield {
                    "schedule": schedule,
                    "dense_dtype": dtype,
                    "num_micro_batches": NUM_MICRO_BATCHES,
                    "ranks": world.size,
                    "device": world.device.type,
                    "dim": DIM,
                    "steps": steps,
                    "digest": digest,
                    "digests_equal": int(digest == expected),
                }


def small_digest(world: World, schedule: str) -> str:
    """Returns the digest of a small HSTU in bfloat16 after a few steps."""
    with deterministic():
        return _digest(world, QUICK_SHAPE, STEPS, schedule, "bfloat16")


def _digest(world: World, shape: Shape, steps: int, schedule: str, dtype: str) -> str:
    table = Table("item", DIM, optimizer=RowWiseAdagrad(0.01))
    width = DIM // NUM_HEADS
    model = HSTU(DIM, shape.length, 2, NUM_HEADS, width, width, dropout=0.1, negatives_per="sample").to(world.device)
    trainer = Trainer(
        model,
        {name: Sequence(table) for name in ("history", "target", "negatives")},
        dense_optimizer=lambda parameters: torch.optim.AdamW(parameters, 1e-3),
        world=world,
        schedule=schedule,
        num_micro_batches=NUM_MICRO_BATCHES,
        check_split=False,
        autocast=DTYPES[dtype],
    )
    num_keys = 5 * shape.num_distinct  # ranks share keys, so owners sum the gradients of several ranks
    trainer.fit(itertools.cycle(make_batches(shape, num_keys, seed=world.rank)), steps)
    return trainer.digest()


@contextmanager
def deterministic() -> Iterator[None]:
    """Has torch use deterministic algorithms. An operation that has none only warns; the digests then show it."""
    before = torch.are_deterministic_algorithms_enabled()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
