"""Schedules: lists of operations, made by a pure function. An operation has a stage, a lane and a batch.

serial     one lane does everything, batch by batch:

    compute   | prefetch upload route retrieve | begin | send_rows dense return_gradients, the same again ... |
              | reduce commit sum_gradients update | write_back |

inter      stages of consecutive batches overlap; b is the batch in training:

    input     | prefetch b+2             |
    upload    |          upload b+2      |
    route     |              route b+2   |
    host      | write_back b-1, then retrieve b+1 (never the other way round: b+1 may evict what b-1 has changed)
    compute   | send_rows dense return_gradients ... update of b | the same of b+1

intra      rows are frozen inside a batch, so its exchanges overlap its dense part; digits are micro-batches:

    rows      | send_rows 0 | send_rows 1 | send_rows 2 |
    compute   |             | dense 0     | dense 1     | dense 2     |          | reduce commit sum_gradients update
    gradients |                           | return_gradients 0 | return_gradients 1 | return_gradients 2 |

nested     inter, and intra inside each batch; the host lane begins when the first rows have arrived.

nested with exchange across batches: rows that batch b does not change are sent while it trains, and gradients that it
does not need are returned then. b, b+1 and b-1 have their rows resident; digits are micro-batches of b:

    host      |             | retrieve b+1 | write_back b-1 |
    rows      | send_rows 0 | send_rows 1  | send_early_rows b+1 |
    compute   |             | dense 0      | dense 1         |          | reduce commit sum_gradients update
    gradients |             | return_late_gradients b-1 | late_update b-1 | return_gradients 0 | return_gradients 1 |

return_gradients waits for route b+1, which tells which gradients are late. If one thread issues all collectives, all of
its later operations wait for retrieve b+1, too; so send_early_rows comes half-way through the micro-batches instead.

With replicated tables, or several sharding groups, share_sums follows the last return_gradients on its lane, and
sum_gradients waits for it.

A lane does its operations in the order of the list. An operation also waits for those that waits_for names, which stand
before it in the list; so the list can always be played.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

from nestpipe.pipelining.stage import COMPUTE, STAGES

Name = tuple[str, int, int]
"""Stage, batch and micro-batch; -1 stands for the whole batch."""


@dataclass(frozen=True)
class Op:
    stage: str
    lane: str
    batch: int
    micro_batch: int = -1
    waits_for: tuple[Name, ...] = ()

    @property
    def name(self) -> Name:
        return self.stage, self.batch, self.micro_batch


def operations(
    schedule: str,
    num_micro_batches: int,
    steps: int | None = None,
    *,
    cross_batch: bool = False,
    has_issuer: bool = False,
    has_replicas: bool = False,
) -> Iterator[Op]:
    """Yields the operations of an endless run, in the order in which they are issued.

    cross_batch: nested exchanges across batches, too. has_issuer: one thread issues all collectives. has_replicas:
    several ranks have the same rows, and exchange sums of gradients: of replicated tables, or of all of them.

    A run of `steps` steps must not pull more batches than it trains. It needs more than `steps` batches only if some do
    not count as steps. So each further batch is pulled only after the one before it was routed.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule is {schedule!r}, must be one of {', '.join(SCHEDULES)}")
    crosses = cross_batch and schedule in CROSSING
    endless = _across(num_micro_batches, has_issuer) if crosses else _SCHEDULES[schedule].operations(num_micro_batches)
    for op in _with_shares(endless) if has_replicas else endless:
        if op.stage == "prefetch" and steps is not None and op.batch >= max(steps, 1):
            yield replace(op, waits_for=(*op.waits_for, ("route", op.batch - 1, -1)))
        else:
            yield op


def _with_shares(operations: Iterator[Op]) -> Iterator[Op]:
    """Adds share_sums between the gradients' return and their sum. Nothing else waits for it."""
    lane = COMPUTE
    for op in operations:
        if op.stage == "return_gradients":
            lane = op.lane
        if op.stage == "reduce":
            yield Op("share_sums", lane, op.batch)
        shared = ("share_sums", op.batch, -1)
        yield replace(op, waits_for=(*op.waits_for, shared)) if op.stage == "sum_gradients" else op


Window = Callable[[int, int], Iterator[Op]]
"""(batch, number of micro-batches) -> operations from the first send_rows to the last return_gradients."""


def _one_by_one(window: Window, num_micro_batches: int) -> Iterator[Op]:
    for batch in count():
        for stage in ("prefetch", "upload", "route", "retrieve", "begin"):
            yield Op(stage, COMPUTE, batch)
        yield from window(batch, num_micro_batches)
        yield from _apply(batch, num_micro_batches)
        yield Op("write_back", COMPUTE, batch)


def _overlapping(window: Window, num_micro_batches: int) -> Iterator[Op]:
    yield from _admit(0)
    yield _retrieve(0)
    yield from _admit(1)
    for batch in count():
        first, *rest = window(batch, num_micro_batches)
        begin = Op("begin", COMPUTE, batch, waits_for=_stages_before_training(batch))
        # The compute lane waits for the first rows, so work for later batches leaves them the processor and the link.
        # But without overlapping exchanges only dense compute can hide the host store's work, so that starts at once.
        if first.lane == COMPUTE:
            yield from (*_on_host(batch), begin, first)
        else:
            yield from (begin, first, *_on_host(batch, after=(first.name,)))
        yield from _admit(batch + 2, after=(first.name,))
        yield from rest
        yield from _apply(batch, num_micro_batches)


