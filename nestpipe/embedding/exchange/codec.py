"""Codecs: the form that rows and gradients have in messages between ranks.

A codec that loses digits must be told to the user, and is never the default. A rank's own rows and gradients pass the
codec too, so that the result does not depend on which rank owns a row, and all schedules give the same bits.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.embedding.group import TableGroup
from nestpipe.embedding.memory import Memory


class Codec(ABC):
    """Writes rows into messages and reads them. Gradients have the form of rows."""

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
        """Copies rows that stay on this rank, as if they had travelled; see Memory.copy_rows."""
        num_rows = len(source if from_places is None else from_places)
        message = memory.empty_rows(1, num_rows * self.row_bytes(group), torch.uint8).flatten()
        self.write(memory, source, from_places, message, None)
        self.read(memory, message, None, target, to_places)


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

    def sum_limit(self, dtype: torch.dtype, world_size: int) -> float:
        """Returns the largest magnitude of a requester's sum of gradients that is finite in a message, and leaves the
        sum over all ranks finite."""
        return min(self.gradients.largest(dtype), torch.finfo(dtype).max / (2 * world_size))


EXACT = Codecs()
