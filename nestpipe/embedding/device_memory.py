"""How much device memory the embedding part of a rank needs for a batch: a formula, known before a row is retrieved.

    buffers     2 x 1.25 x owned keys x (row + row state)      the active and the prefetch buffer
    slots       batches under way x (positions, occurrences, inputs, plans), and 3 x 2 places of each owned key
    rows        distinct keys x row                            kept by a requester
    leaves      keys of a micro-batch x row                    of all micro-batches that are brought ahead
    gradients   of a leaf; summed by the requester; at the owner for each requester; their sum
    exchange    messages of one micro-batch, unless they are in host memory; what a rank sends to itself

The last four are those of the moment of a batch at which they are most together (see window_memory.py). What the dense
model makes of a leaf is its own.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from nestpipe.device.streams import is_accelerator
from nestpipe.device.tally import embedding_memory
from nestpipe.device.transfer import OfTensors
from nestpipe.embedding.plan import Plans
from nestpipe.embedding.route import Route
from nestpipe.embedding.table import Table
from nestpipe.embedding.window_memory import widest

MEANINGS = {
    "buffers": "2 x 1.25 x owned keys x (row + row state)",
    "slots": "of each batch under way: positions, occurrences, inputs, plans",
    "rows": "distinct keys x row, kept by the requester",
    "leaves": "keys of each micro-batch that is brought ahead x row",
    "gradients": "of a leaf, summed by the requester, at the owner for each requester",
    "exchange": "messages of one micro-batch, and what a rank sends to itself",
}

REMEDY = (
    "Take a smaller batch, more ranks, rows of fewer columns or a row optimizer with less state; or raise the budget, "
    "if the dense model leaves room for it"
)


@dataclass(frozen=True)
class DeviceBytes:
    """Of one rank. What each term is: see the module."""

    buffers: int = 0
    slots: int = 0
    rows: int = 0
    leaves: int = 0
    gradients: int = 0
    exchange: int = 0
    staging: int = 0
    """of pinned host memory, beside it: mirrors of the buffers; messages, if they are there"""

    @property
    def terms(self) -> Mapping[str, int]:
        return {name: number for name, number in asdict(self).items() if name in MEANINGS}

    @property
    def total(self) -> int:
        return sum(self.terms.values())

    def __str__(self) -> str:
        terms = [f"{megabytes(part)} {name} ({MEANINGS[name]})" for name, part in self.terms.items() if part > 0]
        return f"{megabytes(self.total)} MB = {' + '.join(terms)}"


class DeviceMemory:
    """The formula, batch by batch, against a budget. Buffers never shrink, so it remembers how large they are."""

    def __init__(
        self,
        budget_bytes: int,
        rank: int,
        device: torch.device,
        *,
        is_windowed: bool,
        is_overlapping: bool,
        is_staged: bool,
    ) -> None:
        """is_staged: messages are in host memory"""
        if budget_bytes < 1:
            raise ValueError(f"device_budget_bytes is {budget_bytes}, must be at least 1")
        self.budget_bytes = budget_bytes
        self.largest = DeviceBytes()
        """what a batch so far needed at most"""
        self.peak_bytes = 0
        """what all of them did hold at most; known at the end"""
        self._rank = rank
        self._is_windowed = is_windowed
        self._is_overlapping = is_overlapping
        self._is_staged = is_staged
        self._has_mirrors = is_accelerator(device)
        self._room: tuple[dict[str, int], dict[str, int]] = ({}, {})
        """records of each table in the buffers of even and of odd batches"""
        self._is_ended = False
        embedding_memory.start(device)

    def end(self) -> None:
        """What is made from here on counts no more."""
        if not self._is_ended:
            self._is_ended = True
            self.peak_bytes = embedding_memory.peak_bytes
            embedding_memory.stop()

    def error(self, number: int, route: Route, plans: Plans) -> ValueError | None:
        """Why this batch, the number-th, does not fit."""
        window = widest(route, plans, self._rank, self._is_windowed, self._is_staged)
        buffers = self._buffers(number, route)
        staging = window.in_host + (buffers if self._has_mirrors else 0)
        parts = window.rows, window.leaves, window.gradients, window.exchange
        needed = DeviceBytes(buffers, self._slots(route, plans), *parts, staging)
        if needed.total > self.budget_bytes:
            return ValueError(self._refusal(needed, route))
        self.largest = max(self.largest, needed, key=lambda of: of.total)
        return None

    def _refusal(self, needed: DeviceBytes, route: Route) -> str:
        num_owned = sum(len(owned.keys) for owned in route.owned)
        num_keys = sum(len(table.keys) for table in route.request.tables)
        return (
            f"a batch with {num_keys:,} distinct keys, {num_owned:,} owned by this rank, in "
            f"{len(route.request.num_samples)} micro-batches needs more device memory for its embeddings than "
            f"memory.device_budget_bytes, {megabytes(self.budget_bytes)} MB: {needed}. It was not trained. {REMEDY}"
        )

    def _buffers(self, number: int, route: Route) -> int:
        """As BufferMemory makes them. One that has become too small is there until the batch before is written back."""
        here, other = self._room[number % 2], self._room[1 - number % 2]
        total = 0
        for owned in route.owned:
            name, num_keys, before = owned.table.name, len(owned.keys), here.get(owned.table.name, 0)
            if num_keys > before:
                here[name] = num_keys + num_keys // 4
            replaced = before if num_keys > before else 0
            room = here.get(name, 0)
            total += (room + max(room, other.get(name, 0)) + replaced) * _record_bytes(owned.table)
        return total

    def _slots(self, route: Route, plans: Plans) -> int:
        """Of this batch and the one before; in overlapping schedules of one more before, which is forgotten when that
        one has been written back, of two that follow, and where those that are neighbours share keys."""
        of_batch = _tensor_bytes(route.request) + _tensor_bytes(plans)
        if not self._is_overlapping:
            return 2 * of_batch
        return 5 * of_batch + 3 * 2 * 8 * sum(len(owned.keys) for owned in route.owned)


def megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.2f}"


def _record_bytes(table: Table) -> int:
    return (table.dim + table.spec(seed=0).state_width) * table.dtype.itemsize


def _tensor_bytes(value: OfTensors) -> int:
    """Of all that goes to the device with it, each tensor once."""
    tensors: dict[int, Tensor] = {}

    def see(tensor: Tensor) -> Tensor:
        tensors[id(tensor)] = tensor
        return tensor

    value.map(see)
    return sum(tensor.nbytes for tensor in tensors.values())
