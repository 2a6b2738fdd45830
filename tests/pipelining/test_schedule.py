"""Schedules, drawn here by hand and compared with the result of `operations`.

Fails if an operation comes earlier or later, on another lane, or with other dependencies.
"""

from itertools import islice

import pytest

from nestpipe.pipelining.schedule import CROSSING, SCHEDULES, Op, operations
from nestpipe.pipelining.stage import COMPUTE

SERIAL = """
compute   prefetch 0
compute   upload 0
compute   route 0
compute   retrieve 0
compute   begin 0
compute   send_rows 0.0
compute   dense 0.0
compute   return_gradients 0.0
compute   send_rows 0.1
compute   dense 0.1
compute   return_gradients 0.1
compute   reduce 0               after return_gradients 0.0, return_gradients 0.1
compute   commit 0
compute   sum_gradients 0
compute   update 0
compute   write_back 0
compute   prefetch 1
"""

INTER = """
input     prefetch 0
upload    upload 0               after prefetch 0
route     route 0                after upload 0
host      retrieve 0             after route 0
input     prefetch 1
upload    upload 1               after prefetch 1
route     route 1                after upload 1
host      retrieve 1             after route 1
compute   begin 0                after prefetch 0, upload 0, route 0, retrieve 0
compute   send_rows 0.0
input     prefetch 2             after send_rows 0.0
upload    upload 2               after prefetch 2
route     route 2                after upload 2
compute   dense 0.0
compute   return_gradients 0.0
compute   send_rows 0.1
compute   dense 0.1
compute   return_gradients 0.1
compute   reduce 0               after return_gradients 0.0, return_gradients 0.1
compute   commit 0
compute   sum_gradients 0
compute   update 0
host      write_back 0           after update 0
host      retrieve 2             after route 2
compute   begin 1                after prefetch 1, upload 1, route 1, retrieve 1
compute   send_rows 1.0
input     prefetch 3             after send_rows 1.0
upload    upload 3               after prefetch 3
route     route 3                after upload 3
"""

INTRA = """
compute   prefetch 0
compute   upload 0
compute   route 0
compute   retrieve 0
compute   begin 0
rows      send_rows 0.0          after begin 0
rows      send_rows 0.1          after begin 0
rows      send_rows 0.2          after begin 0
compute   dense 0.0              after send_rows 0.0
gradients return_gradients 0.0   after dense 0.0
compute   dense 0.1              after send_rows 0.1
gradients return_gradients 0.1   after dense 0.1
compute   dense 0.2              after send_rows 0.2
gradients return_gradients 0.2   after dense 0.2
compute   reduce 0               after return_gradients 0.0, return_gradients 0.1, return_gradients 0.2
compute   commit 0
compute   sum_gradients 0
compute   update 0
compute   write_back 0
compute   prefetch 1
"""

NESTED = """
input     prefetch 0
upload    upload 0               after prefetch 0
route     route 0                after upload 0
host      retrieve 0             after route 0
input     prefetch 1
upload    upload 1               after prefetch 1
route     route 1                after upload 1
compute   begin 0                after prefetch 0, upload 0, route 0, retrieve 0
rows      send_rows 0.0          after begin 0
host      retrieve 1             after route 1
input     prefetch 2             after send_rows 0.0
upload    upload 2               after prefetch 2
route     route 2                after upload 2
rows      send_rows 0.1          after begin 0
compute   dense 0.0              after send_rows 0.0
gradients return_gradients 0.0   after dense 0.0
compute   dense 0.1              after send_rows 0.1
gradients return_gradients 0.1   after dense 0.1
compute   reduce 0               after return_gradients 0.0, return_gradients 0.1
compute   commit 0
compute   sum_gradients 0
compute   update 0
compute   begin 1                after prefetch 1, upload 1, route 1, retrieve 1
rows      send_rows 1.0          after begin 1
host      write_back 0           after update 0, send_rows 1.0
host      retrieve 2             after route 2
input     prefetch 3             after send_rows 1.0
upload    upload 3               after prefetch 3
route     route 3                after upload 3
"""

ACROSS = """
input     prefetch 0
upload    upload 0               after prefetch 0
route     route 0                after upload 0
host      retrieve 0             after route 0
input     prefetch 1
upload    upload 1               after prefetch 1
route     route 1                after upload 1
compute   begin 0                after prefetch 0, upload 0, route 0, retrieve 0
rows      send_rows 0.0          after begin 0
host      retrieve 1             after route 1, send_rows 0.0
input     prefetch 2             after send_rows 0.0
upload    upload 2               after prefetch 2
route     route 2                after upload 2
rows      send_rows 0.1          after begin 0
rows      send_early_rows 1      after retrieve 1
compute   dense 0.0              after send_rows 0.0
gradients return_gradients 0.0   after dense 0.0, route 1
compute   dense 0.1              after send_rows 0.1
gradients return_gradients 0.1   after dense 0.1, route 1
compute   reduce 0               after prefetch 1, upload 1, route 1, return_gradients 0.0, return_gradients 0.1
compute   commit 0
compute   sum_gradients 0
compute   update 0
compute   begin 1                after prefetch 1, upload 1, route 1, retrieve 1
rows      send_rows 1.0          after begin 1
host      retrieve 2             after route 2, send_rows 1.0
gradients return_late_gradients 0 after send_rows 1.0
gradients late_update 0          after update 0
host      write_back 0           after update 0, late_update 0
input     prefetch 3             after send_rows 1.0
upload    upload 3               after prefetch 3
route     route 3                after upload 3
rows      send_rows 1.1          after begin 1
rows      send_early_rows 2      after retrieve 2, late_update 0
compute   dense 1.0              after send_rows 1.0
gradients return_gradients 1.0   after dense 1.0, route 2
compute   dense 1.1              after send_rows 1.1
gradients return_gradients 1.1   after dense 1.1, route 2
compute   reduce 1               after prefetch 2, upload 2, route 2, return_gradients 1.0, return_gradients 1.1
compute   commit 1
compute   sum_gradients 1
compute   update 1
compute   begin 2                after prefetch 2, upload 2, route 2, retrieve 2, write_back 0
rows      send_rows 2.0          after begin 2
"""
"""nested with exchange across batches."""


