"""Features of jagged rows, as the embedding part hands them over, and the item that follows each position."""

from typing import Protocol

import torch
from torch import Tensor

from nestpipe.ops.sequences import Sequences


class RowTable(Protocol):
    """The table of a feature; nestpipe.embedding.table has the implementation."""

    @property
    def name(self) -> str: ...
    @property
    def dim(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...


class RowSequence(Protocol):
    """A feature whose samples have any number of rows; nestpipe.embedding.features has the implementation."""

    @property
    def table(self) -> RowTable: ...
    @property
    def rows(self) -> Tensor: ...
    @property
    def index(self) -> Tensor: ...
    @property
    def offsets(self) -> Tensor: ...
    @property
    def values(self) -> Tensor: ...
    @property
    def host_lengths(self) -> list[int]:
        """Lengths of the samples, known without waiting for a device."""


def next_items(history: RowSequence, target: RowSequence, sequences: Sequences) -> Tensor:
    """Returns [num_tokens], the row of the item that follows each position."""
    following = torch.cat([history.index[1:], history.index[:1]])
    return torch.where(sequences.is_last, target.index.index_select(0, sequences.samples), following)


def check_targets(target: RowSequence, sequences: Sequences) -> None:
    if len(target.index) != len(sequences.lengths):
        raise ValueError(
            f"feature 'target' has {len(target.index)} items for {len(sequences.lengths)} samples, must have one each"
        )
