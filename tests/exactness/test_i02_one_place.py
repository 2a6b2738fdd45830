"""I2, R1: a key that two consecutive batches share has one slot, so that its newest record is in exactly one place.

Fails if SlotIndex.find misses a resident key (`return torch.full_like(keys, -1)` for `use`'s lookup), or if
RowPool.settle marks nothing dirty (`None` for the step): then flush leaves old records in the store.
"""

import pytest
import torch

from nestpipe import World
from nestpipe.embedding.read import HOST
from nestpipe.pipelining.schedule import OVERLAPPING
from tests.exactness.cases import Case, SmallModel, features_of, global_batches, make_pipeline, on_ranks, share_of

STEPS = 6


def overlaps(world: World, schedule: str) -> list[int]:
    """Compares slots of shared keys, and the store with the pool after a flush. Returns the numbers of shared keys."""
    case = Case("adam", "shared", 2, steps=STEPS, schedule=schedule)
    model = SmallModel({name: feature.table.dim for name, feature in features_of(case).items()})
    counts = []
    with make_pipeline(world, case, share_of(global_batches(STEPS), world)) as pipeline:
        for step in pipeline:
            for micro_batch in step:
                (model(micro_batch.embeddings, micro_batch.inputs) / step.weight).backward()
            (active,) = step.state.resident.groups
            step.update_rows()
            pipeline.end_step()
            pipeline.flush()
            stored = pipeline.store.gather("item", active.keys)
            assert bool(stored.found.all())
            assert torch.equal(stored.records, active.copied(HOST))
            following = pipeline.stages.state(step.number + 1)
            if not following.is_step:
                continue
            (prefetched,) = following.resident.groups
            slots = dict(zip(active.keys.tolist(), active.slots.tolist(), strict=True))
            others = dict(zip(prefetched.keys.tolist(), prefetched.slots.tolist(), strict=True))
            shared = slots.keys() & others.keys()
            assert all(slots[key] == others[key] for key in shared)
            assert len({*slots.values(), *others.values()}) == len(slots.keys() | others.keys())
            counts.append(len(shared))
    return counts


@pytest.mark.parametrize("schedule", OVERLAPPING)
@pytest.mark.parametrize("size", [1, 3])
def test_one_place(schedule: str, size: int) -> None:
    for counts in on_ranks(size, overlaps, schedule):
        assert len(counts) == STEPS - 1
        assert min(counts) > 0
