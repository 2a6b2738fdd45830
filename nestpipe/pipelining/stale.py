"""Stale rows, for experiments: the model is shown shared rows as they were before the last update.

An asynchronous system does this to hide the same waits. The result is wrong on purpose.
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
            slots_before, slots = shared.on_device
            rows.shown = rows.rows.clone()
            rows.shown.index_copy_(0, slots, before.index_select(0, slots_before))
