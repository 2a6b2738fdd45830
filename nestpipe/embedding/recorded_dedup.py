"""The dedup on a device as a CUDA graph: one launch instead of a hundred, each of which would need Python's lock.

The sizes of a graph are fixed. So its lists have room for a capacity of occurrences. Keys beyond those of the batch
count for no table, and become rows that no sample has. The number of distinct keys is known only afterwards; lists of
rows are then cut to it. The graph owns its memory, which the next batch overwrites, so a batch gets a copy.
"""

from collections import Counter, OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.device.graphs import Recorder
from nestpipe.device.streams import mark
from nestpipe.device.tally import embedding_memory
from nestpipe.device.transfer import Download, host_empty, uploaded_inputs
from nestpipe.embedding.dedup import BatchDedup, RequesterDedup, SampleOrder, split_inputs
from nestpipe.embedding.device_dedup import FoundKeys, dedup_on_device, requester_dedup
from nestpipe.embedding.fused import Entries, GroupOccurrences, block_numbers, pooled_vectors, sequence_vectors
from nestpipe.embedding.micro_batch_rows import UsedRows, all_rows, segments_of
from nestpipe.embedding.packed import PackedBatch, PackedKeys, SampleLayout
from nestpipe.embedding.table import Pooled
from nestpipe.kernels.dispatch import HAS_TRITON
from nestpipe.kernels.rows.pooling import DeviceOccurrences
from nestpipe.kernels.rows.segments import PIECE, Pieces, Segments

USES_BEFORE = 2
"""Batches of a shape before it is recorded: it may never come again, and its kernels must have run before."""
MOST_GRAPHS = 4
"""Graphs that are kept: those of the shapes used last."""
_STEPS_PER_DOUBLING = 8
"""Capacities between a number and its double. More waste less work, and need more graphs."""


@dataclass(frozen=True)
class GroupShape:
    """Everything that the work on a group depends on, other than its keys and where samples begin."""

    group: tuple[Hashable, ...]
    capacity: int
    num_samples: int
    is_one_each: bool
    has_long: bool
    """True if some sample has more keys than a piece."""

    @staticmethod
    def of(keys: PackedKeys, layout: SampleLayout, num_samples: int) -> "GroupShape":
        group, number = keys.group, len(keys.keys)
        identity = group.names, group.features, group.feature_sets, group.frozen
        capacity = number if layout.is_one_each else _capacity(number)
        return GroupShape(identity, capacity, num_samples, layout.is_one_each, layout.longest > PIECE)


