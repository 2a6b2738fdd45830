"""R7: the batches in flight fit into the fewest slots; with one slot less all ranks refuse the batch by name.

Two are in flight with inter, three with nested on several ranks. Fails if GroupPool.num_needed leaves out the earlier
batches: the pool then has too few slots when the batch becomes resident, which one rank alone finds out. Fails too if
Planner._make_room does not agree on growth.error.
"""

from dataclasses import replace

import pytest

from nestpipe import World
from nestpipe.distributed import RankError
from tests.exactness.cases import Case, make_trainer, on_ranks
from tests.exactness.test_r06_capacity import batches_of, record_bytes, resident_bytes

CASE = Case("adam", "shared", 2)


def refused(world: World, schedule: str) -> tuple[str, str, int, bool]:
    """Trains with one slot less than needed on the last rank, then goes on with a batch that fits."""
    stream = "thrash"
    least = resident_bytes(stream, "minimum", world, schedule)
    limit = least - (record_bytes(world) if world.rank == world.size - 1 else 0)
    trainer = make_trainer(world, replace(CASE, schedule=schedule), resident_bytes=limit)
    trainer.check_split = False
    batches, name, text = batches_of(stream, world), "", ""
    try:
        trainer.fit(batches)
    except (ValueError, RankError) as error:
        name, text = type(error).__name__, str(error)
    num_steps = trainer.num_steps
    trainer.fit(batches[:1])
    expected = make_trainer(world, CASE)
    expected.check_split = False
    expected.fit([*batches[:num_steps], batches[0]])
    return name, text, num_steps, trainer.digest() == expected.digest()


@pytest.mark.parametrize(("size", "schedule"), [(1, "inter"), (2, "nested")])
def test_one_slot_too_few(size: int, schedule: str) -> None:
    for rank, (name, text, num_steps, is_equal) in enumerate(on_ranks(size, refused, schedule)):
        assert name == ("ValueError" if rank == size - 1 else "RankError")
        assert "more than memory.resident_bytes" in text
        assert "Raise memory.resident_bytes" in text
        assert num_steps in (1, 2, 3)  # the batch does not fit together with those in flight
        assert is_equal


@pytest.mark.parametrize("value", [0, -1, "most", True, 1.5])
def test_what_resident_bytes_may_be(value: object) -> None:
    with pytest.raises(ValueError, match="must be 'minimum', 'auto' or a positive number of bytes"):
        make_trainer(World(), CASE, resident_bytes=value)
