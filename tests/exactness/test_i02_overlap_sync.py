"""I2: before the next batch begins, every key of the overlap has the same row and row state in both batches.

Fails if sync_overlap copies rows without their state (`source.rows`, `target.rows`), or if _shared_slots pairs slots
wrongly (`previous_slots[slots].flip(0)`).
"""

import pytest
import torch

from nestpipe import World
from nestpipe.pipelining.schedule import OVERLAPPING
from tests.exactness.cases import Case, SmallModel, features_of, global_batches, make_pipeline, on_ranks, share_of

STEPS = 6


def overlaps(world: World, schedule: str) -> list[int]:
    """Compares the records of shared keys after each update. Returns the numbers of shared keys."""
    case = Case("adam", "shared", 2, steps=STEPS, schedule=schedule)
    model = SmallModel({name: feature.table.dim for name, feature in features_of(case).items()})
    counts = []
    with make_pipeline(world, case, share_of(global_batches(STEPS), world)) as pipeline:
        for step in pipeline:
            for micro_batch in step:
                (model(micro_batch.embeddings, micro_batch.inputs) / step.weight).backward()
            (active,) = step.state.resident.groups
            step.update_rows()
            following = pipeline.stages.state(step.number + 1)
            if not following.is_step:
                continue
            (prefetched,) = following.resident.groups
            records = dict(zip(active.keys.tolist(), active.records.tolist(), strict=True))
            shared = [i for i, key in enumerate(prefetched.keys.tolist()) if key in records]
            expected = torch.tensor([records[int(prefetched.keys[i])] for i in shared], dtype=torch.float64)
            assert torch.equal(prefetched.records[shared], expected)
            assert prefetched.records.shape[1] == 15  # row and both moments
            counts.append(len(shared))
    return counts


@pytest.mark.parametrize("schedule", OVERLAPPING)
@pytest.mark.parametrize("size", [1, 3])
def test_both_batches_agree(schedule: str, size: int) -> None:
    for counts in on_ranks(size, overlaps, schedule):
        assert len(counts) == STEPS - 1
        assert min(counts) > 0
