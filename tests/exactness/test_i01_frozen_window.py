"""I1: no row changes inside a frozen window, from the first row read to the last gradient return.

Fails if Window.take adds the returned gradients to the buffer's rows instead of to the slots.
"""

import hashlib

import pytest

from nestpipe import World
from nestpipe.pipelining.pipeline import SCHEDULES, Step
from tests.exactness.cases import Case, SmallModel, features_of, global_batches, make_pipeline, on_ranks, share_of


def hash_of(step: Step) -> str:
    sha = hashlib.sha256()
    for buffer in step.buffers:
        sha.update(buffer.records.numpy().tobytes())
    return sha.hexdigest()


def hashes(world: World, schedule: str, window: str) -> list[tuple[set[str], str]]:
    """For each step: the hashes seen while its window was open, and the one after its update."""
    case = Case("adagrad", "shared", 4, window, steps=5, schedule=schedule)
    model = SmallModel({name: feature.table.dim for name, feature in features_of(case).items()})
    seen = []
    with make_pipeline(world, case, share_of(global_batches(case.steps), world)) as pipeline:
        for step in pipeline:
            inside = {hash_of(step)}
            for micro_batch in step:
                inside.add(hash_of(step))
                (model(micro_batch.embeddings, micro_batch.inputs) / step.weight).backward()
                inside.add(hash_of(step))
            inside.add(hash_of(step))
            step.update_rows()
            seen.append((inside, hash_of(step)))
    return seen


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("window", ["once", "resend"])
@pytest.mark.parametrize("size", [1, 3])
def test_rows_are_frozen(schedule: str, window: str, size: int) -> None:
    for of_rank in on_ranks(size, hashes, schedule, window):
        assert len(of_rank) == 5
        for inside, after in of_rank:
            assert len(inside) == 1
            assert after not in inside
