"""The memory of a long run on a fixed set of keys does not grow. Fails if Stages.write_back keeps finished batches."""

import pytest

from nestpipe import World
from nestpipe.pipelining.schedule import SCHEDULES
from nestpipe.store.process_memory import resident_bytes
from tests.exactness.cases import Case, global_batches, make_trainer

STEPS, SETTLED, MOST_BYTES = 2000, 500, 16 << 20


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_resident_memory(schedule: str) -> None:
    trainer = make_trainer(World(), Case("adam", "shared", 2, schedule=schedule))
    batches = global_batches(50)
    sizes: list[int] = []

    def after_step(result) -> None:
        if trainer.num_steps >= SETTLED:
            sizes.append(resident_bytes())

    trainer.fit((batches[i % 50] for i in range(STEPS)), after_step=after_step)
    assert trainer.num_steps == STEPS
    assert max(sizes) - sizes[0] <= MOST_BYTES
