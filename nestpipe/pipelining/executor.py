"""Plays a schedule: the operations of the compute lane in the caller's thread, the others on lanes of their own."""

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from itertools import groupby

import torch

from nestpipe.device.streams import Mark, Streams, mark, wait_for
from nestpipe.distributed import Lane
from nestpipe.distributed.watch import Watch
from nestpipe.pipelining.light import LightStages
from nestpipe.pipelining.schedule import Name, Op
from nestpipe.pipelining.stage import COMPUTE, STAGES
from nestpipe.pipelining.trace import Trace

Action = Callable[[Op], None]

POLL_SECONDS = 0.1
"""how soon a lane that waits for another notices that it need not"""


class AbandonedError(RuntimeError):
    """An operation was given up because the run has ended."""


class Executor:
    """The caller plays the list up to an operation that is its own, does it, steps over it, and goes on.

    Operations of other lanes are handed over where they stand in the list. So how far those lanes run ahead is bounded
    by the list, and is the same on every rank. A lane of which an operation failed does no later one: they count on it.

    On an accelerator each lane has a stream. There an operation is done when all of it is enqueued; its result is a
    mark, and the stream of an operation that waits for it goes on from there.

    An issuer, if there is one, is the thread of all lanes that issue collectives of device memory; each has its stream.
    Their operations wait for none but the compute lane's, so it does them in the order of the list.
    """

    def __init__(
        self,
        operations: Iterator[Op],
        actions: Mapping[str, Action],
        trace: Trace,
        watch: Watch,
        streams: Streams,
        issuer: Lane | None = None,
        shared_lanes: Mapping[str, str] | None = None,
        light: LightStages | None = None,
    ) -> None:
        """shared_lanes: lanes that have next to nothing to do, and whose thread does it instead. light: finds stages
        that the compute lane does itself, because they are so short; None: there are none."""
        self._operations = operations
        self._actions = actions
        self._trace = trace
        self._watch = watch
        self._head = next(operations)
        self._lanes: dict[str, Lane] = {}
        self._issuer = issuer
        self._shared_lanes = shared_lanes or {}
        self._light = light
        self._last_on_lane: dict[str, Future[Mark]] = {}
        """by thread: the last operation that it was handed"""
        self._device = streams.device
        self._streams = streams
        self._pending: dict[Name, Future[Mark]] = {}
        self._failed: dict[str, BaseException] = {}
        self._is_abandoned = False

    def play_until(self, stage: str) -> Op:
        """Plays what stands before the next operation of this stage, and returns that one: the caller does it."""
        while self._head.stage != stage:
            self._play(self._head)
            self.step_over()
        return self._head

    def play_through(self, stage: str) -> None:
        """Plays everything up to the next operation of this stage, and that one too."""
        self._play(self.play_until(stage))
        self.step_over()

    def step_over(self) -> None:
        """The caller has done the operation that play_until returned."""
        self._head = next(self._operations)

    def wait(self, op: Op) -> None:
        """Until what the operation waits for is done; the time counts for the stage that is late."""
        for stage, names in groupby(op.waits_for, key=lambda name: name[0]):
            found = [self._pending[name] for name in names if name in self._pending]
            late = [pending for pending in found if not _is_over(pending)]
            if not late:
                continue
            with self._trace.span(stage):  # on a device its stream may have to wait, even if this thread has not
                for pending in late:
                    wait_for(self._watch.wait(pending, stage, self._is_remote(stage)))  # raises what it raised
        self._forget_done(op.batch)

    def drain(self) -> None:
        """Waits until every lane has done all it was handed; then raises what one of them raised."""
        errors: list[Exception] = []
        for name, pending in list(self._pending.items()):
            try:
                wait_for(self._watch.wait(pending, name[0], self._is_remote(name[0])))
            except Exception as error:
                errors.append(error)
        self._pending.clear()
        if errors:
            raise errors[0]

    def abandon(self) -> None:
        """Lets the lanes end at once what waits for something else. For a rank alone: others would wait for it."""
        self._is_abandoned = True
        host = [pending for (stage, *_), pending in self._pending.items() if stage in ("retrieve", "write_back")]
        wait(host)
        self._pending.clear()

    def release(self) -> None:
        """Lets the lanes end by themselves, for a world that has failed; waits for none of them."""
        self._is_abandoned = True

    def close(self) -> None:
        """Ends the lanes' threads, those that have done all they were handed; one stuck in a reader ends by itself."""
        for lane in self._lanes.values():
            lane.close(timeout_seconds=0.1 if self._is_abandoned else None)
        self._lanes.clear()

    def _is_remote(self, stage: str) -> bool:
        """Whether a stage may wait for other ranks. With an issuer a lane may wait for its device, which waits for
        them, whatever the stage."""
        return self._watch.size > 1 and (STAGES[stage].needs_ranks or self._issuer is not None)

    def _play(self, op: Op) -> None:
        if op.lane == COMPUTE:
            if op.waits_for:  # else an error of another batch would come up in the middle of an update
                self.wait(op)
            with self._trace.span(op.stage, op.micro_batch):
                self._actions[op.stage](op)
            return
        if self._is_light(op):
            self._do_here(op)
            return
        with self._trace.host_span("other"):
            # What is not pending was done on the compute lane, by this thread, before it came here.
            before = [self._pending[name] for name in op.waits_for if name in self._pending]
            here = mark(self._device) if len(before) < len(op.waits_for) else None
            pending = self._lane(op).submit(lambda: self._run(op, before, here))
            self._pending[op.name] = self._last_on_lane[self._thread_of(op)] = pending

    def _is_light(self, op: Op) -> bool:
        """Whether the compute lane may do an operation of another lane: it is short, its turn on that lane has come,
        and it waits for nothing."""
        if self._light is None or not self._light.is_light(op.stage) or self._is_remote(op.stage):
            return False
        last = self._last_on_lane.get(self._thread_of(op))
        awaited = [self._pending[name] for name in op.waits_for if name in self._pending]
        return all(pending.done() for pending in awaited) and (last is None or last.done())

    def _do_here(self, op: Op) -> None:
        pending: Future[Mark] = Future()
        self._pending[op.name] = pending
        with self._trace.span(op.stage, op.micro_batch), torch.no_grad():
            try:
                self._check_lane(op)
                self._act(op, is_here=True)
                pending.set_result(None)
            except Exception as error:  # raised where a lane's would be: by what waits for it
                self._failed.setdefault(op.lane, error)
                pending.set_exception(error)

    def _check_lane(self, op: Op) -> None:
        """Raises what an earlier operation of the lane raised: this one counts on it."""
        if op.lane in self._failed:
            raise self._failed[op.lane]

    def _act(self, op: Op, is_here: bool) -> None:
        work, began = time.thread_time(), time.perf_counter()
        with self._watch.doing(op.stage, STAGES[op.stage].needs_ranks):
            self._actions[op.stage](op)
        if self._light is not None:
            seconds = time.thread_time() - work, time.perf_counter() - began
            self._light.record(op.stage, *seconds, is_here=is_here)

    def _thread_of(self, op: Op) -> str:
        return self._shared_lanes.get(op.lane, op.lane)

    def _lane(self, op: Op) -> Lane:
        if self._issuer is not None and STAGES[op.stage].exchanges_rows:
            return self._issuer
        name = self._thread_of(op)
        if name not in self._lanes:
            self._lanes[name] = Lane(name)
        return self._lanes[name]

    def _run(self, op: Op, before: list[Future[Mark]], compute: Mark) -> Mark:
        """In the lane's thread."""
        try:
            self._check_lane(op)
            for pending in before:
                while not (pending.done() or self._is_abandoned or wait([pending], POLL_SECONDS).done):
                    pass
            if self._is_abandoned:
                raise AbandonedError(f"{op.stage} of batch {op.batch} was given up")
            with self._streams.of(op.lane):
                for moment in (compute, *(pending.result() for pending in before)):
                    wait_for(moment)
                with self._trace.lane_span(op):
                    self._act(op, is_here=False)
                return mark(self._device)
        except BaseException as error:
            self._failed.setdefault(op.lane, error)
            raise

    def _forget_done(self, batch: int) -> None:
        """Operations of batches before this one, done; raises what one of them raised."""
        done = [name for name, pending in self._pending.items() if name[1] < batch and pending.done()]
        for name in done:
            self._pending.pop(name).result()


def _is_over(pending: Future[Mark]) -> bool:
    """Whether nothing is left to wait for, nor to raise."""
    return pending.done() and not pending.exception() and pending.result() is None
