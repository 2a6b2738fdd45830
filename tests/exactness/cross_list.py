"""The list of operations of schedule nested with an exchange across batches, for its model; t is the batch in training.

    compute   | begin t      | dense t 0                        dense t 1 | reduce commit sum_gradients update
    rows      |  send_rows t 0, send_rows t 1 | send_early_rows t+1
    gradients |   return_late_gradients t-1, late_update t-1 | return_gradients t 0 | return_gradients t 1
    host      |                | retrieve t+1, write_back t-1
    route     |                | route t+2

A lane does its operations in the order of the list, and an issuing thread those of rows and gradients. An operation
also waits for those that it names, which stand before it.

Two waits are implied by others, and kept because each shows what its operation needs: that of send_early_rows(t+1) for
update(t-1), by send_rows(t), begin(t) and the compute lane; and that of write_back(t-1) for late_update(t-1), as far as
victims go, because retrieve(t+2) waits for send_rows(t+1), which comes after send_early_rows(t+1).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

Name = tuple[str, int, int]
"""Stage, batch and micro-batch; -1 stands for the whole batch."""


@dataclass(frozen=True)
class CrossOp:
    stage: str
    lane: str
    batch: int
    micro_batch: int
    waits_for: tuple[Name, ...] = ()

    @property
    def name(self) -> Name:
        return self.stage, self.batch, self.micro_batch


def operations(num_micro_batches: int, is_early_first: bool, broken: str | None) -> Iterator[CrossOp]:
    """Yields the operations of an endless run. is_early_first: early rows stand before the first dense, as without an
    issuing thread, not before the last one, as with it."""
    yield CrossOp("route", "route", 0, -1)
    yield CrossOp("retrieve", "host", 0, -1, _whole("route", 0))
    yield CrossOp("route", "route", 1, -1)
    for t in count():
        first = (("send_rows", t, 0),)
        settled = _whole("write_back", t - 2) if t > 1 and broken != "outcomes_are_awaited_by_chance" else ()
        yield CrossOp("begin", "compute", t, -1, _whole("route", t) + _whole("retrieve", t) + settled)
        yield CrossOp("send_rows", "rows", t, 0, _whole("begin", t))
        skips_late_update = broken == "host_lane_skips_late_update"
        yield CrossOp("retrieve", "host", t + 1, -1, _whole("route", t + 1) + (() if skips_late_update else first))
        yield CrossOp("route", "route", t + 2, -1, first)
        if t > 0:
            yield from late_operations(t - 1, broken)
            late = () if skips_late_update else _whole("late_update", t - 1)
            yield CrossOp("write_back", "host", t - 1, -1, _whole("update", t - 1) + late)
        yield from _window(t, num_micro_batches, is_early_first, broken)
        returned = tuple(("return_gradients", t, i) for i in range(num_micro_batches))
        yield CrossOp("reduce", "compute", t, -1, returned)
        for stage in ("commit", "sum_gradients", "update"):
            yield CrossOp(stage, "compute", t, -1)


def late_operations(batch: int, broken: str | None) -> Iterator[CrossOp]:
    """Yields what is late of a batch. A flush and the end of a fit play it at once."""
    yield CrossOp("return_late_gradients", "gradients", batch, -1, _whole("route", batch + 1))
    updated = () if broken == "late_update_skips_update" else _whole("update", batch)
    yield CrossOp("late_update", "gradients", batch, -1, updated)


def _window(t: int, num_micro_batches: int, is_early_first: bool, broken: str | None) -> Iterator[CrossOp]:
    """Yields the operations from the second send_rows to the last return_gradients."""
    for i in range(1, num_micro_batches):
        yield CrossOp("send_rows", "rows", t, i, _whole("begin", t))
    early_after = _whole("retrieve", t + 1)
    if broken == "early_skips_retrieve":
        early_after = ()
    if t > 0 and broken != "early_skips_late_update":
        early_after += _whole("update", t - 1) + _whole("late_update", t - 1)
    early = CrossOp("send_early_rows", "rows", t + 1, -1, early_after)
    for i in range(num_micro_batches):
        if i == (0 if is_early_first else num_micro_batches - 1):
            yield early
        yield CrossOp("dense", "compute", t, i, (("send_rows", t, i),))
        routed = () if broken == "return_skips_route" else _whole("route", t + 1)
        yield CrossOp("return_gradients", "gradients", t, i, (("dense", t, i), *routed))


def _whole(stage: str, batch: int) -> tuple[Name, ...]:
    return ((stage, batch, -1),)
