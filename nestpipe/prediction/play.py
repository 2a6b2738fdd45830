"""Plays a list of operations on many workers at once, by the executor's rules.

A lane does its operations in the order of the list. An operation starts when its lane is free, the operations that it
waits for are done, and the compute lane, which hands operations over, has come to its place in the list. Times are
arrays with a number for each worker. A collective begins when the last worker has come to it, and ends for all at once.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from nestpipe.pipelining.schedule import Name, Op
from nestpipe.pipelining.stage import COMPUTE, STAGES
from nestpipe.pipelining.trace import Span
from nestpipe.prediction.link import Link
from nestpipe.prediction.work import Cost, Jitter, Times, Work


@dataclass
class Played:
    """What happened. Times are in milliseconds since the beginning."""

    starts: list[Times] = field(default_factory=list)
    """When each step began, and when the step after the last one would have begun."""
    stages: list[dict[str, Times]] = field(default_factory=list)
    """Time of each stage on the compute lane, waits for it included, by step."""
    busy: dict[tuple[str, int], Times] = field(default_factory=lambda: defaultdict(lambda: np.zeros(1)))
    """Time of work on each lane, by lane and batch. A wait for other workers is no work."""
    spans: dict[int, list[Span]] = field(default_factory=dict)
    """Spans of the workers that are traced."""


@dataclass
class _Node:
    """An operation, and what must end before it."""

    op: Op
    after: list[int]
    """Numbers of operations that must end before it starts."""
    awaited: list[tuple[str, list[int]]]
    """Those that the compute lane waits for, by stage, in the order of the waits."""
    followers: list[int] = field(default_factory=list)
    num_missing: int = 0


def play(
    operations: Iterator[Op],
    cost: Cost,
    steps: int,
    num_workers: int,
    jitter: Jitter | None = None,
    shared_lanes: Mapping[str, str] | None = None,
    traced: range = range(0),
    has_issuer: bool = False,
) -> Played:
    """Plays `steps` steps of an endless list. shared_lanes: lanes, and the lane whose thread does their work. traced:
    workers whose spans are kept. has_issuer: one thread issues all exchanges of rows."""
    nodes = _nodes(_first_steps(operations, steps), shared_lanes or {}, has_issuer)
    player = _Player(nodes, cost, num_workers, jitter, traced)
    player.play()
    return player.played


def _first_steps(operations: Iterator[Op], steps: int) -> Iterator[Op]:
    """Yields operations up to the first one of the compute lane that belongs to step `steps`, included."""
    for op in operations:
        yield op
        if op.lane == COMPUTE and op.batch >= steps:
            return


def _nodes(operations: Iterator[Op], shared_lanes: Mapping[str, str], has_issuer: bool) -> list[_Node]:
    issuer = _Issuer()
    nodes: list[_Node] = []
    by_name: dict[Name, int] = {}
    last_on_thread: dict[str, int] = {}
    for number, op in enumerate(operations):
        thread = shared_lanes.get(op.lane, op.lane)
        awaited = [
            (stage, [by_name[name] for name in names]) for stage, names in groupby(op.waits_for, lambda name: name[0])
        ]
        before = [last_on_thread[lane] for lane in dict.fromkeys((thread, COMPUTE)) if lane in last_on_thread]
        if has_issuer and STAGES[op.stage].exchanges_rows:
            before += issuer.waits_before(op, by_name)
        after = list(dict.fromkeys([*before, *(waited for _, group in awaited for waited in group)]))
        nodes.append(_Node(op, after, awaited, num_missing=len(after)))
        for other in after:
            nodes[other].followers.append(number)
        by_name[op.name] = last_on_thread[thread] = number
    return nodes


class _Issuer:
    """The thread that issues all exchanges of rows, in the order of the list. On a device, exchanges take place in the
    streams of their lanes. But what one of them waits for on the host holds up all that are issued later."""

    def __init__(self) -> None:
        self._waited_for: dict[str, int] = {}
        """By lane of the host: the last of its operations that the thread has waited for."""

    def waits_before(self, op: Op, numbers: Mapping[Name, int]) -> list[int]:
        """Returns what the thread has waited for on the host until it issues an operation, by number."""
        for name in op.waits_for:
            stage = STAGES[name[0]]
            if stage.lane != COMPUTE and not stage.exchanges_rows:
                self._waited_for[stage.lane] = max(numbers[name], self._waited_for.get(stage.lane, 0))
        return list(self._waited_for.values())


class _Player:
    def __init__(self, nodes: list[_Node], cost: Cost, num_workers: int, jitter: Jitter | None, traced: range) -> None:
        self._nodes = nodes
        self._cost = cost
        self._num_workers = num_workers
        self._jitter = None if jitter is None or jitter.is_none else jitter
        self._link = Link()
        self._begins: dict[int, Times] = {}
        self._ends: dict[int, Times] = {}
        self._num_unread = [len(node.followers) for node in nodes]
        self._ready: deque[int] = deque(n for n, node in enumerate(nodes) if node.num_missing == 0)
        self._traced = traced
        self.played = Played(spans={worker: [] for worker in traced})

    def play(self) -> None:
        """Does operations as soon as all before them are done. When only collectives are left, the link goes on."""
        while self._ready or self._link.is_busy:
            while self._ready:
                self._start(self._ready.popleft())
            if self._link.is_busy:
                number, end_ms = self._link.next_end()
                self._end_collective(number, end_ms)

    def _start(self, number: int) -> None:
        node = self._nodes[number]
        begin = self._begin(node)
        work = self._cost(node.op)
        local = self._local(node.op, work)
        if not work.is_collective:
            self._end(number, begin, begin + local, local)
            return
        self._begins[number] = begin
        arrived = float((begin + local).max())
        self._link.add(number, arrived + work.latency_ms, work.transfer_ms)

    def _begin(self, node: _Node) -> Times:
        """Returns when an operation starts. On the compute lane, waits count for the stage that is late."""
        if node.op.lane != COMPUTE:
            return self._latest(node.after)
        own = [n for n in node.after if self._nodes[n].op.lane == COMPUTE]
        now = self._latest(own)
        self._enter(node.op.batch, now)
        for stage, numbers in node.awaited:
            then = np.maximum(now, self._latest(numbers))
            if (then > now).any():
                self._count(stage, then - now)
                batch, micro_batch = node.op.batch, node.op.micro_batch
                self._trace(Op(stage, COMPUTE, batch, micro_batch), now, then)
            now = then
        return now

    def _end_collective(self, number: int, end_ms: float) -> None:
        node, begin = self._nodes[number], self._begins.pop(number)
        work = self._cost(node.op)
        worked = self._local(node.op, work) + work.latency_ms + work.transfer_ms
        self._end(number, begin, np.full(self._num_workers, end_ms), worked)

    def _end(self, number: int, begin: Times, end: Times, worked: Times) -> None:
        node = self._nodes[number]
        if node.op.lane == COMPUTE:
            self._count(node.op.stage, end - begin)
        place = node.op.lane, node.op.batch
        self.played.busy[place] = self.played.busy[place] + np.minimum(worked, end - begin)
        self._trace(node.op, begin, end)
        if self._num_unread[number]:
            self._ends[number] = end
        for follower in node.followers:
            other = self._nodes[follower]
            other.num_missing -= 1
            if other.num_missing == 0:
                self._ready.append(follower)
        for earlier in node.after:
            self._num_unread[earlier] -= 1
            if self._num_unread[earlier] == 0:
                del self._ends[earlier]

    def _latest(self, numbers: list[int]) -> Times:
        latest = np.zeros(self._num_workers)
        for number in numbers:
            latest = np.maximum(latest, self._ends[number])
        return latest

    def _local(self, op: Op, work: Work) -> Times:
        local = np.broadcast_to(np.asarray(work.local_ms, dtype=np.float64), self._num_workers)
        return local if self._jitter is None or not np.any(local) else local * self._jitter.factors(op)

    def _enter(self, batch: int, now: Times) -> None:
        """Begins a step with the first operation of its batch on the compute lane."""
        if batch == len(self.played.starts):
            self.played.starts.append(now)
            self.played.stages.append({})

    def _count(self, stage: str, times: Times) -> None:
        stages = self.played.stages[-1]
        stages[stage] = stages[stage] + times if stage in stages else times

    def _trace(self, op: Op, begin: Times, end: Times) -> None:
        for worker in self._traced:
            if end[worker] > begin[worker]:
                begin_ns, end_ns = round(begin[worker] * 1e6), round(end[worker] * 1e6)
                span = Span(op.lane, op.stage, op.batch, op.micro_batch, begin_ns, end_ns)
                self.played.spans[worker].append(span)