def drawn(op: Op) -> str:
    def name(stage: str, batch: int, micro_batch: int) -> str:
        return f"{stage} {batch}" if micro_batch < 0 else f"{stage} {batch}.{micro_batch}"

    what = name(*op.name)
    after = f"after {', '.join(name(*waited) for waited in op.waits_for)}" if op.waits_for else ""
    return f"{op.lane:<9} {what:<22} {after}".rstrip()


TABLES = [("serial", 2, SERIAL), ("inter", 2, INTER), ("intra", 3, INTRA), ("nested", 2, NESTED)]


@pytest.mark.parametrize(("schedule", "num_micro_batches", "table"), TABLES)
def test_drawn_by_hand(schedule: str, num_micro_batches: int, table: str) -> None:
    lines = table.strip().splitlines()
    assert [drawn(op) for op in islice(operations(schedule, num_micro_batches), len(lines))] == lines


def test_across_batches_drawn_by_hand() -> None:
    lines = ACROSS.strip().splitlines()
    crossing = operations("nested", 2, cross_batch=True)
    assert [drawn(op) for op in islice(crossing, len(lines))] == lines
    for schedule in set(SCHEDULES) - set(CROSSING):  # the others have nothing to cross
        plain = islice(operations(schedule, 2), 60)
        assert list(islice(operations(schedule, 2, cross_batch=True), 60)) == list(plain)


def test_replicated_tables() -> None:
    """Sums are shared on the lane of the gradients, after all of them; what follows waits for nothing else. Fails if
    _with_shares lets nothing wait, or shares on another lane."""
    for schedule, lane in [("serial", COMPUTE), ("inter", COMPUTE), ("intra", "gradients"), ("nested", "gradients")]:
        ops = list(islice(operations(schedule, 2, cross_batch=True, has_replicas=True), 100))
        plain = [op for op in ops if op.stage not in ("share_sums", "sum_gradients")]
        without = islice(operations(schedule, 2, cross_batch=True), 100)
        assert plain == [op for op in without if op.stage != "sum_gradients"][: len(plain)]
        names = [op.name for op in ops]
        for op in ops:
            if op.stage == "share_sums":
                assert op == Op("share_sums", lane, op.batch)
                assert names[names.index(op.name) - 1][:2] == ("return_gradients", op.batch)
            if op.stage == "sum_gradients":
                assert op.waits_for == (("share_sums", op.batch, -1),)


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_an_issuer_sends_early_rows_half_way(num_micro_batches: int) -> None:
    """It waits for their retrieve, which must not delay gradients that could be returned. Fails if _across ignores
    has_issuer."""
    ops = [op.name for op in islice(operations("nested", num_micro_batches, cross_batch=True, has_issuer=True), 300)]
    for t in range(2, 4):
        assert ops[ops.index(("send_early_rows", t + 1, -1)) + 1] == ("dense", t, num_micro_batches // 2)
        assert ops.index(("return_late_gradients", t - 1, -1)) < ops.index(("dense", t, 0))


@pytest.mark.parametrize("schedule", [*SCHEDULES, "across"])
@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_can_be_played(schedule: str, num_micro_batches: int) -> None:
    """Dependencies of an operation stand before it, and every operation of a batch occurs once."""
    seen = set()
    options = {"cross_batch": True} if schedule == "across" else {}
    for op in islice(operations("nested" if options else schedule, num_micro_batches, **options), 300):
        assert set(op.waits_for) <= seen
        assert op.name not in seen
        seen.add(op.name)
    stages = {stage for stage, batch, _ in seen if batch == 3}
    assert stages >= {
        "prefetch",
        "upload",
        "route",
        "retrieve",
        "send_rows",
        "dense",
        "return_gradients",
        "reduce",
        "commit",
        "sum_gradients",
        "update",
        "write_back",
    }


def test_batches_beyond_the_steps_are_pulled_only_after_route() -> None:
    pulls = [op for op in islice(operations("inter", 1, steps=3), 100) if op.stage == "prefetch"]
    assert [op.waits_for for op in pulls[:5]] == [
        (),
        (),
        (("send_rows", 0, 0),),
        (("send_rows", 1, 0), ("route", 2, -1)),
        (("send_rows", 2, 0), ("route", 3, -1)),
    ]


def test_unknown() -> None:
    with pytest.raises(ValueError, match="schedule is 'intern', must be one of"):
        next(operations("intern", 1))


def test_serial_has_one_lane() -> None:
    assert {op.lane for op in islice(operations("serial", 2), 100)} == {COMPUTE}
