"""The device memory that the embedding part of a rank needs for a batch: a formula, known before a row is retrieved.

    records     2 x 1.25 x owned keys x (row + row state)      of the batch in training and of the next one
    lists       batches under way x (positions, occurrences, inputs, plans), and 3 x 2 slots of each owned key
    kept_rows   distinct keys x row                            kept by a requester
    rows        keys of a micro-batch x row                    of all micro-batches whose rows are sent ahead
    gradients   of those rows; summed by the requester; at the owner for each requester; their sum
    messages    messages of one micro-batch, unless they are in host memory

The last four are counted at the moment of a batch at which their sum is largest (see budget_window.py). Memory of the
dense model, such as pooled rows, is not included.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from torch import Tensor

from nestpipe.device.tally import embedding_memory
from nestpipe.device.transfer import OfTensors
from nestpipe.embedding.budget_window import widest
from nestpipe.embedding.memory import Memory
from nestpipe.embedding.plan import Plan
from nestpipe.embedding.route import Route

MEANINGS = {
    "records": "2 x 1.25 x owned keys x (row + row state)",
    "lists": "of each batch under way: positions, occurrences, inputs, plans",
    "kept_rows": "distinct keys x row, kept by the requester",
    "rows": "keys of each micro-batch whose rows are sent ahead x row",
    "gradients": "of those rows, summed by the requester, at the owner for each requester",
    "messages": "messages of one micro-batch",
}

REMEDY = (
    "Take a smaller batch, more ranks, rows of fewer columns or a row optimizer with less state; or raise the budget, "
    "if the dense model leaves room for it"
)


@dataclass(frozen=True)
class DeviceBytes:
    """Bytes that one rank needs. The module's docstring explains each term."""

    records: int = 0
    lists: int = 0
    kept_rows: int = 0
    rows: int = 0
    gradients: int = 0
    messages: int = 0
    staging: int = 0
    """Pinned host memory: mirrors of the records, and messages if they are in host memory."""

    @property
    def terms(self) -> Mapping[str, int]:
        return {name: number for name, number in asdict(self).items() if name in MEANINGS}

    @property
    def total(self) -> int:
        return sum(self.terms.values())

    def __str__(self) -> str:
        terms = [f"{megabytes(part)} {name} ({MEANINGS[name]})" for name, part in self.terms.items() if part > 0]
        return f"{megabytes(self.total)} MB = {' + '.join(terms)}"


class DeviceBudget:
    """Compares the needs of each batch with a budget. Arrays of records never shrink, so it keeps their sizes."""

    def __init__(
        self, budget_bytes: int, memory: Memory, *, is_windowed: bool, is_overlapping: bool, is_staged: bool
    ) -> None:
        """is_staged: messages are in host memory."""
        self.budget_bytes = budget_bytes
        self.largest = DeviceBytes()
        """Largest needs of a batch so far."""
        self.peak_bytes = 0
        """Measured peak over all batches; known at the end."""
        self._is_windowed = is_windowed
        self._is_overlapping = is_overlapping
        self._is_staged = is_staged
        self._has_mirrors = memory.has_mirrors
        self._num_slots: tuple[dict[int, int], dict[int, int]] = ({}, {})
        """Slots of each group's records, for even and for odd batches."""
        self._is_ended = False
        embedding_memory.start(memory.device)

    def end(self) -> None:
        """Stops counting: later allocations are not included."""
        if not self._is_ended:
            self._is_ended = True
            self.peak_bytes = embedding_memory.peak_bytes
            embedding_memory.stop()

    def error(self, number: int, route: Route, plan: Plan | None) -> ValueError | None:
        """Returns an error if this batch, the number-th, does not fit; else None."""
        window = widest(route, plan, self._is_windowed, self._is_staged)
        records = self._records(number, route)
        needed = DeviceBytes(
            records=records,
            lists=self._lists(route, plan),
            kept_rows=window.kept_rows,
            rows=window.rows,
            gradients=window.gradients,
            messages=window.messages,
            staging=window.in_host + (records if self._has_mirrors else 0),
        )
        if needed.total > self.budget_bytes:
            return ValueError(self._refusal(needed, route))
        self.largest = max(self.largest, needed, key=lambda size: size.total)
        return None

    def _refusal(self, needed: DeviceBytes, route: Route) -> str:
        num_owned = sum(len(dedup.keys) for dedup in route.owner_dedups)
        num_keys = sum(len(group.keys) for group in route.batch.groups)
        return (
            f"a batch with {num_keys:,} distinct keys, {num_owned:,} owned by this rank, in "
            f"{route.batch.num_micro_batches} micro-batches needs more device memory for its embeddings than "
            f"memory.device_budget_bytes, {megabytes(self.budget_bytes)} MB: {needed}. It was not trained. {REMEDY}"
        )

    def _records(self, number: int, route: Route) -> int:
        """Returns the bytes that RecordMemory allocates. An array that became too small lives until the previous batch
        was written back."""
        slots, other_slots = self._num_slots[number % 2], self._num_slots[1 - number % 2]
        total = 0
        for g, dedup in enumerate(route.owner_dedups):
            num_keys, before = len(dedup.keys), slots.get(g, 0)
            if num_keys > before:
                slots[g] = num_keys + num_keys // 4
            replaced = before if num_keys > before else 0
            current = slots.get(g, 0)
            total += (current + max(current, other_slots.get(g, 0)) + replaced) * dedup.group.record_bytes
        return total

    def _lists(self, route: Route, plan: Plan | None) -> int:
        """Returns the bytes of the lists of this batch and the previous one. Overlapping schedules have three more: the
        batch before those, which is freed when its successor was written back, and the two that follow. They also
        have the slots of the overlaps between neighbours."""
        batch_bytes = _tensor_bytes(route.batch) + (_tensor_bytes(plan) if plan is not None else 0)
        if not self._is_overlapping:
            return 2 * batch_bytes
        return 5 * batch_bytes + 3 * 2 * 8 * sum(len(dedup.keys) for dedup in route.owner_dedups)


def megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.2f}"


def _tensor_bytes(value: OfTensors) -> int:
    """Returns the bytes of all tensors that go to the device with a value, each counted once."""
    tensors: dict[int, Tensor] = {}

    def record(tensor: Tensor) -> Tensor:
        tensors[id(tensor)] = tensor
        return tensor

    value.map(record)
    return sum(tensor.nbytes for tensor in tensors.values())
