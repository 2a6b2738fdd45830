"""What is done, in which order, on which lane: a schedule is a list of operations, made by a pure function.

serial     one lane does everything, batch by batch:

    compute  | prefetch upload route retrieve | bring dense take ... | reduce update | write_back | prefetch ...

inter      five stages of consecutive batches side by side; b is the batch in training:

    input    | prefetch b+2             |
    upload   |          upload b+2      |
    route    |              route b+2   |
    host     | write_back b-1, then retrieve b+1 (never the other way round: b+1 may need what b-1 wrote)
    compute  | bring dense take ... of b, reduce, update, overlap_sync b -> b+1 | the same of b+1

A lane does its operations in the order of the list. An operation also waits for those that waits_for names, which stand
before it in the list; so the list can always be played.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count

SCHEDULES = ("serial", "inter")

OVERLAPPING = ("inter",)
"""those in which consecutive batches overlap, and shared rows stay on the device"""

COMPUTE = "compute"
"""the lane of the caller's thread"""

Name = tuple[str, int, int]
"""Stage, batch and micro-batch (-1: the whole batch)."""


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


def operations(schedule: str, num_micro_batches: int, steps: int | None = None) -> Iterator[Op]:
    """The operations of an endless run, in the order in which they are issued.

    A run of so many `steps` must not pull a batch too many. It needs as many batches, and more only if some of them
    were no steps; so from there on a batch is pulled when those before it have been routed.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule is {schedule!r}, must be one of {', '.join(SCHEDULES)}")
    endless = _inter(num_micro_batches) if schedule == "inter" else _serial(num_micro_batches)
    for op in endless:
        if op.stage == "prefetch" and steps is not None and op.batch >= max(steps, 1):
            yield replace(op, waits_for=(("route", op.batch - 1, -1),))
        else:
            yield op


def _serial(num_micro_batches: int) -> Iterator[Op]:
    for batch in count():
        for stage in ("prefetch", "upload", "route", "retrieve"):
            yield Op(stage, COMPUTE, batch)
        yield from _window(batch, num_micro_batches)
        yield Op("write_back", COMPUTE, batch)


def _inter(num_micro_batches: int) -> Iterator[Op]:
    yield from _bring_in(0)
    yield _retrieve(0)
    yield from _bring_in(1)
    for batch in count():
        yield _retrieve(batch + 1)
        yield from _bring_in(batch + 2)
        yield from _window(batch, num_micro_batches, waits_for=_stages_before_training(batch))
        yield Op("overlap_sync", COMPUTE, batch, waits_for=_stages_before_training(batch + 1))
        yield Op("write_back", "host", batch, waits_for=(("overlap_sync", batch, -1),))


def _bring_in(batch: int) -> Iterator[Op]:
    yield Op("prefetch", "input", batch)
    yield Op("upload", "upload", batch, waits_for=(("prefetch", batch, -1),))
    yield Op("route", "route", batch, waits_for=(("upload", batch, -1),))


def _retrieve(batch: int) -> Op:
    return Op("retrieve", "host", batch, waits_for=(("route", batch, -1),))


def _stages_before_training(batch: int) -> tuple[Name, ...]:
    """In their order, so that a wait counts for the stage that is late."""
    return tuple((stage, batch, -1) for stage in ("prefetch", "upload", "route", "retrieve"))


def _window(batch: int, num_micro_batches: int, waits_for: tuple[Name, ...] = ()) -> Iterator[Op]:
    """Training of one batch on the compute lane: rows are frozen from the first bring to the last take."""
    yield Op("begin", COMPUTE, batch, waits_for=waits_for)
    for micro_batch in range(num_micro_batches):
        for stage in ("bring", "dense", "take"):
            yield Op(stage, COMPUTE, batch, micro_batch)
    for stage in ("reduce", "update"):
        yield Op(stage, COMPUTE, batch)
