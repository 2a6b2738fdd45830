"""Plays a schedule: operations of the compute lane run in the caller's thread, the others on their own lanes."""

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
from nestpipe.pipelining.turns import NoTurns, Turns

Action = Callable[[Op], None]

POLL_SECONDS = 0.1
"""Interval at which a lane that waits for another checks whether the run has ended."""


class AbandonedError(RuntimeError):
    """An operation was given up because the run has ended."""


class Executor:
    """Plays a list of operations. The caller plays it up to one that it does itself, does that, and steps over it.

    Operations of other lanes are submitted where they stand in the list. So the list bounds how far those lanes run
    ahead, in the same way on every rank. After an operation fails, its lane does none of the later ones, which depend
    on it.

    On an accelerator each lane has a stream. An operation is done when all its work is enqueued. Its result is a mark,
    and the stream of an operation that depends on it waits for the mark.

    The issuer, if there is one, is the thread of all lanes that issue collectives of device memory; each lane keeps
    its own stream. It does their operations in the order of the list, so one that waits for another lane, as early
    rows do for retrieve, holds up those behind it.
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
        turns: Turns | None = None,
    ) -> None:
        """shared_lanes: lanes with little work, and the lane whose thread does it for each. light: finds short stages,
        which the compute lane does itself; None if it does none. turns: at Python's lock; None if lanes take none."""
        self._operations = operations
        self._actions = actions
        self._trace = trace
        self._watch = watch
        self._head = next(operations)
        self._lanes: dict[str, Lane] = {}
        self._issuer = issuer
        self._shared_lanes = shared_lanes or {}
        self._light = light
        self.turns = turns or NoTurns()
        self._last_on_lane: dict[str, Future[Mark]] = {}
        """Last operation submitted to each thread."""
        self._device = streams.device
        self._streams = streams
        self._pending: dict[Name, Future[Mark]] = {}
        self._failed: dict[str, BaseException] = {}
        self._is_abandoned = False

    def play_until(self, stage: str) -> Op:
        """Plays the operations before the next one of this stage, and returns that one for the caller to do."""
        while self._head.stage != stage:
            self._play(self._head)
            self.step_over()
        return self._head

    def play_through(self, stage: str) -> None:
        """Plays the operations up to and including the next one of this stage."""
        self._play(self.play_until(stage))
        self.step_over()

    def step_over(self) -> None:
        """Moves on after the operation that play_until returned. Call it when that one is done."""
        self._head = next(self._operations)

    def wait(self, op: Op) -> None:
        """Waits for the dependencies of an operation. The time counts for the stage that is late."""
        for stage, names in groupby(op.waits_for, key=lambda name: name[0]):
            awaited = [self._pending[name] for name in names if name in self._pending]
            late = [pending for pending in awaited if not _is_over(pending)]
            if not late:
                continue
            with self._trace.span(stage):  # on a device its stream may have to wait, even if this thread has not
                for pending in late:
                    # Raises the operation's error, if it failed.
                    with self.turns.free():
                        moment = self._watch.wait(pending, stage, self._is_remote(stage))
                    wait_for(moment)
        self._forget_done(op.batch)

    def drain(self) -> None:
        """Waits until every lane has done its work; then raises the first error of a lane, if any."""
        errors: list[Exception] = []
        for name, pending in list(self._pending.items()):
            try:
                with self.turns.free():
                    moment = self._watch.wait(pending, name[0], self._is_remote(name[0]))
                wait_for(moment)
            except Exception as error:
                errors.append(error)
        self._pending.clear()
        if errors:
            raise errors[0]

    def abandon(self) -> None:
        """Gives up all operations that wait for others. Only for a world of one: other ranks would wait for them."""
        self._is_abandoned = True
        host = [pending for (stage, *_), pending in self._pending.items() if stage in ("retrieve", "write_back")]
        wait(host)
        self._pending.clear()

    def release(self) -> None:
        """Lets the lanes end by themselves, without waiting for them. For a world that has failed."""
        self._is_abandoned = True

    def close(self) -> None:
        """Ends the lanes' threads. After `abandon`, a thread that is stuck in a reader is left to end by itself."""
        for lane in self._lanes.values():
            lane.close(timeout_seconds=0.1 if self._is_abandoned else None)
        self._lanes.clear()

    def _is_remote(self, stage: str) -> bool:
        """Returns whether a stage may wait for other ranks. With an issuer any stage may: it may wait for the device,
        which waits for other ranks."""
        return self._watch.size > 1 and (STAGES[stage].needs_ranks or self._issuer is not None)

    def _play(self, op: Op) -> None:
        if op.lane == COMPUTE:
            if op.waits_for:  # waiting could raise another batch's error in the middle of an update
                self.wait(op)
            with self._trace.passing_span(op.stage, op.micro_batch):
                self._actions[op.stage](op)
            return
        if self._is_light(op):
            self._do_inline(op)
            return
        with self._trace.host_span("other"):
            # Dependencies that are not pending were done by this thread, on the compute lane.
            awaited = [self._pending[name] for name in op.waits_for if name in self._pending]
            moment = mark(self._device) if len(awaited) < len(op.waits_for) else None
            pending = self._lane(op).submit(lambda: self._run(op, awaited, moment))
            self._pending[op.name] = self._last_on_lane[self._thread_of(op)] = pending

    def _is_light(self, op: Op) -> bool:
        """Returns whether the compute lane may do an operation of another lane: it is short, it is next on that lane,
        and it waits for nothing."""
        if self._light is None or not self._light.is_light(op.stage) or self._is_remote(op.stage):
            return False
        last = self._last_on_lane.get(self._thread_of(op))
        awaited = [self._pending[name] for name in op.waits_for if name in self._pending]
        return all(pending.done() for pending in awaited) and (last is None or last.done())

    def _do_inline(self, op: Op) -> None:
        """Does an operation of another lane in the caller's thread."""
        pending: Future[Mark] = Future()
        self._pending[op.name] = pending
        with self._trace.span(op.stage, op.micro_batch), torch.no_grad():
            try:
                self._check_lane(op)
                self._act(op, is_inline=True)
                pending.set_result(None)
            except Exception as error:  # raised by operations that wait for it, like an error of a lane
                self._failed.setdefault(op.lane, error)
                pending.set_exception(error)

    def _check_lane(self, op: Op) -> None:
        """Raises the error of an earlier operation of the lane, on which this one depends."""
        if op.lane in self._failed:
            raise self._failed[op.lane]

    def _act(self, op: Op, is_inline: bool) -> None:
        began = self._trace.work.begin()
        with self._watch.doing(op.stage, STAGES[op.stage].needs_ranks):
            self._actions[op.stage](op)
        seconds = self._trace.work.end(op.stage, op.batch, began)
        if self._light is not None:
            self._light.record(op.stage, *seconds, is_inline=is_inline)

    def _thread_of(self, op: Op) -> str:
        return self._shared_lanes.get(op.lane, op.lane)

    def _lane(self, op: Op) -> Lane:
        if self._issuer is not None and STAGES[op.stage].exchanges_rows:
            return self._issuer
        name = self._thread_of(op)
        if name not in self._lanes:
            self._lanes[name] = Lane(name)
        return self._lanes[name]

    def _run(self, op: Op, awaited: list[Future[Mark]], compute: Mark) -> Mark:
        """Does an operation in its lane's thread. compute: mark in the compute lane's stream to wait for, if any."""
        try:
            self._check_lane(op)
            for pending in awaited:
                while not (pending.done() or self._is_abandoned or wait([pending], POLL_SECONDS).done):
                    pass
            if self._is_abandoned:
                raise AbandonedError(f"{op.stage} of batch {op.batch} was given up")
            if STAGES[op.stage].takes_turns:
                self.turns.wait()
            with self._streams.on_lane(op.lane):
                for moment in (compute, *(pending.result() for pending in awaited)):
                    wait_for(moment)
                with self._trace.lane_span(op):
                    self._act(op, is_inline=False)
                return mark(self._device)
        except BaseException as error:
            self._failed.setdefault(op.lane, error)
            raise

    def _forget_done(self, batch: int) -> None:
        """Forgets finished operations of batches that nothing waits for; raises the error of one that failed."""
        done = [name for name, pending in self._pending.items() if name[1] < batch - 1 and pending.done()]
        for name in done:
            self._pending.pop(name).result()


def _is_over(pending: Future[Mark]) -> bool:
    """Returns whether nothing is left to wait for or to raise."""
    return pending.done() and not pending.exception() and pending.result() is None
