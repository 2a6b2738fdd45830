"""The row pool on a device: any capacity, masked steps, and host memory that does not grow with the pool.

Fails, for example, if update_records updates the whole array instead of the slots, if Stages._settle marks the rows of
a masked step, or if GrowingArray keeps a copy in host memory.
"""

import pytest
import torch

from nestpipe import World
from nestpipe.device.growing import GrowingArray
from nestpipe.pipelining.commit import NonFiniteError
from nestpipe.store.process_memory import resident_bytes as host_bytes
from nestpipe.train.digest import digest
from tests.exactness.cases import Case, make_trainer, on_ranks
from tests.exactness.test_r05_flush import flushed
from tests.exactness.test_r06_capacity import batches_of, digests, pairs, resident_bytes


@pytest.mark.parametrize("size", [1, 2])
def test_streams_and_capacities(device: str, size: int) -> None:
    for results in on_ranks(size, digests, pairs(size), device=device):
        assert [run for run, is_equal in results if not is_equal] == []


@pytest.mark.parametrize("capacity", ["minimum", "everything"])
def test_a_flush_in_the_middle(device: str, capacity: str) -> None:
    on_ranks(1, flushed, "inter", capacity, device=device)


@pytest.mark.parametrize("bad_step", [1, 3])
def test_a_masked_step_changes_no_row(device: str, bad_step: int) -> None:
    """R8: the rows are those before the step, although later batches have evicted some of them meanwhile."""
    world, stream = World(device=device), "thrash"
    batches = batches_of(stream, world)
    batches[bad_step].inputs["label"] = batches[bad_step].inputs["label"] * float("nan")
    case = Case("adam", "shared", 2, schedule="inter")
    trainer = make_trainer(world, case, resident_bytes=resident_bytes(stream, "minimum", world, case.schedule))
    trainer.check_split = False
    with pytest.raises(NonFiniteError, match=f"step {bad_step}:"):
        trainer.fit(batches)
    expected = make_trainer(world, Case("adam", "shared", 2))
    expected.check_split = False
    expected.fit(batches[:bad_step])
    stores = [digest(trainer.tables, t.store, bad_step, world) for t in (trainer, expected)]
    assert stores[0] == stores[1]


def test_an_array_grows_in_place(device: str) -> None:
    """Fails if `grow` moves rows, or takes host memory."""
    before = host_bytes()
    array = GrowingArray(256, torch.float32, torch.device(device, 0))
    address = array.rows.data_ptr()
    for num_rows in (10, 5_000, 2_000_000):
        array.grow(num_rows)
        array.rows[num_rows - 10 : num_rows] = num_rows
        assert array.rows.data_ptr() == address
    assert array.rows[[0, 4_999, 1_999_999], 0].tolist() == [10, 5_000, 2_000_000]
    assert array.num_bytes == 2_048_000_000
    assert host_bytes() - before < 200_000_000
    with pytest.raises(MemoryError, match=r"memory.resident_bytes"):
        array.grow(len(array.rows))
    array.rows[:10].add_(1)
    assert array.rows[0, 0].item() == 11
