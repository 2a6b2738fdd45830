"""What models of histories share: the input layer, the loss of the next item, the vector of the user.

Features, all of one table (so their rows are one leaf): `history`, the items of each sample in order, from none to
max_length; `target`, one item for each sample, which follows its history; `negatives`, for each position of the history
as many items, position by position, or for each sample as many (negatives_per). No padding keys.
Inputs: `times` [n, max_length + 1] int64: when each item of the history was, then when the target; the rest is not
used. Every position predicts the item behind it, the last one the target. The loss is a sum over positions, so a batch
must have the number of items in its histories as its weight.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from nestpipe.models.stack import Stack, tile_size
from nestpipe.ops.positions import add_positions
from nestpipe.ops.row_sequences import RowSequence
from nestpipe.ops.sampled_softmax import NEGATIVES_PER, sampled_softmax, unit
from nestpipe.ops.sequences import Sequences

EXTRA_POSITIONS = 11
"""rows of the position table beyond max_length, as in the published models"""


class NextItemModel(nn.Module):
    """Input layer, then layers that take and give ([num_tokens, dim], Sequences), then the loss."""

    learns_from = "histories"

    def __init__(
        self,
        dim: int,
        max_length: int,
        layers: Callable[[torch.Generator], list[nn.Module]],
        dropout: float,
        negatives_per: str,
        temperature: float,
        seed: int,
    ) -> None:
        super().__init__()
        if negatives_per not in NEGATIVES_PER:
            raise ValueError(f"negatives_per is {negatives_per!r}, must be 'position' or 'sample'")
        if max_length < 1:
            raise ValueError(f"max_length is {max_length}, must be at least 1")
        self.dim = dim
        self.max_length = max_length
        self.negatives_per = negatives_per
        self.temperature = temperature
        generator = torch.Generator().manual_seed(seed)
        self.positions = truncated_normal((max_length + EXTRA_POSITIONS, dim), math.sqrt(1 / dim), generator)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(layers(generator))
        self._stack = Stack()

    def forward(self, embeddings: Mapping[str, RowSequence], inputs: Mapping[str, Tensor]) -> Tensor:
        """The sum over positions of the loss of the next item."""
        history, target, negatives = (self._feature(embeddings, name) for name in ("history", "target", "negatives"))
        if negatives.rows is not history.rows or target.rows is not history.rows:
            raise ValueError("the features 'history', 'target' and 'negatives' must share one table")
        sequences = self._sequences(history, inputs)
        outputs = self._outputs(history, sequences)
        return sampled_softmax(outputs, history, target, negatives, sequences, self.negatives_per, self.temperature)

    def encode(self, embeddings: Mapping[str, RowSequence], inputs: Mapping[str, Tensor]) -> Tensor:
        """[n, dim]: the user's vector after the whole history, of length 1; zeros where there is no history.

        An item's score is its product with the item's row brought to length 1. The target's time is that of the query.
        """
        history = self._feature(embeddings, "history")
        sequences = self._sequences(history, inputs)
        last = sequences.is_last.nonzero().flatten()
        outputs = unit(self._outputs(history, sequences).index_select(0, last))
        users = outputs.new_zeros(len(sequences.lengths), self.dim)
        return users.index_copy(0, sequences.samples.index_select(0, last), outputs)

    def _outputs(self, history: RowSequence, sequences: Sequences) -> Tensor:
        """[num_tokens, dim]"""
        values, scale = history.values, math.sqrt(self.dim)
        x = self.dropout(add_positions(values, self.positions, sequences, scale, tile_size(self.layers, values)))
        return self._stack(self.layers, x, sequences)

    def _sequences(self, history: RowSequence, inputs: Mapping[str, Tensor]) -> Sequences:
        times = inputs["times"]
        if times.dim() != 2 or times.shape[1] != self.max_length + 1:
            raise ValueError(
                f"times must have max_length + 1 = {self.max_length + 1} columns, got {list(times.shape)}; "
                "cut or fill up the data to the max_length of the model"
            )
        return Sequences(history.offsets, times, history.host_lengths)

    def _feature(self, embeddings: Mapping[str, RowSequence], name: str) -> RowSequence:
        feature = embeddings[name]
        if isinstance(feature, Tensor) or feature.rows.shape[1] != self.dim:
            what = "pooled" if isinstance(feature, Tensor) else f"of dim {feature.rows.shape[1]}"
            raise ValueError(f"feature {name!r} must be a sequence of dim {self.dim}, got one that is {what}")
        return feature


def normal(shape: tuple[int, ...], std: float, generator: torch.Generator) -> nn.Parameter:
    return nn.Parameter(nn.init.normal_(torch.empty(shape), std=std, generator=generator))


def truncated_normal(shape: tuple[int, ...], std: float, generator: torch.Generator) -> nn.Parameter:
    """At two standard deviations."""
    values = nn.init.trunc_normal_(torch.empty(shape), std=std, a=-2 * std, b=2 * std, generator=generator)
    return nn.Parameter(values)


def linear(width_in: int, width_out: int, generator: torch.Generator, bias: bool = False) -> nn.Linear:
    """Weights Xavier uniform, bias zero; Linear's own initialisation would draw from the default generator."""
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, width_in, width_out, bias=bias)
    nn.init.xavier_uniform_(layer.weight, generator=generator)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer
