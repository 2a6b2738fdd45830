"""Features of jagged rows, as the embedding part hands them over, and which item stands behind each."""

from typing import Protocol

import torch
from torch import Tensor

from nestpipe.ops.sequences import Sequences


class RowSequence(Protocol):
    """A feature of jagged rows."""

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
        """of the samples; without waiting for a device"""


def next_items(history: RowSequence, target: RowSequence, sequences: Sequences) -> Tensor:
    """[num_tokens] row of the item behind each position."""
    behind = torch.cat([history.index[1:], history.index[:1]])
    return torch.where(sequences.is_last, target.index.index_select(0, sequences.samples), behind)


def check_targets(target: RowSequence, sequences: Sequences) -> None:
    if len(target.index) != len(sequences.lengths):
        raise ValueError(
            f"feature 'target' has {len(target.index)} items for {len(sequences.lengths)} samples, must have one each"
        )
