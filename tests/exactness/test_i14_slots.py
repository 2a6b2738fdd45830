"""I14: slot i of a table has the i-th owned key of the batch in route order: by requester, each in order of first use.

Fails if _distinct sorts a requester's keys (`deduped.keys.sort()[0]`), or _exchange_keys those of an owner
(`distinct.sort()[0]`).
"""

import pytest
import torch

from nestpipe import World
from nestpipe.store import hash_keys
from tests.exactness.cases import Case, SmallModel, features_of, global_batches, make_pipeline, on_ranks, share_of
from tests.schedules import OUTER

CASE = Case("adagrad", "shared", 2, steps=4)


def owner_of(key: int, size: int) -> int:
    bucket = (int(hash_keys("item", torch.tensor([key]))) & (2**64 - 1)) >> 48
    return bucket * size // 65536


def first_uses(batch) -> list[int]:
    """Returns the distinct keys of a batch, feature by feature, without padding. The split does not matter."""
    keys = [*batch.keys["items"].values.tolist(), *(k for k in batch.keys["tags"].values.tolist() if k != -7)]
    return list(dict.fromkeys(keys))


def slots(world: World, schedule: str) -> list[tuple[list[int], list[int]]]:
    """Returns the resident keys of this rank and the expected ones, for each step."""
    case = Case(CASE.optimizer, CASE.layout, CASE.num_micro_batches, steps=CASE.steps, schedule=schedule)
    model = SmallModel({name: feature.table.dim for name, feature in features_of(case).items()})
    batches = global_batches(case.steps)
    results = []
    with make_pipeline(world, case, share_of(batches, world)) as pipeline:
        for step, batch in zip(pipeline, batches, strict=True):
            asked = [
                key
                for rank in range(world.size)
                for key in first_uses(share_of([batch], OtherRank(rank, world.size))[0])
            ]
            expected = [key for key in dict.fromkeys(asked) if owner_of(key, world.size) == world.rank]
            results.append((step.state.resident.groups[0].keys.tolist(), expected))
            for micro_batch in step:
                (model(micro_batch.embeddings, micro_batch.inputs) / step.weight).backward()
            step.update_rows()
    return results


class OtherRank:
    """Rank and size of another rank, for share_of."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@pytest.mark.parametrize("schedule", OUTER)
@pytest.mark.parametrize("size", [1, 3])
def test_slots_in_route_order(schedule: str, size: int) -> None:
    for steps in on_ranks(size, slots, schedule):
        assert len(steps) == CASE.steps
        for keys, expected in steps:
            assert keys == expected
