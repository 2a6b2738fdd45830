"""R9: a table that reaches max_rows fails in the same step in every schedule, whatever is resident or in flight.

Fails if SlotIndex.claim counts stored rows only, or if RowPool.room_error is not asked.
"""

import pytest
import torch

from nestpipe import Batch, Jagged, Pooled, Table, World, init, optim
from nestpipe.data.batch import Batch as DataBatch
from nestpipe.pipelining.pipeline import Pipeline
from nestpipe.pipelining.schedule import OVERLAPPING, SCHEDULES
from tests.exactness.cases import on_ranks
from tests.streams import key_streams, pool_streams

STREAMS = {name: stream for name, stream in (key_streams() | pool_streams()).items() if name != "huge_keys"}


def failing_steps(world: World, schedule: str, resident_bytes: int | str | None) -> dict[str, list[int]]:
    """Returns, for each stream and limit, the number of steps that were applied before a table was full."""
    results: dict[str, list[int]] = {}
    for stream, batch_keys in STREAMS.items():
        num_keys = len(torch.cat(batch_keys).unique())
        for max_rows in {max(1, num_keys // 3), max(1, num_keys - 1), num_keys}:
            table = Table("item", 2, init=init.Constant(0.0), optimizer=optim.SGD(0.1), max_rows=max_rows)
            batches = [own_batch(keys, world) for keys in batch_keys]
            pipeline = Pipeline(
                {"item": Pooled(table)}, batches, world=world, schedule=schedule, resident_bytes=resident_bytes
            )
            try:
                train(pipeline)
            except Exception as error:
                if "would have" not in str(error):
                    raise
            results.setdefault(stream, []).append(pipeline.num_applied)
    return results


def own_batch(keys: torch.Tensor, world: World) -> DataBatch:
    mine = keys[world.rank :: world.size].contiguous()
    return Batch({"item": Jagged.one_each(mine)}, weight=float(len(mine)))


def train(pipeline: Pipeline) -> None:
    with pipeline:
        for step in pipeline:
            for micro_batch in step:
                micro_batch.embeddings["item"].sum().backward()
            step.update_rows()


@pytest.mark.parametrize("size", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_the_same_step_fails(size: int) -> None:
    expected = on_ranks(size, failing_steps, "serial", None)
    assert any(number > 0 for results in expected for numbers in results.values() for number in numbers)
    for schedule in [s for s in SCHEDULES if s != "serial"]:
        for num_bytes in (None, 10**6) if schedule in OVERLAPPING else (None,):
            assert on_ranks(size, failing_steps, schedule, num_bytes) == expected, (schedule, num_bytes)
