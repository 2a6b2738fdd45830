"""The device memory that the embedding part of a rank needs for a batch: a formula, known before a row is retrieved.

    records     slots x (row + row state)                      of the row pool, or of the batch in training
    stretches   records on their way to and from the host store
    lists       batches under way x (positions, occurrences, inputs, plans), and the slots of owned keys
    kept_rows   distinct keys x row                            kept by a requester
    rows        keys of a micro-batch x row                    of all micro-batches whose rows are sent ahead; none if
                                                               features read them where they are stored
    gradients   of those rows; summed by the requester; at the owner for each requester; their sum
    messages    messages of one micro-batch, unless they are in host memory

The last four are counted at the moment of a batch at which their sum is largest (see budget_window.py). With exchange
across batches there are also the early rows of the next batch or the late gradients of the last one, as many as if they
were this batch's. Memory of the dense model, such as pooled rows, is not included.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from torch import Tensor

from nestpipe.device.tally import embedding_memory
from nestpipe.device.transfer import OfTensors
from nestpipe.embedding.budget_window import widest
from nestpipe.embedding.host_link import STRETCH_BYTES
from nestpipe.embedding.memory import Memory
from nestpipe.embedding.plan_parts import Plan
from nestpipe.embedding.route import Route

MEANINGS = {
    "records": "slots x (row + row state)",
    "stretches": "records on their way to and from the host store",
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
    stretches: int = 0
    lists: int = 0
    kept_rows: int = 0
    rows: int = 0
    gradients: int = 0
    messages: int = 0
    staging: int = 0
    """Pinned host memory: records on their way, and messages if they are in host memory."""

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
    """Compares the needs of each batch with a budget."""

    def __init__(
        self,
        budget_bytes: int,
        memory: Memory,
        *,
        is_windowed: bool,
        is_overlapping: bool,
        is_crossing: bool,
        is_staged: bool,
        is_read_in_place: bool = False,
    ) -> None:
        """is_crossing: rows and gradients are exchanged across batches. is_staged: messages are in host memory.
        is_read_in_place: features read rows where they are stored."""
        self.budget_bytes = budget_bytes
        self.largest = DeviceBytes()
        """Largest needs of a batch so far."""
        self.peak_bytes = 0
        """Measured peak over all batches; known at the end."""
        self._is_windowed = is_windowed
        self._is_overlapping = is_overlapping
        self._is_crossing = is_crossing
        self._is_staged = is_staged
        self._is_read_in_place = is_read_in_place
        self._is_host = memory.is_host
        self._is_ended = False
        embedding_memory.start(memory.device)

    def end(self) -> None:
        """Stops counting: later allocations are not included."""
        if not self._is_ended:
            self._is_ended = True
            self.peak_bytes = embedding_memory.peak_bytes
            embedding_memory.stop()

    @property
    def most_record_bytes(self) -> int:
        """Returns the bytes that records may have next to the largest batch so far."""
        return self.budget_bytes - (self.largest.total - self.largest.records)

    def error(self, route: Route, plan: Plan | None, record_bytes: int) -> ValueError | None:
        """Returns an error if a batch does not fit; else None. record_bytes: memory of all slots."""
        flags = self._is_windowed, self._is_crossing, self._is_staged, self._is_read_in_place
        window = widest(route, plan, *flags)
        stretches = self._stretch(route) if self._is_overlapping and not self._is_host else 0
        needed = DeviceBytes(
            records=record_bytes,
            stretches=stretches,
            lists=self._lists(route, plan),
            kept_rows=window.kept_rows,
            rows=window.rows,
            gradients=window.gradients,
            messages=window.messages,
            staging=window.in_host + (0 if self._is_host else 4 * self._stretch(route)),
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

    def _stretch(self, route: Route) -> int:
        """Returns the bytes of one stretch of the group that needs most. The device has one at a time, for records on
        their way between slots and the host; the host has two in each direction."""
        sizes = [len(dedup.keys) * dedup.group.record_bytes for dedup in route.owner_dedups]
        return min(STRETCH_BYTES, max(sizes, default=0))

    def _lists(self, route: Route, plan: Plan | None) -> int:
        """Returns the bytes of the lists of this batch and the previous one. Overlapping schedules have three more: the
        batch before those, which is freed when its successor was written back, and the two that follow. All but the
        last also have the slots of their keys, and the batch in training those of the rows that it sends; with exchange
        across batches its neighbours, too."""
        batch_bytes = _tensor_bytes(route.batch) + (_tensor_bytes(plan) if plan is not None else 0)
        if not self._is_overlapping:
            return 2 * batch_bytes
        num_slots = 4 * sum(len(dedup.keys) for dedup in route.owner_dedups)
        num_sent = sum(len(group.rows_out.places) for group in plan.sends.groups) if plan is not None else 0
        if plan is None and route.batch.num_micro_batches > 1:
            num_sent = sum(len(group.row_positions) for group in route.batch.groups)
        num_sent *= 3 if self._is_crossing else 1
        return 5 * batch_bytes + 8 * (num_slots + num_sent)


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
