"""Stale rows, for experiments: the model sees shared rows as they were before the last update.

Asynchronous systems hide the same waits in this way. The result is wrong on purpose.
"""

from torch import Tensor

from nestpipe.pipelining.schedule import Op
from nestpipe.pipelining.stages import Stages


class StaleStages(Stages):
    _rows_before: list[Tensor]

    def begin(self, op: Op) -> None:
        super().begin(op)
        resident = self.state(op.batch).resident
        if resident is not None:
            self._rows_before = [rows.rows.clone() for rows in resident.groups]

    def overlap_sync(self, op: Op) -> None:
        super().overlap_sync(op)
        following = self.state(op.batch + 1).resident
        if following is None or not following.has_unwritten or following.overlap is None:
            return
        for rows, before, shared in zip(following.groups, self._rows_before, following.overlap, strict=True):
            previous_slots, slots = shared.on_device
            rows.shown = rows.rows.clone()
            rows.shown.index_copy_(0, slots, before.index_select(0, previous_slots))
