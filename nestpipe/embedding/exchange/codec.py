"""Codecs: the form that rows and gradients have in messages between ranks.

A codec that loses digits must be told to the user, and is never the default. All schedules give the same bits with it,
because they send the same messages. In a world of one nothing travels, so no codec is used.
"""

from typing import Protocol

import torch
from torch import Tensor

from nestpipe.embedding.group import TableGroup
from nestpipe.embedding.memory import Memory


class Codec(Protocol):
    """Writes rows into messages and reads them. Gradients have the form of rows."""

    def row_bytes(self, group: TableGroup) -> int:
        """Returns the size of a row in a message."""

    def largest(self, dtype: torch.dtype) -> float:
        """Returns the largest magnitude that an element of this dtype may have, so that it is finite when read."""

    def write(
        self, memory: Memory, rows: Tensor, places: Tensor, message: Tensor, message_places: Tensor | None
    ) -> None:
        """Writes rows `places` to the message, at message_places; see Memory.write_message."""

    def read(
        self, memory: Memory, message: Tensor, message_places: Tensor | None, rows: Tensor, places: Tensor | None
    ) -> None:
        """Reads the message into rows `places`; see Memory.read_message."""


class Plain:
    """The elements as they are."""

    def row_bytes(self, group: TableGroup) -> int:
        return group.row_bytes

    def largest(self, dtype: torch.dtype) -> float:
        return torch.finfo(dtype).max

    def write(
        self, memory: Memory, rows: Tensor, places: Tensor, message: Tensor, message_places: Tensor | None
    ) -> None:
        memory.write_message(rows, places, message, message_places)

    def read(
        self, memory: Memory, message: Tensor, message_places: Tensor | None, rows: Tensor, places: Tensor | None
    ) -> None:
        memory.read_message(message, message_places, rows, places)


PLAIN = Plain()
