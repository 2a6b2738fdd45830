"""What the window of a batch holds, in bytes, at each of its moments: rows out, gradients back, the owner's sum.

As window.py and local_window.py make it. The caller of a step holds a leaf until it is given the next one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nestpipe.embedding.plan import Places, Plans, TablePlans
from nestpipe.embedding.request import TableRequest
from nestpipe.embedding.route import Route


@dataclass(frozen=True)
class Moment:
    rows: int = 0
    leaves: int = 0
    gradients: int = 0
    exchange: int = 0

    @property
    def total(self) -> int:
        return self.rows + self.leaves + self.gradients + self.exchange


def widest(route: Route, plans: Plans, rank: int, is_windowed: bool) -> Moment:
    """The moment of a batch at which its window holds most. is_windowed: exchanges run beside the dense part."""
    leaves = _Leaves(route.request.tables)
    moments = _Alone(leaves) if len(plans.tables) == 0 else _AmongRanks(leaves, route, plans, rank)
    return max(moments.all(is_windowed), key=lambda moment: moment.total)


class _Leaves:
    """Bytes of the rows of each micro-batch, and of the gradients of those that are trained."""

    def __init__(self, tables: Sequence[TableRequest]) -> None:
        micro_batches = range(len(tables[0].leaves))
        trained = [table for table in tables if not table.table.frozen]
        self.rows = [sum(_bytes(t, len(t.leaves[i])) for t in tables) for i in micro_batches]
        self.gradients = [sum(_bytes(t, len(t.leaves[i])) for t in trained) for i in micro_batches]
        self.distinct = sum(_bytes(t, len(t.keys)) for t in tables)
        self.distinct_trained = sum(_bytes(t, len(t.keys)) for t in trained)

    def live(self, micro_batch: int, is_windowed: bool) -> int:
        """While this one is trained or returned: those brought ahead are there too."""
        return sum(self.rows[micro_batch:]) if is_windowed else self.rows[micro_batch]


class _Alone:
    """In a world of one: leaves, and their gradients summed once for all."""

    def __init__(self, leaves: _Leaves) -> None:
        self._leaves = leaves

    def all(self, is_windowed: bool) -> Iterator[Moment]:
        leaves, num_micro_batches = self._leaves, len(self._leaves.rows)
        summed = leaves.distinct_trained if num_micro_batches > 1 else 0
        for i in range(num_micro_batches):
            yield Moment(leaves=leaves.live(i, is_windowed), gradients=summed + leaves.gradients[i])
            if not is_windowed and i > 0:
                yield Moment(leaves=leaves.rows[i - 1] + leaves.rows[i], gradients=summed)


class _Traffic:
    """Of one micro-batch in one direction, all tables together."""

    def __init__(self) -> None:
        self.gathered = 0
        """copied together before they are sent"""
        self.sent = self.received = 0
        """to and from other ranks"""
        self.arrived = 0
        """with this rank's own"""

    @property
    def num_bytes(self) -> int:
        """At its widest: the messages to each rank, and behind each other; what came, and the same as rows."""
        return self.gathered + 2 * self.sent + self.received + self.arrived

    def add(self, table: TableRequest, sent: list[int], arrived: list[int], gathered: int, rank: int) -> None:
        self.gathered += _bytes(table, gathered)
        self.sent += _bytes(table, sum(sent) - sent[rank])
        self.received += _bytes(table, sum(arrived) - arrived[rank])
        self.arrived += _bytes(table, sum(arrived))


class _AmongRanks:
    def __init__(self, leaves: _Leaves, route: Route, plans: Plans, rank: int) -> None:
        self._leaves = leaves
        self._keeps = plans.window == "once"
        self._bring = [_Traffic() for _ in leaves.rows]
        self._take = [_Traffic() for _ in leaves.rows]
        self._slot_gradients = self._owned = 0
        for table, of_table, owned in zip(route.request.tables, plans.tables, route.owned, strict=True):
            self._slot_gradients += _bytes(table, sum(len(slots) for slots in of_table.slots))
            self._owned += 0 if table.table.frozen else _bytes(table, len(owned.keys))
            for i in range(len(leaves.rows)):
                self._add(table, of_table, i, rank)

    def _add(self, table: TableRequest, plans: TablePlans, i: int, rank: int) -> None:
        bring_out = [_num(plan.bring[i], len(slots)) for plan, slots in zip(plans.owner, plans.slots, strict=True)]
        take_in = [_num(plan.take[i], len(slots)) for plan, slots in zip(plans.owner, plans.slots, strict=True)]
        bring_in, take_out = plans.bring_counts[i], plans.take_counts[i]
        in_place = bring_out[0] if plans.owner[0].bring[i] is None else 0  # rank 0 asks for the first slots, in order
        self._bring[i].add(table, bring_out, bring_in, sum(bring_out) - in_place, rank)
        gathered = 0 if plans.requester.take[i] is None else sum(take_out)
        self._take[i].add(table, take_out, take_in, gathered, rank)

    def all(self, is_windowed: bool) -> Iterator[Moment]:
        leaves, last = self._leaves, len(self._leaves.rows) - 1
        rows = leaves.distinct if self._keeps or last == 0 else 0
        summed = leaves.distinct if last > 0 else 0
        for i in range(last + 1):
            earlier = sum(leaves.rows[:i]) if is_windowed else leaves.rows[i - 1] if i > 0 else 0
            so_far = summed + self._slot_gradients if i > 0 and not is_windowed else 0
            yield Moment(rows if i > 0 else rows - leaves.distinct, earlier, so_far, self._bring[i].num_bytes)
            returned = summed + leaves.gradients[i] + (self._slot_gradients if last > 0 else 0)
            yield Moment(rows, leaves.live(i, is_windowed), returned, self._take[i].num_bytes)
        yield Moment(rows, leaves.rows[last], summed + self._slot_gradients + self._owned)


def _num(places: Places, num_all: int) -> int:
    return num_all if places is None else len(places)


def _bytes(table: TableRequest, num_rows: int) -> int:
    return num_rows * table.table.dim * table.table.dtype.itemsize
