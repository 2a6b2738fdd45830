"""Rows of one batch at a time: each batch is retrieved whole and written back whole."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from nestpipe.device.growing import GrowingArray
from nestpipe.embedding.memory import Memory
from nestpipe.embedding.replica import TouchedKeys
from nestpipe.embedding.resident import Growth, ResidentBatch, ResidentRows, offsets_within, table_full_error
from nestpipe.store import Writer
from nestpipe.store.interface import RowStore


class BatchRows:
    """See Residence. Slot i has the record of the i-th owned key of the one batch that is resident."""

    is_limited = False

    def __init__(self, store: RowStore, memory: Memory) -> None:
        self.num_unstored_keys = 0
        """Keys of the last batch that have never been trained."""
        self._store = store
        self._writer: Writer | RowStore = store
        self._memory = memory
        self._arrays: dict[str, GrowingArray] = {}

    def open(self, writer: Writer | RowStore) -> None:
        self._writer = writer

    def close(self) -> None:
        self._writer = self._store

    def growth(self, earlier: Sequence[Sequence[TouchedKeys]], current: Sequence[TouchedKeys]) -> Growth:
        num_slots = tuple(max(len(dedup.keys), self._array(dedup).num_rows) for dedup in current)
        arrays = [self._array(dedup) for dedup in current]
        num_bytes = sum(num * array.row_bytes for num, array in zip(num_slots, arrays, strict=True))
        return Growth(num_slots, num_bytes)

    def grow(self, growth: Growth) -> None:
        pass  # retrieve does: no other batch is resident

    def retrieve(self, dedups: Sequence[TouchedKeys]) -> ResidentBatch:
        self.num_unstored_keys = 0
        groups = [self._retrieve(dedup) for dedup in dedups]
        num_keys = sum(len(rows.keys) for rows in groups)
        written = sum(len(rows.keys) * rows.group.record_bytes for rows in groups if not rows.group.frozen)
        return ResidentBatch(groups, 0, sum(len(r.keys) * r.group.record_bytes for r in groups), num_keys, written)

    def _retrieve(self, dedup: TouchedKeys) -> ResidentRows:
        array, group = self._array(dedup), dedup.group
        array.grow(len(dedup.keys))
        rows = ResidentRows(group, dedup.keys, dedup.table_offsets, array.rows[: len(dedup.keys)])
        rows.can_update_stored = self._memory.is_host and isinstance(self._writer, Writer) and self._writer.can_update

        def gather(records: Tensor, stretch: slice, places: Tensor | None) -> None:
            offsets, keys = offsets_within(dedup.table_offsets, stretch), dedup.keys[stretch]
            is_stored = self._store.gather_tables(group.names, offsets, keys, records[:, : group.num_columns], places)
            self.num_unstored_keys += len(keys) - int(is_stored.sum())

        self._memory.fill_records(rows.records, None, gather)
        return rows

    def room_error(self, batch: ResidentBatch) -> Exception | None:
        for rows in batch.groups:
            num_rows = self._store.sizes(rows.group.names)
            # Even if every key were new, and all of them in the largest table.
            has_room = int(num_rows.max()) + rows.keys.shape[0] <= int(rows.group.most_rows.min())
            if rows.group.frozen or has_room:
                continue
            is_near = (num_rows + rows.table_offsets.diff()).numpy() > rows.group.most_rows  # if every key were new
            if not is_near.any():
                continue
            is_new = ~self._store.find_tables(rows.group.names, rows.table_offsets, rows.keys)
            for t, (first, end) in enumerate(pairwise(rows.table_offsets.tolist())):
                num_rows[t] += is_new[first:end].sum()
            if (error := table_full_error(rows.group, num_rows)) is not None:
                return error
        return None

    def settle(self, batch: ResidentBatch, step: int | None) -> None:
        for rows in batch.groups:
            if step is not None and not rows.group.frozen:
                self._write_back(rows, step)

    def _write_back(self, rows: ResidentRows, step: int) -> None:
        group, update = rows.group, rows.stored_update
        if update is not None:
            assert isinstance(self._writer, Writer)
            keys = group.names, rows.table_offsets, rows.keys
            self._writer.update_tables(*keys, update.optimizer, update.gradient, step)
            rows.stored_update = None  # the batch is kept for a while; its gradient is not needed any more
            return

        def scatter(records: Tensor, stretch: slice, places: Tensor | None) -> None:
            offsets, keys = offsets_within(rows.table_offsets, stretch), rows.keys[stretch]
            self._writer.scatter_tables(group.names, offsets, keys, records[:, : group.num_columns], places, step)

        self._memory.drain_records(rows.records, None, scatter)

    def expand(self, most_bytes: int | None) -> None:
        pass

    def flush(self) -> None:
        pass

    def forget(self) -> None:
        pass

    def forget_replicas(self) -> None:
        pass

    def _array(self, dedup: TouchedKeys) -> GrowingArray:
        name = dedup.group.names[0]
        if name not in self._arrays:
            self._arrays[name] = self._memory.new_records(dedup.group.num_columns, dedup.group.dtype)
        return self._arrays[name]
