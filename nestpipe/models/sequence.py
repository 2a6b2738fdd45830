"""Base of the models of histories: input layer, parameters of attention, loss of the next item, vector of the user.

Features, which share one table and have no padding keys:
    history     the items of each sample in order, at most max_length of them
    target      the item that follows each history
    negatives   the same number of items for each position, position by position, or for each sample (negatives_per)
With negatives for each position, `target` and `negatives` are declared with Sequence(by_index=True): the rows of all
negatives at once would not fit into a device's memory.
Inputs:
    times       [n, max_length + 1] int64, the times of the items of a history, then of the target; the rest is not read

Every position predicts the item after it; the last one predicts the target. The loss is a sum over positions, so the
weight of a batch must be the number of items in its histories.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nestpipe.models.stack import Stack, tile_size
from nestpipe.ops.attention import check_form
from nestpipe.ops.attention import tile_size as attention_tile_size
from nestpipe.ops.row_sequences import RowSequence
from nestpipe.ops.sampled_softmax import NEGATIVES_PER, sampled_softmax, unit
from nestpipe.ops.sequences import NUM_TIME_BUCKETS, Sequences, add_positions

EXTRA_POSITIONS = 11
"""Rows of the position table beyond max_length, as in the published models."""
STD = 0.02
"""Standard deviation of the initial weights of attention."""


@dataclass(frozen=True)
class LayerOptions:
    """Options that every layer of a model of histories has."""

    dim: int
    max_length: int
    num_heads: int
    dim_qk: int
    dim_v: int
    dropout: float
    attention: str
    """Form of attention: "blocked", "kernel" or "plain"."""


class AttentionLayer(nn.Module):
    """Base of layers: the projection to gates u and to v, q, k, the weights of position and time, and dropout."""

    def __init__(self, options: LayerOptions, num_gates: int, generator: torch.Generator) -> None:
        """num_gates: width of u as a multiple of the width of v."""
        super().__init__()
        check_form(options.attention)
        self.num_heads = num_heads = options.num_heads
        self.dim_qk, self.dim_v = options.dim_qk, options.dim_v
        self.attention = options.attention
        self.widths = [num_heads * width for width in (num_gates * self.dim_v, self.dim_v, self.dim_qk, self.dim_qk)]
        self.w_uvqk = normal((options.dim, sum(self.widths)), STD, generator)
        self.w_pos = normal((2 * options.max_length - 1,), STD, generator)
        self.w_ts = normal((NUM_TIME_BUCKETS,), STD, generator)
        self.dropout = nn.Dropout(options.dropout)

    def tile_size(self, x: Tensor) -> int | None:
        return attention_tile_size(x, self.dim_qk, self.dim_v, self.attention)


class NextItemModel(nn.Module):
    """Input layer, then layers from [num_tokens, dim] and Sequences to [num_tokens, dim], then the loss.

    The initial parameters depend on the seed alone.
    """

    learns_from = "histories"

    def __init__(
        self,
        make_layer: Callable[[LayerOptions, torch.Generator], nn.Module],
        options: LayerOptions,
        num_layers: int,
        negatives_per: str,
        temperature: float,
        seed: int,
    ) -> None:
        super().__init__()
        if negatives_per not in NEGATIVES_PER:
            raise ValueError(f"negatives_per is {negatives_per!r}, must be 'position' or 'sample'")
        if options.max_length < 1:
            raise ValueError(f"max_length is {options.max_length}, must be at least 1")
        self.dim = dim = options.dim
        self.max_length = options.max_length
        self.negatives_per = negatives_per
        self.temperature = temperature
        generator = torch.Generator().manual_seed(seed)
        self.positions = truncated_normal((self.max_length + EXTRA_POSITIONS, dim), math.sqrt(1 / dim), generator)
        self.dropout = nn.Dropout(options.dropout)
        self.layers = nn.ModuleList([make_layer(options, generator) for _ in range(num_layers)])
        self._stack = Stack()

    def forward(self, embeddings: Mapping[str, RowSequence], inputs: Mapping[str, Tensor]) -> Tensor:
        """Returns the sum over positions of the loss of the next item."""
        history, target, negatives = (self._feature(embeddings, name) for name in ("history", "target", "negatives"))
        if len({feature.table.name for feature in (history, target, negatives)}) > 1:
            raise ValueError("the features 'history', 'target' and 'negatives' must share one table")
        sequences = self._sequences(history, inputs)
        outputs = self._outputs(history, sequences)
        return sampled_softmax(outputs, history, target, negatives, sequences, self.negatives_per, self.temperature)

    def encode(self, embeddings: Mapping[str, RowSequence], inputs: Mapping[str, Tensor]) -> Tensor:
        """Returns [n, dim], a user's unit vector after the whole history; zeros for an empty history.

        An item's score is the product of this vector with the item's row divided by its length. The time of the target
        is that of the query.
        """
        history = self._feature(embeddings, "history")
        sequences = self._sequences(history, inputs)
        last = sequences.is_last.nonzero().flatten()
        outputs = unit(self._outputs(history, sequences).index_select(0, last))
        users = outputs.new_zeros(len(sequences.lengths), self.dim)
        return users.index_copy(0, sequences.samples.index_select(0, last), outputs)

    def _outputs(self, history: RowSequence, sequences: Sequences) -> Tensor:
        """Returns [num_tokens, dim]."""
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
        if isinstance(feature, Tensor) or feature.table.dim != self.dim:
            what = "pooled" if isinstance(feature, Tensor) else f"of dim {feature.table.dim}"
            raise ValueError(f"feature {name!r} must be a sequence of dim {self.dim}, got one that is {what}")
        return feature


def normal(shape: tuple[int, ...], std: float, generator: torch.Generator) -> nn.Parameter:
    return nn.Parameter(nn.init.normal_(torch.empty(shape), std=std, generator=generator))


def truncated_normal(shape: tuple[int, ...], std: float, generator: torch.Generator) -> nn.Parameter:
    """Draws from a normal distribution truncated at two standard deviations."""
    values = nn.init.trunc_normal_(torch.empty(shape), std=std, a=-2 * std, b=2 * std, generator=generator)
    return nn.Parameter(values)


def linear(width_in: int, width_out: int, generator: torch.Generator, bias: bool = False) -> nn.Linear:
    """Returns a layer with Xavier uniform weights and zero bias."""
    # Linear's own initialisation would draw from the default generator.
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, width_in, width_out, bias=bias)
    nn.init.xavier_uniform_(layer.weight, generator=generator)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer
