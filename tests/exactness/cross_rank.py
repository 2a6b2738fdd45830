"""A rank of the model of the exchange across batches: its lanes, its streams, and the stages of a batch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tests.exactness.cross_list import CrossOp, Name
from tests.exactness.cross_model import CrossBatch, CrossPool
from tests.exactness.cross_parts import Channels, Collective, CrossFit, Expected, Uses
from tests.exactness.pool_model_parts import NEW, UNFILLED, Record
from tests.exactness.pool_model_time import Condition, Event, Lane, RuleError, Stream, Work

Rows = dict[int, Record]
STREAMS = "compute", "rows", "gradients", "host", "route"


@dataclass(frozen=True)
class Setting:
    """What all ranks of a fit share."""

    fit: CrossFit
    expected: Expected
    first_step: int
    channels: Channels
    has_device: bool
    has_issuer: bool
    """One thread issues the exchanges of all lanes to streams of the device."""
    is_one_by_one: bool
    """With an issuer: a device begins an exchange only after the one that was issued before it."""
    is_early_first: bool


@dataclass
class Pending:
    """An operation that was given to a lane."""

    issued: Event = field(default_factory=Event)
    mark: Event | None = None
    """Event that its effects have run; known once it is issued."""


class CrossRank:
    """The stages. Those of the row pool are CrossPool's."""

    def __init__(self, number: int, pool: CrossPool, setting: Setting) -> None:
        self.number = number
        self.pool = pool
        self.setting = setting
        self.fit = fit = setting.fit
        self.streams = {name: Stream(setting.has_device) for name in STREAMS}
        self.lanes = {name: Lane() for name in STREAMS}
        if setting.has_issuer:
            self.lanes["rows"] = self.lanes["gradients"] = Lane()
        keys = [fit.keys(i, number) for i in range(len(fit.batches))]
        self.batches = pool.begin_fit(keys, fit.max_rows, self.streams["compute"], self.streams["host"])
        self.failed_route: int | None = None
        """First batch whose route has failed, on any rank."""
        self.is_masked = False
        """On the device: True once a step was not finite."""
        self.pending: dict[Name, Pending] = {}
        self.broken = pool.broken
        self._last_exchange: Collective | None = None

    @property
    def is_done(self) -> bool:
        return self.lanes["compute"].done and all(stream.done for stream in self.streams.values())

    # ---- lanes ----

    def submit(self, op: CrossOp) -> None:
        self.lanes[op.lane].queue.append(self.run(op, *self.awaited(op)))

    def awaited(self, op: CrossOp) -> tuple[Pending, list[Pending]]:
        """Enters an operation, and returns the state of it and of those that it waits for."""
        awaited = [self.pending[name] for name in op.waits_for if name in self.pending]
        if self.pool.breaks("executor_forgets_marks") and len(awaited) < len(op.waits_for):
            awaited.append(Pending(Event(True), self.streams["compute"].mark()))
        self.pending[op.name] = pending = Pending()
        return pending, awaited

    def run(self, op: CrossOp, pending: Pending, awaited: list[Pending]) -> Work:
        """Does an operation, in the thread and on the stream of its lane."""
        stream = self.streams[op.lane]
        for other in awaited:
            if not other.issued.done:
                yield other.issued
        for other in awaited:
            if other.mark is not None and not other.mark.done:
                stream.wait(other.mark)
        if self.pool.breaks("executor_forgets_marks") and op.lane == "compute" and op.waits_for:
            self._forget_issued(op.batch)
        action: Callable[[CrossOp], Work] = getattr(self, f"_{op.stage}")
        yield from action(op)
        pending.mark = stream.mark()
        pending.issued.done = True

    def _forget_issued(self, batch: int) -> None:
        for name in [name for name, pending in self.pending.items() if name[1] < batch and pending.issued.done]:
            del self.pending[name]

    def _is_step(self, i: int) -> bool:
        """Returns whether a batch has been routed as a step, on all ranks."""
        is_routed = i < len(self.batches) and (self.failed_route is None or i < self.failed_route)
        return is_routed and self.batches[i].keys is not None

    def _uses(self, i: int, rank: int | None = None) -> Uses:
        uses = self.fit.batches[i]
        assert uses is not None
        return uses[self.number if rank is None else rank]

    # ---- route and retrieve ----

    def _route(self, op: CrossOp) -> Work:
        i = op.batch
        yield None
        if i >= len(self.batches) or self.failed_route is not None:
            return
        header = self._join("route", ("header", i))
        header.posted[self.number] = self._fails("header", i)
        yield header
        if any(header.posted.values()):
            self._fail_route(i)
            return
        needed, capacity = self.pool.num_needed(i), self.pool.slots.capacity
        if self.pool.breaks("growth_when_drained") and needed > capacity and i > 0:
            before = self.batches[i - 1]
            yield Condition(lambda: before.keys is None or before.updated is not None)
        has_failed = needed > max(self.fit.limit, capacity) or self._fails("reply", i)
        self.pool.seen["refused"] += needed > max(self.fit.limit, capacity)
        early, late = self._decide_early(i), self._decide_late(i - 1)
        reply = self._join("route", ("reply", i))
        reply.posted[self.number] = has_failed, early, late
        yield reply
        failures = [failed for failed, _, _ in reply.posted.values()]
        if has_failed if self.pool.breaks("route_error_is_own") else any(failures):
            self._fail_route(i)
            return
        yield from self.pool.route(i)
        self._learn(i, early, late, reply)

    def _fails(self, part: str, i: int) -> bool:
        return self.fit.route_fault == (part, i, self.number)

    def _fail_route(self, i: int) -> None:
        self.failed_route = i
        self.pool.seen["failed route"] += 1

    def _decide_early(self, i: int) -> set[int]:
        """Returns the owned keys of a batch that the one before does not have."""
        if not self._is_step(i) or i == 0:
            return set()
        keys, before = set(self.batches[i].keys or []), self.batches[i - 1].keys or []
        if self.pool.breaks("early_row_of_overlap"):
            return keys.difference(before[1:])
        return keys.difference(before)

    def _decide_late(self, i: int) -> set[int]:
        """Returns the owned keys of a batch that the one after does not have."""
        if i < 0 or not self._is_step(i) or not self.fit.has_late:
            return set()
        keys, after = set(self.batches[i].keys or []), self.batches[i + 1].keys or []
        if self.pool.breaks("late_gradient_of_overlap"):
            return keys.difference(after[1:])
        return keys.difference(after)

    def _learn(self, i: int, early: set[int], late: set[int], reply: Collective) -> None:
        """Notes what is early for a batch and late for the one before: an owner by itself, a requester by the reply."""
        batch = self.batches[i]
        batch.early_owned, batch.early = early, set().union(*(early for _, early, _ in reply.posted.values()))
        self.pool.seen["early"] += len(early)
        if i > 0 and self.fit.has_late:
            before = self.batches[i - 1]
            before.late_owned, before.late = late, set().union(*(late for _, _, late in reply.posted.values()))
            before.has_late = self._is_step(i - 1)
            self.pool.seen["late"] += len(late)

    def _retrieve(self, op: CrossOp) -> Work:
        if self._is_step(op.batch):
            yield from self.pool.retrieve(op.batch)

    def _write_back(self, op: CrossOp) -> Work:
        yield from self.pool.write_back(op.batch)

    # ---- exchanges ----

    def _join(self, channel: str, tag: object) -> Collective:
        return self.setting.channels.join(channel, self.number, tag)

    def _exchange(self, op: CrossOp, send: Callable[[], Any], receive: Callable[[dict[int, Any]], None]) -> Work:
        """Sends what `send` returns, by rank, and hands over what has come, by rank."""
        stream, collective = self.streams[op.lane], self._join(op.lane, op.name)
        yield None
        if self.setting.has_issuer:
            after = self._last_exchange if self.setting.is_one_by_one else None
            stream.launch(lambda: collective.posted.update({self.number: send()}), after)
            self._last_exchange = collective
            stream.launch(lambda: receive(collective.posted), collective)
        else:
            box: list[Any] = []
            yield stream.launch(lambda: box.append(send()))
            collective.posted[self.number] = box[0]
            yield collective
            stream.launch(lambda: receive(collective.posted))
        yield None

    def _send_rows(self, op: CrossOp) -> Work:
        """Sends the rows that the batch before also has, with the first micro-batch that needs them."""
        batch, i = self.batches[op.batch] if self._is_step(op.batch) else None, op.micro_batch
        if batch is not None:
            yield from self._exchange_rows(
                op,
                lambda key, parts: parts[0] == i and key not in batch.early_owned,
                lambda key, parts: parts[0] == i and key not in batch.early,
            )

    def _send_early_rows(self, op: CrossOp) -> Work:
        if not self._is_step(op.batch):
            return
        batch = self.batches[op.batch]
        if batch.has_failed and self.pool.breaks("failed_retrieve_skips_early"):
            return
        yield from self._exchange_rows(
            op, lambda key, parts: key in batch.early_owned, lambda key, parts: key in batch.early
        )

    def _exchange_rows(
        self, op: CrossOp, sends: Callable[[int, Any], bool], expects: Callable[[int, Any], bool]
    ) -> Work:
        batch, mine = self.batches[op.batch], self._uses(op.batch)

        def send() -> list[Rows]:
            uses = [self._uses(op.batch, rank) for rank in range(self.fit.size)]
            return [
                {key: self._read(op, key) for key in rank if self._owns(key) and sends(key, rank[key])} for rank in uses
            ]

        def receive(posted: dict[int, list[Rows]]) -> None:
            arrived = {key: row for sent in posted.values() for key, row in sent[self.number].items()}
            self._check_message(op, arrived, {key for key in mine if expects(key, mine[key])})
            batch.rows |= arrived

        yield from self._exchange(op, send, receive)

    def _owns(self, key: int) -> bool:
        return self.fit.owner(key) == self.number

    def _check_message(self, op: CrossOp, arrived: Rows, expected: set[int]) -> None:
        if set(arrived) != expected:
            raise RuleError(f"wrong message: {op.name} has {sorted(arrived)}, not {sorted(expected)}")

    def _read(self, op: CrossOp, key: int) -> Record:
        """Returns the record of a key for a batch, which has seen exactly the updates of all batches before."""
        batch = self.batches[op.batch]
        if batch.has_failed:
            return UNFILLED
        if not batch.slots:
            raise RuleError(f"wrong row: {op.name} reads key {key} before it is resident")
        record = self.pool.slots.records[batch.slot_of(key)]
        expected = self.setting.expected.rows(self.fit.step(op.batch)).get(key, NEW)[0]
        if record != expected:
            raise RuleError(f"wrong row: {op.name} reads {record} for key {key}, not {expected}")
        return record

    def _return_gradients(self, op: CrossOp) -> Work:
        """Returns the gradients that the next batch needs, with the last micro-batch that uses their rows."""
        if self._is_step(op.batch):
            yield from self._exchange_gradients(op, lambda key, parts: parts[-1] == op.micro_batch, is_late=False)

    def _return_late_gradients(self, op: CrossOp) -> Work:
        batch = self._late_batch(op)
        if batch is not None and not batch.is_late_returned:
            batch.is_late_returned = True
            yield from self._exchange_gradients(op, lambda key, parts: True, is_late=True)

    def _late_batch(self, op: CrossOp) -> CrossBatch | None:
        batch = self.batches[op.batch]
        return batch if batch.has_late else None

    def _exchange_gradients(self, op: CrossOp, is_due: Callable[[int, Any], bool], is_late: bool) -> Work:
        batch, mine = self.batches[op.batch], self._uses(op.batch)

        def send() -> list[Uses]:
            due = {key: parts for key, parts in mine.items() if is_due(key, parts) and (key in batch.late) == is_late}
            return [{key: due[key] for key in due if self.fit.owner(key) == owner} for owner in range(self.fit.size)]

        def receive(posted: dict[int, list[Uses]]) -> None:
            for rank, sent in posted.items():
                uses = self._uses(op.batch, rank)
                due = {key for key in uses if self._owns(key) and is_due(key, uses[key])}
                self._check_message(op, sent[self.number], {key for key in due if (key in batch.late_owned) == is_late})
            for rank in sorted(posted):
                for key, parts in posted[rank][self.number].items():
                    batch.gradients.setdefault(key, {})[rank] = parts

        yield from self._exchange(op, send, receive)

    # ---- the update ----

    def _late_update(self, op: CrossOp) -> Work:
        batch = self._late_batch(op)
        if batch is not None and not batch.is_late_updated:
            batch.is_late_updated = True
            yield None
            ignores_mask = self.pool.breaks("late_update_ignores_mask")
            step = batch.step + self.pool.breaks("late_update_of_next_step")
            self.streams["gradients"].launch(partial(self.apply, batch, batch.late_owned, step, ignores_mask))
            self.pool.seen["late update"] += 1

    def apply(self, batch: CrossBatch, keys: set[int], step: int, ignores_mask: bool = False) -> None:
        """Updates the rows of some keys. An effect."""
        self.pool.seen["masked"] += batch.is_masked
        if batch.is_masked and not ignores_mask:
            return
        for key in keys:
            gradients = sorted(batch.gradients.get(key, {}).items())
            if keys is batch.late_owned and self.pool.breaks("late_sum_begins_with_own"):
                gradients.sort(key=lambda gradient: gradient[0] != self.number)
            self.pool.slots.records[batch.slot_of(key)] += ((step, tuple(gradients)),)