def _across(num_micro_batches: int, has_issuer: bool) -> Iterator[Op]:
    """Yields the operations of nested with exchange across batches."""
    yield from _admit(0)
    yield _retrieve(0)
    yield from _admit(1)
    for batch in count():
        first, *rows = _sends(batch, num_micro_batches)
        # The loop reads the outcome of the step before last at the same batch on all ranks.
        settled = (("write_back", batch - 2, -1),) if batch > 1 else ()
        yield Op("begin", COMPUTE, batch, waits_for=(*_stages_before_training(batch), *settled))
        yield first
        yield _retrieve(batch + 1, after=(first.name,))
        if batch > 0:
            late = ("late_update", batch - 1, -1)
            yield _overlapped("return_late_gradients", batch - 1, waits_for=(first.name,))
            yield _overlapped("late_update", batch - 1, waits_for=(("update", batch - 1, -1),))
            yield _overlapped("write_back", batch - 1, waits_for=(("update", batch - 1, -1), late))
        yield from _admit(batch + 2, after=(first.name,))
        yield from rows
        for i in range(num_micro_batches):
            if i == (num_micro_batches // 2 if has_issuer else 0):
                yield _send_early(batch + 1)
            yield Op("dense", COMPUTE, batch, i, waits_for=(("send_rows", batch, i),))
            yield _overlapped("return_gradients", batch, i, waits_for=(("dense", batch, i), ("route", batch + 1, -1)))
        yield from _apply(batch, num_micro_batches, after=_names(("prefetch", "upload", "route"), batch + 1))


def _send_early(batch: int) -> Op:
    # The batch in training has none of these rows, but the batch before it may: then their gradients were late.
    late = (("late_update", batch - 2, -1),) if batch > 1 else ()
    return _overlapped("send_early_rows", batch, waits_for=(("retrieve", batch, -1), *late))


def _on_host(batch: int, after: tuple[Name, ...] = ()) -> Iterator[Op]:
    """Yields the operations of the host lane while a batch is in training."""
    if batch > 0:
        yield _overlapped("write_back", batch - 1, waits_for=(("update", batch - 1, -1), *after))
    yield _retrieve(batch + 1)


def _admit(batch: int, after: tuple[Name, ...] = ()) -> Iterator[Op]:
    yield _overlapped("prefetch", batch, waits_for=after)
    yield _overlapped("upload", batch, waits_for=(("prefetch", batch, -1),))
    yield _overlapped("route", batch, waits_for=(("upload", batch, -1),))


def _retrieve(batch: int, after: tuple[Name, ...] = ()) -> Op:
    return _overlapped("retrieve", batch, waits_for=(("route", batch, -1), *after))


def _stages_before_training(batch: int) -> tuple[Name, ...]:
    """Returns the stages in their order, so that a wait counts for the stage that is late."""
    return _names(("prefetch", "upload", "route", "retrieve"), batch)


def _names(stages: tuple[str, ...], batch: int) -> tuple[Name, ...]:
    return tuple((stage, batch, -1) for stage in stages)


def _in_turn(batch: int, num_micro_batches: int) -> Iterator[Op]:
    for micro_batch in range(num_micro_batches):
        for stage in ("send_rows", "dense", "return_gradients"):
            yield Op(stage, COMPUTE, batch, micro_batch)


def _during_dense(batch: int, num_micro_batches: int) -> Iterator[Op]:
    yield from _sends(batch, num_micro_batches)
    for i in range(num_micro_batches):
        yield Op("dense", COMPUTE, batch, i, waits_for=(("send_rows", batch, i),))
        yield _overlapped("return_gradients", batch, i, waits_for=(("dense", batch, i),))


def _sends(batch: int, num_micro_batches: int) -> Iterator[Op]:
    """Sends all rows at once, those of the first micro-batch first: a requester has room for all of them anyway."""
    for i in range(num_micro_batches):
        yield _overlapped("send_rows", batch, i, waits_for=(("begin", batch, -1),))


def _apply(batch: int, num_micro_batches: int, after: tuple[Name, ...] = ()) -> Iterator[Op]:
    """Yields the operations from the last gradient returned to the update. after: what returning may have waited for.

    Dense gradients are summed (reduce) before commit, gradients of rows (sum_gradients) after it."""
    returned = tuple(("return_gradients", batch, i) for i in range(num_micro_batches))
    yield Op("reduce", COMPUTE, batch, waits_for=(*after, *returned))
    for stage in ("commit", "sum_gradients", "update"):
        yield Op(stage, COMPUTE, batch)


def _overlapped(stage: str, batch: int, micro_batch: int = -1, waits_for: tuple[Name, ...] = ()) -> Op:
    """Returns an operation on its stage's own lane."""
    return Op(stage, STAGES[stage].lane, batch, micro_batch, waits_for)


@dataclass(frozen=True)
class Schedule:
    """One schedule, as the rest of the package needs to know it."""

    operations: Callable[[int], Iterator[Op]]
    """(number of micro-batches) -> the operations of an endless run."""
    overlaps_batches: bool = False
    """Consecutive batches overlap, and rows stay on the device as long as there is room for them."""
    overlaps_exchanges: bool = False
    """The exchanges of a batch overlap its dense part."""
    alone: str | None = None
    """Schedule to play instead in a world of one, where nothing travels: copying rows would slow down a dense part that
    runs at the same time by more than the copy takes alone."""


_SCHEDULES = {
    "serial": Schedule(partial(_one_by_one, _in_turn)),
    "inter": Schedule(partial(_overlapping, _in_turn), overlaps_batches=True),
    "intra": Schedule(partial(_one_by_one, _during_dense), overlaps_exchanges=True, alone="serial"),
    "nested": Schedule(
        partial(_overlapping, _during_dense), overlaps_batches=True, overlaps_exchanges=True, alone="inter"
    ),
}

SCHEDULES = tuple(_SCHEDULES)
OVERLAPPING = tuple(name for name, schedule in _SCHEDULES.items() if schedule.overlaps_batches)
WINDOWED = tuple(name for name, schedule in _SCHEDULES.items() if schedule.overlaps_exchanges)
CROSSING = ("nested",)
"""Schedules that can exchange across batches."""
WITHOUT_EXCHANGE = {name: schedule.alone for name, schedule in _SCHEDULES.items() if schedule.alone is not None}
LAST_STAGE = dict.fromkeys(SCHEDULES, "write_back") | dict.fromkeys(OVERLAPPING, "update")
"""Last stage that a step waits for, by schedule. Later stages overlap the next step."""
