"""Codecs: the form that rows and gradients have in messages between ranks.

A codec that loses digits must be told to the user, and is never the default. A rank's own rows and gradients pass the
codec too, so that the result does not depend on which rank owns a row, and all schedules give the same bits.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.embedding.group import TableGroup
from nestpipe.embedding.memory import Memory

CHUNK_BYTES = 8 << 20
"""Bytes of rows that are encoded at a time."""


class Codec(ABC):
    """Writes rows into messages and reads them, each row by itself. Gradients have the form of rows."""

    @abstractmethod
    def row_bytes(self, group: TableGroup) -> int:
        """Returns the size of a row in a message."""

    @abstractmethod
    def largest(self, dtype: torch.dtype) -> float:
        """Returns the largest magnitude that an element of this dtype may have, so that it is finite when read."""

    @abstractmethod
    def write(
        self, memory: Memory, rows: Tensor, places: Tensor | None, message: Tensor, message_places: Tensor | None
    ) -> None:
        """Writes rows `places` to the message, at message_places; see Memory.write_message."""

    @abstractmethod
    def read(
        self, memory: Memory, message: Tensor, message_places: Tensor | None, rows: Tensor, places: Tensor | None
    ) -> None:
        """Reads the message into rows `places`; see Memory.read_message."""

    def copy(
        self,
        memory: Memory,
        group: TableGroup,
        source: Tensor,
        from_places: Tensor | None,
        target: Tensor,
        to_places: Tensor | None,
    ) -> None:
        """Copies rows that stay on this rank, as if they had travelled; see Memory.copy_rows. Source and target may be
        the same array, if the places are the same, too."""
        num_rows = len(source if from_places is None else from_places)
        for chunk in chunks(num_rows, source):  # so that the whole of a message is never needed
            size = (chunk.stop - chunk.start) * self.row_bytes(group)
            message = memory.empty_rows(1, size, torch.uint8).flatten()
            self.write(memory, *_of_chunk(source, from_places, chunk), message, None)
            self.read(memory, message, None, *_of_chunk(target, to_places, chunk))


def chunks(num_rows: int, rows: Tensor) -> Iterator[slice]:
    """Yields chunks of rows like these."""
    step = max(1, CHUNK_BYTES // max(1, rows.shape[1] * rows.itemsize))
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def _of_chunk(rows: Tensor, places: Tensor | None, chunk: slice) -> tuple[Tensor, Tensor | None]:
    return (rows[chunk], None) if places is None else (rows, places[chunk])


class Plain(Codec):
    """The elements as they are."""

    def row_bytes(self, group: TableGroup) -> int:
        return group.row_bytes

    def largest(self, dtype: torch.dtype) -> float:
        return torch.finfo(dtype).max

    def write(
        self, memory: Memory, rows: Tensor, places: Tensor | None, message: Tensor, message_places: Tensor | None
    ) -> None:
        memory.write_message(rows, places, message, message_places)

    def read(
        self, memory: Memory, message: Tensor, message_places: Tensor | None, rows: Tensor, places: Tensor | None
    ) -> None:
        memory.read_message(message, message_places, rows, places)

    def copy(
        self,
        memory: Memory,
        group: TableGroup,
        source: Tensor,
        from_places: Tensor | None,
        target: Tensor,
        to_places: Tensor | None,
    ) -> None:
        memory.copy_rows(source, from_places, target, to_places)


PLAIN = Plain()


@dataclass(frozen=True)
class Codecs:
    """The codec of each direction."""

    rows: Codec = PLAIN
    gradients: Codec = PLAIN

    def sum_limit(self, dtype: torch.dtype, world_size: int, num_added: int = 1) -> float:
        """Returns the largest magnitude of a requester's sum of gradients that is finite in a message, and leaves the
        sum over all ranks finite. num_added: ranks whose sums are added, and sent in a message again."""
        return min(self.gradients.largest(dtype) / num_added, torch.finfo(dtype).max / (2 * world_size))


EXACT = Codecs()
