"""Bytes that the exchanges of a batch hold at each moment: rows out, gradients back, the owner's sum.

This follows exchange/local.py and exchange/distributed.py. The caller of a step holds the rows of a micro-batch until
it gets the next one.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from nestpipe.embedding.dedup import BatchDedup
from nestpipe.embedding.plan_parts import Plan
from nestpipe.embedding.route import Route


@dataclass(frozen=True)
class Moment:
    """Bytes that are held at one moment of a batch."""

    kept_rows: int = 0
    rows: int = 0
    gradients: int = 0
    messages: int = 0
    in_host: int = 0
    """Messages in pinned host memory, not part of the total."""

    @property
    def total(self) -> int:
        return self.kept_rows + self.rows + self.gradients + self.messages


def widest(
    route: Route, plan: Plan | None, is_windowed: bool, is_crossing: bool, is_staged: bool, is_read_in_place: bool
) -> Moment:
    """Returns the moment of a batch at which its exchanges hold most.

    is_windowed: exchanges overlap the dense part. is_crossing: they also overlap the neighbouring batches. is_staged:
    messages are in host memory. is_read_in_place: features read rows where they are stored.
    """
    rows = _RowBytes(route.batch, is_read_in_place)
    if plan is None:
        return max(_alone(rows), key=lambda moment: moment.total)
    among = _AmongRanks(rows, route, plan, is_windowed, is_staged)
    moments = among.with_neighbours() if is_crossing else among.moments()
    return replace(max(moments, key=lambda moment: moment.total), in_host=among.in_host)


class _RowBytes:
    """Bytes of the rows of each micro-batch, and of the gradients of those that are not frozen."""

    def __init__(self, batch: BatchDedup, is_read_in_place: bool) -> None:
        copied = [group for group in batch.groups if group.group.has_by_index or not is_read_in_place]
        trained = [group for group in batch.groups if not group.group.frozen]
        micro_batches = range(batch.num_micro_batches)
        self.rows = [sum(g.num_rows(i) * g.group.row_bytes for g in copied) for i in micro_batches]
        self.gradients = [sum(g.num_rows(i) * g.group.row_bytes for g in trained) for i in micro_batches]
        self.distinct = sum(len(g.keys) * g.group.row_bytes for g in batch.groups)
        self.distinct_trained = sum(len(g.keys) * g.group.row_bytes for g in trained)


def _alone(rows: _RowBytes) -> Iterator[Moment]:
    """Yields the moments in a world of one: rows of a micro-batch, and one array of summed gradients."""
    num_micro_batches = len(rows.rows)
    summed = rows.distinct_trained if num_micro_batches > 1 else 0
    for i in range(num_micro_batches):
        yield Moment(rows=rows.rows[i], gradients=summed + rows.gradients[i])
        if i > 0:
            yield Moment(rows=rows.rows[i - 1] + rows.rows[i], gradients=summed)


class _AmongRanks:
    """The moments among several ranks."""

    def __init__(self, rows: _RowBytes, route: Route, plan: Plan, is_windowed: bool, is_staged: bool) -> None:
        assert plan.returns is not None
        self._rows = rows
        self._sends, self._returns = plan.sends, plan.returns
        self._is_windowed = is_windowed
        self._is_staged = is_staged
        trained = [group for group in plan.returns.groups if not group.group.frozen]
        self._entries = sum(group.num_entries * group.group.row_bytes for group in trained)
        self._owned = sum(len(o.keys) * o.group.row_bytes for o in route.owner_dedups if not o.group.frozen)
        self._resent = [0] * len(rows.rows)
        if plan.window == "resend":
            for i in range(len(rows.rows)):
                arriving = (g.gradients_in.num_others(i) + g.gradients_in.num_own(i) for g in trained)
                widths = (g.group.row_bytes for g in trained)
                self._resent[i] = rows.distinct_trained + sum(n * w for n, w in zip(arriving, widths, strict=True))

    def moments(self) -> Iterator[Moment]:
        rows, last = self._rows, len(self._rows.rows) - 1
        kept, summed = (rows.distinct, rows.distinct_trained) if last > 0 else (0, 0)
        for i in range(last + 1):
            earlier = sum(rows.rows[:i]) if self._is_windowed else rows.rows[i - 1] if i > 0 else 0
            so_far = summed + self._entries if i > 0 and not self._is_windowed else 0
            yield Moment(kept, earlier + rows.rows[i], so_far, self._messages(self._row_messages(i)))
            returned = summed + rows.gradients[i] + self._entries + self._resent[i]
            live = sum(rows.rows[i:]) if self._is_windowed else rows.rows[i]  # includes rows sent ahead
            yield Moment(kept, live, returned, self._messages(self._gradient_messages(i)))
        yield Moment(kept, rows.rows[last], summed + self._entries + self._owned)

    def with_neighbours(self) -> Iterator[Moment]:
        """Yields the moments with exchange across batches, as if the neighbours were like this batch: while its first
        dense part computes, there are late gradients of the last batch; once these are applied, early rows of the next
        batch arrive. On a slow network the late gradients may stay longer."""
        first, *others = self.moments()
        yield replace(first, gradients=first.gradients + self._rows.distinct_trained + self._entries + self._owned)
        for moment in others:
            yield replace(moment, rows=moment.rows + self._rows.distinct)

    @property
    def in_host(self) -> int:
        """Returns the bytes of messages in host memory: rows of two micro-batches sent, rows of one received, and its
        gradients both ways."""
        if not self._is_staged:
            return 0
        micro_batches = range(len(self._rows.rows))
        following = [*(self._sends.rows_out.num_bytes[self._part(i)] for i in micro_batches[1:]), 0]
        rows = max(self._row_messages(i) + following[i] for i in micro_batches)
        return rows + max(self._gradient_messages(i) for i in micro_batches)

    def _row_messages(self, i: int) -> int:
        part = self._part(i)
        early = self._sends.rows_out.num_bytes[0] + self._sends.rows_in.num_bytes[0] if part > i else 0
        return max(early, self._sends.rows_out.num_bytes[part] + self._sends.rows_in.num_bytes[part])

    def _part(self, i: int) -> int:
        return self._sends.num_early + i

    def _gradient_messages(self, i: int) -> int:
        return self._returns.gradients_out.num_bytes[i] + self._returns.gradients_in.num_bytes[i]

    def _messages(self, num_bytes: int) -> int:
        return 0 if self._is_staged else num_bytes
