"""The exchange in a world of one: nothing travels, but a codec rounds as it does among several ranks.

A position is the index of an owned key, so the rows of a micro-batch are gathered from the resident rows, and their
gradients are summed by owned key. On a device even that is left to the features, which read each row at its slot.
"""

from collections.abc import Sequence

from torch import Tensor

from nestpipe.device.streams import use_here
from nestpipe.distributed import Notice
from nestpipe.embedding.crossing import Crossing
from nestpipe.embedding.dedup import BatchDedup, RequesterDedup
from nestpipe.embedding.exchange import RowGradients
from nestpipe.embedding.exchange.codec import EXACT, PLAIN, Codecs
from nestpipe.embedding.group import FeatureGroups
from nestpipe.embedding.memory import Memory
from nestpipe.embedding.model_rows import ModelRows
from nestpipe.embedding.plan_parts import Marks, Plan, Returns
from nestpipe.embedding.resident import ResidentRows
from nestpipe.embedding.route import Route, route_alone
from nestpipe.kernels.rows.pooling import StoredRows


class LocalExchange:
    """See Exchange."""

    size = num_owners = 1

    def __init__(self, memory: Memory, codecs: Codecs = EXACT) -> None:
        self._memory = memory
        self._codecs = codecs

    def route(self, batch: BatchDedup | Exception, features: FeatureGroups, notice: Notice) -> Route | None:
        return route_alone(batch, notice)

    def compare(self, earlier: Route, later: Route, has_late: bool, num_threads: int) -> Crossing:
        return Crossing([], [], 0)

    def plan(
        self, route: Route, window: str, early: list[Marks] | None = None, has_returns: bool = True
    ) -> Plan | None:
        return None

    def plan_returns(self, route: Route, window: str, late: list[Marks] | None) -> Returns | None:
        return None

    def agree(self, error: Exception | None) -> None:
        if error is not None:
            raise error

    def open(self, route: Route, plan: Plan | None, resident: list[ResidentRows] | None) -> "LocalBatch":
        assert resident is not None
        return LocalBatch(route.batch, resident, self._memory, self._codecs)


def are_read_in_place(memory: Memory, codecs: Codecs) -> bool:
    """Returns whether features read rows at their slots. In host memory they need an array of a micro-batch's rows."""
    return not memory.is_host and codecs.rows is PLAIN


class LocalBatch:
    """See BatchExchange."""

    row_bytes = gradient_bytes = 0
    has_late_gradients = False

    def __init__(self, batch: BatchDedup, resident: list[ResidentRows], memory: Memory, codecs: Codecs) -> None:
        self.exceeds = memory.new_flag()
        self._memory = memory
        self._codecs = codecs
        self._groups = list(zip(batch.groups, resident, strict=True))
        self._is_split = batch.num_micro_batches > 1
        self._places = [self._places_of(dedup, rows) for dedup, rows in self._groups]
        self._rows: dict[int, list[ModelRows]] = {}
        self._sums: dict[int, Tensor] = {}

    def send_early_rows(self) -> None: ...
    def return_late_gradients(self) -> None: ...
    def share_sums(self) -> None: ...
    def sum_late_gradients(self) -> list[RowGradients | None]:
        return []

    def send_rows(self, micro_batch: int) -> None:
        self._rows[micro_batch] = [self._gather(g, micro_batch) for g in range(len(self._groups))]

    def _places_of(self, dedup: RequesterDedup, resident: ResidentRows) -> Tensor | None:
        """Returns the place of each row of each micro-batch among the resident rows; None for all in order."""
        _, slots = resident.sent_from()
        if not self._is_split:  # the only micro-batch has all keys, in order
            return slots
        return dedup.row_positions if slots is None else slots.index_select(0, dedup.row_positions)

    def _gather(self, g: int, micro_batch: int) -> ModelRows:
        (dedup, resident), places = self._groups[g], self._places[g]
        source, _ = resident.sent_from()
        num_rows = dedup.num_rows(micro_batch)
        if self._is_split and places is not None:
            places = places[dedup.rows_of(micro_batch)]
        if are_read_in_place(self._memory, self._codecs):
            return ModelRows.read_at(StoredRows(source, places), num_rows)
        rows = self._memory.empty_rows(num_rows, dedup.group.dim, dedup.group.dtype)
        self._codecs.rows.copy(self._memory, dedup.group, source, places, rows, None)
        return ModelRows(rows)

    def rows(self, micro_batch: int) -> list[ModelRows]:
        rows = self._rows.pop(micro_batch)
        for group, (dedup, _) in zip(rows, self._groups, strict=True):
            use_here(group.variable)
            group.variable.requires_grad_(not dedup.group.frozen)
        return rows

    def return_gradients(self, micro_batch: int, gradients: Sequence[Tensor | None]) -> None:
        use_here(*gradients)
        for g, (dedup, _) in enumerate(self._groups):
            if not dedup.group.frozen:
                gradient = gradients[g] if len(gradients) > 0 else None
                self._collect(g, dedup, micro_batch, gradient)

    def _collect(self, g: int, dedup: RequesterDedup, micro_batch: int, gradient: Tensor | None) -> None:
        group, limit = dedup.group, self._codecs.sum_limit(dedup.group.dtype, 1)
        if gradient is None:
            gradient = self._memory.empty_rows(dedup.num_rows(micro_batch), group.dim, group.dtype).zero_()
        if not self._is_split:
            self._memory.check_rows(gradient, limit, self.exceeds)
            self._sums[g] = gradient
            return
        if g not in self._sums:
            self._sums[g] = self._memory.empty_rows(len(dedup.keys), group.dim, group.dtype)
        rows = dedup.rows_of(micro_batch)
        places, is_first = dedup.row_positions[rows], dedup.is_first[rows]
        self._memory.add_rows(self._sums[g], places, gradient, is_first, limit, self.exceeds)

    def sum_gradients(self) -> list[RowGradients | None]:
        use_here(*self._sums.values())
        return [RowGradients(self._coded(g)) if g in self._sums else None for g in range(len(self._groups))]

    def _coded(self, g: int) -> Tensor:
        """Returns sums as they would be if they had travelled."""
        sums, codec, group = self._sums[g], self._codecs.gradients, self._groups[g][0].group
        if codec is PLAIN:
            return sums
        # The gradient of an only micro-batch belongs to autograd.
        coded = sums if self._is_split else self._memory.empty_rows(len(sums), group.dim, group.dtype)
        codec.copy(self._memory, group, sums, None, coded, None)
        return coded
