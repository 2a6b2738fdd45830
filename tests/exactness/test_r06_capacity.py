"""R6: the result does not depend on the capacity of the row pool, from the fewest slots to room for every row.

Fails if _SwapStretch has slots in another order than that of the missing keys (`assignment.slots.flip(0)`), if
SlotIndex.settle marks only the first slot (`slots[:1]`), if _SwapStretch.scatter writes nothing, or if the slots that
LocalBatch sends from are those of another batch.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nestpipe import Batch, World
from nestpipe.pipelining.schedule import OVERLAPPING
from nestpipe.store import hash_keys
from tests.exactness.cases import Case, make_trainer, on_ranks
from tests.exactness.test_e1_bit_identical import keys_batch
from tests.streams import key_streams, pool_streams

STREAMS = key_streams() | pool_streams()
CAPACITIES = ("minimum", "one more", "a quarter", "everything")


def record_bytes(world: World) -> int:
    """Returns the bytes of a slot: row and two moments of dim 5, float64, and padding on a device."""
    return (3 * 5 if world.device.type == "cpu" else 16) * 8


def owned(keys: Tensor, world: World) -> set[int]:
    """Returns the keys of a batch's two features that this rank owns."""
    keys = torch.cat([keys, keys % 60]).unique()
    buckets = (hash_keys("item", keys) >> 48) & 0xFFFF
    return set(keys[buckets * world.size // 65536 == world.rank].tolist())


def resident_bytes(stream: str, capacity: str, world: World, schedule: str) -> int:
    sets = [owned(keys, world) for keys in STREAMS[stream] if len(keys) > 0]
    num_in_flight = 3 if schedule == "nested" and world.size > 1 else 2
    least = max(len(set.union(*sets[i : i + num_in_flight])) for i in range(len(sets)))
    everything = len(set.union(*sets))
    slots = {
        "minimum": least,
        "one more": least + 1,
        "a quarter": max(least, everything // 4),
        "everything": everything,
    }
    return max(slots[capacity], 1) * record_bytes(world)


def batches_of(stream: str, world: World) -> list[Batch]:
    return [keys_batch(keys[world.rank :: world.size].contiguous()) for keys in STREAMS[stream]]


def digest_of(world: World, stream: str, case: Case, capacity: str | None) -> str:
    trainer = make_trainer(
        world, case, resident_bytes=capacity and resident_bytes(stream, capacity, world, case.schedule)
    )
    trainer.check_split = False
    trainer.fit(batches_of(stream, world))
    return trainer.digest()


def digests(world: World, runs: list[tuple[str, str, str]]) -> list[tuple[tuple[str, str, str], bool]]:
    """Compares each run, given as (stream, schedule, capacity), with serial."""
    expected: dict[str, str] = {}
    results = []
    case = Case("adam", "shared", 2)
    for run in runs:
        stream, schedule, capacity = run
        if stream not in expected:
            expected[stream] = digest_of(world, stream, case, None)
        is_equal = digest_of(world, stream, replace(case, schedule=schedule), capacity) == expected[stream]
        results.append((run, is_equal))
    return results


def pairs(size: int) -> list[tuple[str, str, str]]:
    """Returns runs in which every stream meets every capacity at some size, and each schedule most of them."""
    runs = []
    for number, stream in enumerate(STREAMS):
        for i, capacity in enumerate(CAPACITIES):
            if (number + i) % 2 == size % 2:
                runs.append((stream, OVERLAPPING[(number // 2 + i + size) % 2], capacity))
    return runs


@pytest.mark.parametrize("size", [1, 2])
def test_streams_and_capacities(size: int) -> None:
    for results in on_ranks(size, digests, pairs(size)):
        assert [run for run, is_equal in results if not is_equal] == []


@pytest.mark.slow
@pytest.mark.parametrize("schedule", OVERLAPPING)
@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_streams_at_every_capacity(size: int, capacity: str, schedule: str) -> None:
    runs = [(stream, schedule, capacity) for stream in STREAMS]
    for results in on_ranks(size, digests, runs):
        assert [run for run, is_equal in results if not is_equal] == []
