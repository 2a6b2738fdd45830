"""I12: one host lane takes note of what b - 1 has changed, then retrieves b + 1, which may evict it.

Fails if _on_host puts retrieve before write_back, or if the two are on different lanes. test_i03_versions.py shows the
effect on rows.
"""

from itertools import islice

import pytest

from nestpipe.pipelining.schedule import OVERLAPPING, Op, operations


@pytest.mark.parametrize("schedule", OVERLAPPING)
@pytest.mark.parametrize("num_micro_batches", [1, 4])
def test_order_on_the_host_lane(schedule: str, num_micro_batches: int) -> None:
    ops: list[Op] = list(islice(operations(schedule, num_micro_batches), 400))
    host = [op for op in ops if op.stage in ("retrieve", "write_back")]
    assert {op.lane for op in host} == {"host"}
    names = [(op.stage, op.batch) for op in host]
    expected = [("retrieve", 0), ("retrieve", 1)]
    for batch in range(len(names) // 2):
        expected += [("write_back", batch), ("retrieve", batch + 2)]
    assert names == expected[: len(names)]
