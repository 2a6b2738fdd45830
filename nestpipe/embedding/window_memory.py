"""What the window of a batch holds, in bytes, at each of its moments: rows out, gradients back, the owner's sum.

As window.py and local_window.py make it. The caller of a step holds a leaf until it is given the next one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from nestpipe.embedding.layout import filled_up
from nestpipe.embedding.plan import Places, Plans
from nestpipe.embedding.request import TableRequest
from nestpipe.embedding.route import Route


@dataclass(frozen=True)
class Moment:
    rows: int = 0
    leaves: int = 0
    gradients: int = 0
    exchange: int = 0
    in_host: int = 0
    """messages, beside the others"""

    @property
    def total(self) -> int:
        return self.rows + self.leaves + self.gradients + self.exchange


def widest(route: Route, plans: Plans, rank: int, is_windowed: bool, is_staged: bool) -> Moment:
    """The moment of a batch at which its window holds most. is_windowed: exchanges run beside the dense part.
    is_staged: their messages are in host memory."""
    leaves = _Leaves(route.request.tables)
    is_alone = len(plans.tables) == 0
    moments = _Alone(leaves) if is_alone else _AmongRanks(leaves, route, plans, rank, is_windowed, is_staged)
    widest = max(moments.all(), key=lambda moment: moment.total)
    return replace(widest, in_host=moments.in_host)


class _Leaves:
    """Bytes of the rows of each micro-batch, and of the gradients of those that are trained."""

    def __init__(self, tables: Sequence[TableRequest]) -> None:
        micro_batches = range(len(tables[0].leaves))
        trained = [table for table in tables if not table.table.frozen]
        self.rows = [sum(_bytes(t, len(t.leaves[i])) for t in tables) for i in micro_batches]
        self.gradients = [sum(_bytes(t, len(t.leaves[i])) for t in trained) for i in micro_batches]
        self.distinct = sum(_bytes(t, len(t.keys)) for t in tables)
        self.distinct_trained = sum(_bytes(t, len(t.keys)) for t in trained)


class _Alone:
    """In a world of one: leaves, and their gradients summed once for all."""

    in_host = 0

    def __init__(self, leaves: _Leaves) -> None:
        self._leaves = leaves

    def all(self) -> Iterator[Moment]:
        leaves, num_micro_batches = self._leaves, len(self._leaves.rows)
        summed = leaves.distinct_trained if num_micro_batches > 1 else 0
        for i in range(num_micro_batches):
            yield Moment(leaves=leaves.rows[i], gradients=summed + leaves.gradients[i])
            if i > 0:
                yield Moment(leaves=leaves.rows[i - 1] + leaves.rows[i], gradients=summed)


class _Traffic:
    """Of one micro-batch in one direction, all tables together."""

    def __init__(self) -> None:
        self.sent = self.received = 0
        """to and from other ranks"""
        self.own = 0
        """from this rank to itself"""

    def add(self, table: TableRequest, sent: list[int], received: list[int], rank: int) -> None:
        self.sent += sum(filled_up(_bytes(table, count)) for r, count in enumerate(sent) if r != rank)
        self.received += sum(filled_up(_bytes(table, count)) for r, count in enumerate(received) if r != rank)
        self.own += _bytes(table, received[rank])


class _AmongRanks:
    """is_staged: messages are in host memory."""

    def __init__(
        self, leaves: _Leaves, route: Route, plans: Plans, rank: int, is_windowed: bool, is_staged: bool
    ) -> None:
        self._leaves = leaves
        self._is_windowed = is_windowed
        self._keeps = plans.window == "once"
        self._is_staged = is_staged
        self._bring = [_Traffic() for _ in leaves.rows]
        self._take = [_Traffic() for _ in leaves.rows]
        self._slot_gradients = self._owned = 0
        for table, of_table, owned in zip(route.request.tables, plans.tables, route.owned, strict=True):
            self._slot_gradients += _bytes(table, sum(len(slots) for slots in of_table.slots))
            self._owned += 0 if table.table.frozen else _bytes(table, len(owned.keys))
            for i in range(len(leaves.rows)):
                bring_out = [len(of_requester[i]) for of_requester in of_table.bring_slots]
                self._bring[i].add(table, bring_out, of_table.bring_counts[i], rank)
                requesters = zip(of_table.take_places, of_table.slots, strict=True)
                take_in = [_num(places[i], len(slots)) for places, slots in requesters]
                self._take[i].add(table, of_table.take_counts[i], take_in, rank)

    def all(self) -> Iterator[Moment]:
        leaves, last = self._leaves, len(self._leaves.rows) - 1
        rows = leaves.distinct if self._keeps and last > 0 else 0
        summed, slots = (leaves.distinct, self._slot_gradients) if last > 0 else (0, 0)
        for i in range(last + 1):
            earlier = sum(leaves.rows[:i]) if self._is_windowed else leaves.rows[i - 1] if i > 0 else 0
            so_far = summed + slots if i > 0 and not self._is_windowed else 0
            bring, take = self._bring[i], self._take[i]
            yield Moment(rows, earlier + leaves.rows[i], so_far, self._messages(bring))
            returned = summed + leaves.gradients[i] + slots
            # Of the only micro-batch nothing is gathered: the owner keeps the message, or a copy on the device.
            exchanged = self._messages(take) + take.own if last > 0 else max(self._messages(take), take.received)
            live = sum(leaves.rows[i:]) if self._is_windowed else leaves.rows[i]  # those brought ahead are there too
            yield Moment(rows, live, returned, exchanged)
        # What the only micro-batch returns is kept as it is: what came in, and its own part, of all its gradients.
        returned = summed + slots if last > 0 else leaves.gradients[0] + self._take[0].received
        yield Moment(rows, leaves.rows[last], returned + self._owned)

    @property
    def in_host(self) -> int:
        """Rows of two micro-batches that are sent, of one that come in, and its gradients both ways."""
        if not self._is_staged:
            return 0
        following = [*(bring.sent for bring in self._bring[1:]), 0]
        rows = max(bring.sent + later + bring.received for bring, later in zip(self._bring, following, strict=True))
        return rows + max(take.sent + take.received for take in self._take)

    def _messages(self, traffic: _Traffic) -> int:
        return 0 if self._is_staged else traffic.sent + traffic.received


def _num(places: Places, num_all: int) -> int:
    return num_all if places is None else len(places)


def _bytes(table: TableRequest, num_rows: int) -> int:
    return num_rows * table.table.dim * table.table.dtype.itemsize
