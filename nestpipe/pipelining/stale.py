"""Stale rows, for experiments: the model sees shared rows as they were before the last update.

Asynchronous systems hide the same waits in this way. The result is wrong on purpose.
"""

from torch import Tensor

from nestpipe.embedding.resident import ResidentRows
from nestpipe.pipelining.schedule import Op
from nestpipe.pipelining.stages import Stages
from nestpipe.store import match_tables


class StaleStages(Stages):
    _before: list[tuple[ResidentRows, Tensor]] | None = None
    """Resident rows of the previous batch, and copies of them from before its update, by group."""

    def begin(self, op: Op) -> None:
        resident = self.state(op.batch).resident
        rows = resident.groups if resident is not None else []
        current = [group.copied(self._memory)[:, : group.group.dim] for group in rows]
        if self._before is not None:
            for group, now, (before, earlier) in zip(rows, current, self._before, strict=False):
                group.shown = _with_shared(group, now, before, earlier)
        self._before = list(zip(rows, current, strict=True)) or None
        super().begin(op)


def _with_shared(group: ResidentRows, rows: Tensor, before: ResidentRows, earlier: Tensor) -> Tensor:
    """Returns the rows of a batch, with those that the previous batch has too as they were earlier."""
    places = match_tables(before.keys, before.table_offsets, group.keys, group.table_offsets)
    shared = (places >= 0).nonzero().flatten()
    indices = shared.to(rows.device), places[shared].to(rows.device)
    return rows.index_copy(0, indices[0], earlier.index_select(0, indices[1]))
