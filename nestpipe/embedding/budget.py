"""How much device memory the embedding part of a rank needs for a batch: a formula, known before a row is retrieved.

    records     2 x 1.25 x owned keys x (row + row state)      of the batch in training and of the next one
    lists       batches under way x (positions, occurrences, inputs, plans), and 3 x 2 slots of each owned key
    kept_rows   distinct keys x row                            kept by a requester
    rows        keys of a micro-batch x row                    of all micro-batches whose rows are sent ahead
    gradients   of those rows; summed by the requester; at the owner for each requester; their sum
    messages    messages of one micro-batch, unless they are in host memory

The last four are taken at the moment of a batch at which they are largest together (see budget_window.py). What the
dense model makes of a row is its own.
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
    """What one rank needs. The module explains each term."""

    records: int = 0
    lists: int = 0
    kept_rows: int = 0
    rows: int = 0
    gradients: int = 0
    messages: int = 0
    staging: int = 0
    """pinned host memory: mirrors of the records; messages, if they are there"""

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
    """The formula, batch by batch, against a budget. Arrays of records never shrink, so it remembers their sizes."""

    def __init__(
        self, budget_bytes: int, memory: Memory, *, is_windowed: bool, is_overlapping: bool, is_staged: bool
    ) -> None:
        """is_staged: messages are in host memory"""
        self.budget_bytes = budget_bytes
        self.largest = DeviceBytes()
        """what a batch so far needed at most"""
        self.peak_bytes = 0
        """what all of them did hold at most; known at the end"""
        self._is_windowed = is_windowed
        self._is_overlapping = is_overlapping
        self._is_staged = is_staged
        self._has_mirrors = memory.has_mirrors
        self._room: tuple[dict[int, int], dict[int, int]] = ({}, {})
        """slots of each group's records, for even and for odd batches"""
        self._is_ended = False
        embedding_memory.start(memory.device)

    def end(self) -> None:
        """Stops the count: what is made from here on is not part of it."""
        if not self._is_ended:
            self._is_ended = True
            self.peak_bytes = embedding_memory.peak_bytes
            embedding_memory.stop()

    def error(self, number: int, route: Route, plan: Plan | None) -> ValueError | None:
        """Returns why this batch, the number-th, does not fit."""
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
        num_owned = sum(len(owned.keys) for owned in route.owned)
        num_keys = sum(len(group.keys) for group in route.batch.groups)
        return (
            f"a batch with {num_keys:,} distinct keys, {num_owned:,} owned by this rank, in "
            f"{route.batch.num_micro_batches} micro-batches needs more device memory for its embeddings than "
            f"memory.device_budget_bytes, {megabytes(self.budget_bytes)} MB: {needed}. It was not trained. {REMEDY}"
        )

    def _records(self, number: int, route: Route) -> int:
        """As RecordMemory makes them. One that has become too small lives until the batch before is written back."""
        here, other = self._room[number % 2], self._room[1 - number % 2]
        total = 0
        for g, owned in enumerate(route.owned):
            num_keys, before = len(owned.keys), here.get(g, 0)
            if num_keys > before:
                here[g] = num_keys + num_keys // 4
            replaced = before if num_keys > before else 0
            room = here.get(g, 0)
            total += (room + max(room, other.get(g, 0)) + replaced) * owned.group.record_bytes
        return total

    def _lists(self, route: Route, plan: Plan | None) -> int:
        """Those of this batch and the one before. In overlapping schedules also of the one before that, which is
        forgotten when its successor has been written back, of two that follow, and of the overlaps of neighbours."""
        of_batch = _tensor_bytes(route.batch) + (_tensor_bytes(plan) if plan is not None else 0)
        if not self._is_overlapping:
            return 2 * of_batch
        return 5 * of_batch + 3 * 2 * 8 * sum(len(owned.keys) for owned in route.owned)


def megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.2f}"


def _tensor_bytes(value: OfTensors) -> int:
    """Returns the bytes of all that goes to the device with a value, each tensor counted once."""
    tensors: dict[int, Tensor] = {}

    def see(tensor: Tensor) -> Tensor:
        tensors[id(tensor)] = tensor
        return tensor

    value.map(see)
    return sum(tensor.nbytes for tensor in tensors.values())