def _capacity(number: int) -> int:
    """Returns the smallest of the capacities that holds a number of occurrences."""
    step = max(1, (1 << (number.bit_length() - 1)) // _STEPS_PER_DOUBLING)
    return -(-number // step) * step


Shape = tuple[GroupShape, ...]


def can_be_recorded(packed: PackedBatch) -> bool:
    """Returns whether a batch is of the common kind that is recorded: in one micro-batch, without padding, weights or
    means, and with keys of every group."""
    if packed.order is None or packed.order.num_parts > 1:
        return False
    features = packed.features.features.values()
    if any(isinstance(feature, Pooled) and feature.mode == "mean" for feature in features):
        return False
    return all(keys.tables is None and keys.weights is None and len(keys.keys) > 0 for keys in packed.groups)


class DeviceDedup:
    """Deduplicates the batches of a pipeline on a device, by graphs where possible."""

    def __init__(self, device: torch.device, records: bool) -> None:
        self._device = device
        self._recorder = Recorder(device) if records and HAS_TRITON else None  # plain torch waits for the device
        self._num_uses: Counter[Shape] = Counter()
        self._recordings: OrderedDict[Shape, _Recording] = OrderedDict()

    def __call__(self, packed: PackedBatch) -> BatchDedup:
        """Finds the distinct keys of a batch. Waits for the device."""
        if self._recorder is None or not can_be_recorded(packed):
            return dedup_on_device(packed, self._device)
        assert packed.order is not None
        pairs = zip(packed.groups, packed.layouts, strict=True)
        shape = tuple(GroupShape.of(keys, layout, len(packed.batch)) for keys, layout in pairs)
        recording = self._recordings.get(shape)
        if recording is None:
            self._num_uses[shape] += 1
            if self._num_uses[shape] <= USES_BEFORE:
                return dedup_on_device(packed, self._device)
            while len(self._recordings) >= MOST_GRAPHS:
                self._recordings.popitem(last=False)
            recording = self._recordings[shape] = _Recording(packed, shape, self._device, self._recorder)
        self._recordings.move_to_end(shape)
        return recording.dedup(packed, packed.order)


class _Recording:
    """The recorded work on all groups of batches of one shape."""

    def __init__(self, packed: PackedBatch, shape: Shape, device: torch.device, recorder: Recorder) -> None:
        self._device = device
        self._groups = [
            _GroupWork(keys, layout, part, packed.world_size, device)
            for keys, layout, part in zip(packed.groups, packed.layouts, shape, strict=True)
        ]
        num_counts = [len(keys.group.tables) * (1 + packed.world_size) + 1 for keys in packed.groups]
        self._count_sizes = num_counts
        self._host_counts = host_empty((sum(num_counts),), torch.int64, device)
        self._fill(packed)
        self._replay = recorder.record(self._run)

    def dedup(self, packed: PackedBatch, order: SampleOrder) -> BatchDedup:
        self._fill(packed)
        self._replay()
        copies = [work.copied_results() for work in self._groups]
        counted = mark(self._device)
        if counted is not None:
            counted.synchronize()
        counts = [part.numpy().copy() for part in self._host_counts.split(self._count_sizes)]
        bounds = [part[: len(keys.group.tables) + 1] for keys, part in zip(packed.groups, counts, strict=True)]
        pairs = zip(self._groups, bounds, strict=True)
        keys_on_host = Download([work.keys(int(ends[-1])) for work, ends in pairs])
        inputs = uploaded_inputs(split_inputs(packed.batch, order), self._device)
        groups = [
            work.result(copy, keys, layout, ends, part, host_keys, order)
            for work, copy, keys, layout, ends, part, host_keys in zip(
                self._groups, copies, packed.groups, packed.layouts, bounds, counts, keys_on_host.wait(), strict=True
            )
        ]
        return BatchDedup(groups, inputs, order.sizes, packed.batch.weights, packed.has_batch)

    def _fill(self, packed: PackedBatch) -> None:
        for work, keys, layout in zip(self._groups, packed.groups, packed.layouts, strict=True):
            work.fill(keys, layout)

    def _run(self) -> None:
        for work in self._groups:
            work.run()
        self._host_counts.copy_(torch.cat([work.counts for work in self._groups]), non_blocking=True)


class _GroupWork:
    """The recorded work on one group, and the memory that it reads and writes."""

    def __init__(
        self, packed: PackedKeys, layout: SampleLayout, shape: GroupShape, world_size: int, device: torch.device
    ) -> None:
        group, num_segments = packed.group, len(layout.bounds) - 1
        self._group = group
        self._shape = shape
        self._world_size = world_size
        self._device = device
        self._layout = layout
        """Only its parts that all batches of this shape share are used."""
        self._keys = torch.zeros(shape.capacity, dtype=torch.int64, device=device)
        self._salts = group.salts.to(device)
        num_tables, num_blocks = len(group.tables), len(group.features)
        self._numbers = torch.zeros(num_tables + 1 + 5 * (num_blocks + 1), dtype=torch.int64, device=device)
        """Bounds of the tables, then the description of the blocks."""
        self._bounds = torch.arange(num_segments + 1, device=device)
        self._is_first = torch.ones(shape.capacity, dtype=torch.bool, device=device)
        self._positions = torch.arange(shape.capacity, device=device)
        self._distinct = torch.zeros(0, dtype=torch.int64)
        self._names: list[str] = []
        self._sizes: list[int] = []
        self._results = torch.zeros(0, dtype=torch.int64)
        self.counts = torch.zeros(0, dtype=torch.int64)
        """[tables + 1] distinct keys before each table, then of all; then [ranks * tables] distinct keys."""

    # ---- for each batch ----

    def fill(self, packed: PackedKeys, layout: SampleLayout) -> None:
        """Copies what the work reads from pinned memory to the device."""
        blocks = block_numbers(self._group, layout, 1, self._shape.capacity + 1)
        host = host_empty((len(self._numbers),), torch.int64, self._device)
        host.copy_(torch.from_numpy(np.concatenate([packed.table_bounds, blocks.ravel()])))
        self._numbers.copy_(host, non_blocking=True)
        self._keys[: len(packed.keys)].copy_(packed.keys, non_blocking=True)
        if not self._shape.is_one_each:
            self._bounds.copy_(layout.bounds, non_blocking=True)

    def copied_results(self) -> dict[str, Tensor]:
        """Returns a copy of the results, by name."""
        copy = self._results.clone()
        embedding_memory.add(copy)
        return dict(zip(self._names, copy.split(self._sizes), strict=True))

    def keys(self, number: int) -> Tensor:
        """Returns the distinct keys, until the next batch."""
        return self._distinct[:number]

    def result(
        self,
        results: dict[str, Tensor],
        packed: PackedKeys,
        layout: SampleLayout,
        ends: NDArray[np.int64],
        counts: NDArray[np.int64],
        keys: Tensor,
        order: SampleOrder,
    ) -> RequesterDedup:
        """Returns the dedup of a batch. ends: distinct keys before each table, then of all."""
        num_rows = int(ends[-1])
        rows, bounds = results["rows"], results.get("bounds", self._bounds)
        sets = [self._occurrences(s, results, layout, num_rows) for s in range(len(self._group.feature_sets))]
        row_counts = np.diff(ends)[None]
        used = UsedRows(
            rows=rows,
            bounds=bounds,
            segments=None,
            sources=None,
            row_positions=results.get("row positions", self._positions)[:num_rows],
            is_first=self._is_first[:num_rows],
            uses=torch.ones(num_rows, 1, dtype=torch.uint8),
            row_counts=row_counts,
            row_offsets=[0, num_rows],
        )
        occurrences = GroupOccurrences(self._group, [sets], layout, rows, bounds, row_counts)
        return requester_dedup(packed, keys, torch.from_numpy(counts[len(ends) :]), order, used, occurrences)

    def _occurrences(
        self, s: int, results: dict[str, Tensor], layout: SampleLayout, num_rows: int
    ) -> DeviceOccurrences:
        feature_set = self._group.feature_sets[s]
        if feature_set.is_pooled:
            vectors = _cut(results, f"set {s}", results["rows"], None)
        else:
            vectors = sequence_vectors(feature_set, 0, self._group, layout, results["rows"])
        if self._group.frozen:
            return DeviceOccurrences(vectors, None)
        return DeviceOccurrences(vectors, _cut(results, f"rows of set {s}", results["vectors"], num_rows))

    # ---- recorded ----

    def run(self) -> None:
        """Does the work. What it allocates stays until the work is done again."""
        shape, group = self._shape, self._group
        table_bounds = self._numbers[: len(group.tables) + 1]
        blocks = self._numbers[len(table_bounds) :].view(5, -1)
        found = FoundKeys.find(self._keys, None, table_bounds, self._salts, has_rest=not shape.is_one_each)
        fixed = np.array([0] * len(group.tables) + [shape.capacity])
        ordered = found.in_order(fixed, self._world_size)
        segments = None if shape.is_one_each else segments_of(self._bounds, shape.capacity)
        used = all_rows(ordered.row_order, self._bounds, segments)
        results = {"rows": used.rows}
        if not shape.is_one_each:
            results["bounds"] = self._bounds
        if ordered.row_order.position_of_row is not None:
            results["row positions"] = used.row_positions
        num_sets = len(group.feature_sets)
        for s, feature_set in enumerate(group.feature_sets):
            if feature_set.is_pooled:
                vectors = pooled_vectors(feature_set, 0, group, self._layout, used, shape.capacity, False)
                results |= _named(f"set {s}", vectors, used.rows)
        if not group.frozen:
            entries = Entries.sort(blocks, used, num_sets, shape.capacity)
            results["vectors"] = entries.vectors
            for s in range(num_sets):
                rows = entries.rows(s, shape.capacity, shape.capacity, is_weighted=False)
                results |= _named(f"rows of set {s}", rows, entries.vectors)
        self._names, self._sizes = list(results), [tensor.numel() for tensor in results.values()]
        if len(self._results) == 0:
            self._results = torch.empty(sum(self._sizes), dtype=torch.int64, device=self._device)
        torch.cat([tensor.reshape(-1) for tensor in results.values()], out=self._results)
        self._distinct = ordered.keys
        self.counts = torch.cat([found.num_distinct.long(), ordered.counts.long()])


def _named(name: str, segments: Segments, order: Tensor) -> dict[str, Tensor]:
    """Returns the arrays of segments by name. order: their order if it has a name already."""
    arrays = {"order": segments.order, "offsets": segments.offsets, "ends": segments.ends}
    if segments.order is order:
        del arrays["order"]
    if segments.pieces is not None:
        pieces = segments.pieces
        arrays |= {"starts": pieces.starts, "piece ends": pieces.ends, "firsts": pieces.firsts, "lasts": pieces.lasts}
    return {f"{name}: {part}": array for part, array in arrays.items() if array is not None}


def _cut(results: dict[str, Tensor], name: str, order: Tensor, number: int | None) -> Segments:
    """Returns the first segments of those that _named has named; all if number is None."""
    arrays = {part.removeprefix(f"{name}: "): array for part, array in results.items() if part.startswith(f"{name}: ")}
    order, offsets, ends = arrays.get("order", order), arrays.get("offsets"), arrays.get("ends")
    if number is None:
        number = len(order) if offsets is None else len(offsets) - (ends is None)
    if offsets is not None:
        offsets = offsets[: number + (ends is None)]
    pieces = None
    if "starts" in arrays:
        firsts, lasts = arrays["firsts"][:number], arrays["lasts"][:number]
        pieces = Pieces(arrays["starts"], arrays["piece ends"], firsts, lasts)
    return Segments(number, order, offsets, None if ends is None else ends[:number], None, pieces)
