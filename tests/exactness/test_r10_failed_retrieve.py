"""R10: a retrieve that fails loses no row and no slot: training goes on with the next call of fit.

Fails if GroupPool.retrieve does not release the slots that it did not fill, if Memory.swap_records puts keys into the
index before their slots are filled, or if _SwapStretch.scatter evicts before it writes.
"""

from dataclasses import replace

import pytest

from nestpipe import World
from tests.exactness.cases import Case, make_trainer
from tests.exactness.test_r06_capacity import batches_of, resident_bytes

CASE = Case("adam", "shared", 2)
SCATTER, GATHER = "_scatter_tables", "gather_tables"


@pytest.mark.parametrize("schedule", ["inter", "nested"])
@pytest.mark.parametrize("method", [SCATTER, GATHER])
@pytest.mark.parametrize("failing", [1, 2, 4])
def test_a_second_fit_goes_on(schedule: str, method: str, failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store fails once. The batch comes again in the second fit, and the result is that of serial."""
    world, stream = World(), "thrash"
    batches = batches_of(stream, world)
    num_bytes = resident_bytes(stream, "minimum", world, schedule)
    trainer = make_trainer(world, replace(CASE, schedule=schedule), resident_bytes=num_bytes)
    trainer.check_split = False
    calls, original = [], getattr(trainer.store, method)

    def fails_once(*arguments):
        calls.append(0)
        if len(calls) == failing:
            raise MemoryError("no memory for this test")
        return original(*arguments)

    monkeypatch.setattr(trainer.store, method, fails_once)
    with pytest.raises(MemoryError, match="no memory for this test"):
        trainer.fit(batches)
    assert trainer.num_steps < len(batches)
    remaining = batches[trainer.num_steps :]
    trainer.fit(remaining)
    expected = make_trainer(world, CASE)
    expected.check_split = False
    expected.fit(batches)
    assert trainer.num_steps == len(batches)
    assert trainer.digest() == expected.digest()
