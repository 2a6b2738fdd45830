"""I15: the rows of a micro-batch have their own memory, which nothing else reads or writes.

Fails if Requester.gather uses `self._kept` itself as the rows of a micro-batch that uses all of them, or if
LocalBatch._gather returns `resident.frozen_rows` if `places` is None.
"""

import pytest

from nestpipe import Batch, World
from tests.exactness.cases import Case, SmallModel, features_of, global_batches, make_pipeline, on_ranks, share_of
from tests.schedules import OUTER

WAYS = [(2, "once"), (1, "once"), pytest.param((2, "resend"), marks=pytest.mark.slow)]


def batches_of(steps: int) -> list[Batch]:
    """Returns batches of which every second one repeats a single sample, so that each micro-batch uses all rows."""
    batches = global_batches(steps)
    for number in range(1, steps, 2):
        fullest = batches[number].keys["items"].lengths.argmax()
        batches[number] = batches[number][fullest.expand(len(batches[number]))]
    return batches


def spoil_rows(world: World, schedule: str, way: tuple[int, str], spoil: bool) -> list[str]:
    """Trains a model that overwrites its rows after backward, if told so. Returns the stored rows as text."""
    num_micro_batches, window = way
    case = Case("sgd", "shared", num_micro_batches, window, steps=4, schedule=schedule)
    model = SmallModel({name: feature.table.dim for name, feature in features_of(case).items()})
    with make_pipeline(world, case, share_of(batches_of(case.steps), world)) as pipeline:
        for step in pipeline:
            for micro_batch in step:
                (model(micro_batch.embeddings, micro_batch.inputs) / step.weight).backward()
                if spoil:
                    for rows in micro_batch.rows:
                        rows.data.fill_(1e6)
            step.update_rows()
    piece = pipeline.store.export_piece("item", 0, 65536)
    return [str(row) for row in piece.records.tolist()]


@pytest.mark.parametrize("schedule", OUTER)
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("size", [1, 2])
def test_rows_have_their_own_memory(schedule: str, size: int, way: tuple[int, str]) -> None:
    assert on_ranks(size, spoil_rows, schedule, way, True) == on_ranks(size, spoil_rows, "serial", way, False)
