"""How the rows of all tables lie in one message."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nestpipe.device.streams import is_accelerator
from nestpipe.device.tally import embedding_memory
from nestpipe.device.transfer import host_empty
from nestpipe.embedding.memory import recycled
from nestpipe.embedding.table import Table

ALIGNMENT = 16
"""bytes: what a device reads and writes at once"""


class Layout:
    """Rank after rank, and for each table after table; the rows of each begin at a multiple of 16 bytes. What this rank
    sends to itself is in no message."""

    def __init__(self, tables: Sequence[Table], counts: Sequence[Sequence[int]], rank: int) -> None:
        """counts[table][rank] rows"""
        self._tables = tables
        self._counts = counts
        self._others = [r for r in range(len(counts[0])) if r != rank]
        self.sizes = [0] * len(counts[0])
        """bytes of each rank's part"""
        self.num_row_bytes = 0
        """of rows alone"""
        for other in self._others:
            row_bytes = [_bytes(table, of[other]) for table, of in zip(tables, counts, strict=True)]
            self.sizes[other] = sum(map(filled_up, row_bytes))
            self.num_row_bytes += sum(row_bytes)

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes)

    def message(self, device: torch.device, is_staged: bool) -> Tensor:
        """Memory for one, anything yet, for rows that are on this device."""
        if not is_accelerator(device):
            made = recycled.empty((self.num_bytes,), torch.uint8)
        elif is_staged:
            made = host_empty((self.num_bytes,), torch.uint8, device)
        else:
            made = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        embedding_memory.add(made)
        return made

    def rows(self, message: Tensor) -> list[dict[int, Tensor]]:
        """For each table by rank: where its rows lie in the message."""
        found: list[dict[int, Tensor]] = [{} for _ in self._tables]
        first = 0
        for other in self._others:
            for table, of, by_rank in zip(self._tables, self._counts, found, strict=True):
                num_bytes = _bytes(table, of[other])
                part = message[first : first + num_bytes]
                by_rank[other] = part.view(table.dtype).view(of[other], table.dim)
                first += filled_up(num_bytes)
        return found


def _bytes(table: Table, num_rows: int) -> int:
    return num_rows * table.dim * table.dtype.itemsize


def filled_up(num_bytes: int) -> int:
    """To a multiple of 16 bytes."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
