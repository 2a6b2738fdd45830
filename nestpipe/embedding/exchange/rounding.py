"""Codecs that round rows and gradients to fewer bytes.

Each element is rounded to the nearest value that the form has, ties to even. Rows pass a chunk at a time, so that what
they need in addition to the message is small.
"""

from abc import abstractmethod

import torch
from torch import Tensor

from nestpipe.embedding.exchange.codec import PLAIN, Codec, chunks
from nestpipe.embedding.group import TableGroup
from nestpipe.embedding.memory import Memory

_WORD = 4
"""Encoded rows are whole words, and are copied as rows of float32: memory handles no others."""


class Rounding(Codec):
    """A codec that encodes rows as whole words."""

    @abstractmethod
    def _words(self, dim: int) -> int:
        """Returns the words of an encoded row."""

    @abstractmethod
    def _encode(self, rows: Tensor, encoded: Tensor) -> None: ...

    @abstractmethod
    def _decode(self, encoded: Tensor, dim: int, dtype: torch.dtype) -> Tensor: ...

    def _is_plain(self, dtype: torch.dtype) -> bool:
        """Returns whether rows of this dtype have this form already."""
        return False

    def row_bytes(self, group: TableGroup) -> int:
        return group.row_bytes if self._is_plain(group.dtype) else self.bytes_of(group.dim)

    def bytes_of(self, dim: int) -> int:
        """Returns the size of an encoded row."""
        return _WORD * self._words(dim)

    def write(
        self, memory: Memory, rows: Tensor, places: Tensor | None, message: Tensor, message_places: Tensor | None
    ) -> None:
        if self._is_plain(rows.dtype):
            PLAIN.write(memory, rows, places, message, message_places)
            return
        dim = rows.shape[1]
        for chunk in chunks(len(rows if places is None else places), rows):
            gathered = rows[chunk]
            if places is not None:
                gathered = memory.empty_rows(chunk.stop - chunk.start, dim, rows.dtype)
                memory.copy_rows(rows, places[chunk], gathered, None)
            encoded = memory.empty_rows(chunk.stop - chunk.start, self._words(dim), torch.float32)
            self._encode(gathered, encoded)
            memory.write_message(encoded, None, *self._part(message, message_places, chunk, dim))

    def read(
        self, memory: Memory, message: Tensor, message_places: Tensor | None, rows: Tensor, places: Tensor | None
    ) -> None:
        if self._is_plain(rows.dtype):
            PLAIN.read(memory, message, message_places, rows, places)
            return
        dim = rows.shape[1]
        for chunk in chunks(len(rows if places is None else places), rows):
            encoded = memory.empty_rows(chunk.stop - chunk.start, self._words(dim), torch.float32)
            memory.read_message(*self._part(message, message_places, chunk, dim), encoded, None)
            decoded = self._decode(encoded, dim, rows.dtype)
            if places is None:
                memory.copy_rows(decoded, None, rows[chunk], None)
            else:
                memory.copy_rows(decoded, None, rows, places[chunk])

    def _part(self, message: Tensor, places: Tensor | None, chunk: slice, dim: int) -> tuple[Tensor, Tensor | None]:
        """Returns the part of a message that has the rows of a chunk, and their places in it."""
        if places is not None:
            return message, places[chunk]
        width = self.bytes_of(dim)
        return message[chunk.start * width : chunk.stop * width], None


class Cast(Rounding):
    """Elements of another dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def largest(self, dtype: torch.dtype) -> float:
        return min(torch.finfo(dtype).max, torch.finfo(self.dtype).max)

    def _is_plain(self, dtype: torch.dtype) -> bool:
        return dtype == self.dtype

    def _words(self, dim: int) -> int:
        return -(-dim * self.dtype.itemsize // _WORD)

    def _encode(self, rows: Tensor, encoded: Tensor) -> None:
        elements = encoded.view(self.dtype)
        elements[:, : rows.shape[1]] = rows
        elements[:, rows.shape[1] :] = 0

    def _decode(self, encoded: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        return encoded.view(self.dtype)[:, :dim].to(dtype)


class ScaledInt8(Rounding):
    """Integers of one byte, and a float32 for each row by which they are multiplied: the largest magnitude of the row
    becomes 127. A row that is not finite stays so."""

    def largest(self, dtype: torch.dtype) -> float:
        return torch.finfo(torch.float32).max

    def _words(self, dim: int) -> int:
        return 1 + -(-dim // _WORD)

    def _encode(self, rows: Tensor, encoded: Tensor) -> None:
        scales = (rows.abs().amax(1) / 127).float()
        divisors = torch.where(scales == 0, 1.0, scales).to(rows.dtype)
        encoded[:, 0] = scales
        numbers = encoded[:, 1:].view(torch.int8)
        numbers[:, : rows.shape[1]] = (rows / divisors[:, None]).round_().clamp_(-127, 127)
        numbers[:, rows.shape[1] :] = 0

    def _decode(self, encoded: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        numbers = encoded[:, 1:].view(torch.int8)[:, :dim]
        return numbers.to(dtype) * encoded[:, :1].to(dtype)


ROUNDING: dict[str, Rounding] = {
    "float32": Cast(torch.float32),
    "bfloat16": Cast(torch.bfloat16),
    "float16": Cast(torch.float16),
    "int8": ScaledInt8(),
}
"""The codecs that have a name."""


def codec_of(name: str | Codec | None) -> Codec:
    """Returns the codec of a name, or a codec of the user's own; None stands for the dtype of the table."""
    if name is None:
        return PLAIN
    return ROUNDING[name] if isinstance(name, str) else name
