"""HSTU: predicts the next item of a history by attention without softmax, with weights for distance and time.

nestpipe/models/sequence.py describes the features and inputs.
"""

import torch
from torch import Tensor

from nestpipe.models.sequence import AttentionLayer, LayerOptions, NextItemModel, linear
from nestpipe.ops.hstu import HSTUWeights, hstu_layer
from nestpipe.ops.sequences import Sequences
from nestpipe.registry import models


@models.register("hstu")
class HSTU(NextItemModel):
    """Hierarchical sequential transduction units (HSTU): predicts the next item by attention without softmax.

    The defaults are those published for MovieLens-1M.
    """

    def __init__(
        self,
        dim: int = 50,
        max_length: int = 200,
        num_layers: int = 2,
        num_heads: int = 1,
        dim_qk: int = 50,
        dim_v: int = 50,
        dropout: float = 0.2,
        negatives_per: str = "position",
        temperature: float = 0.05,
        attention: str = "blocked",
        seed: int = 0,
    ) -> None:
        options = LayerOptions(dim, max_length, num_heads, dim_qk, dim_v, dropout, attention)
        super().__init__(HSTULayer, options, num_layers, negatives_per, temperature, seed)


class HSTULayer(AttentionLayer):
    """A layer of HSTU; nestpipe/ops/hstu.py has the formula."""

    def __init__(self, options: LayerOptions, generator: torch.Generator) -> None:
        super().__init__(options, 1, generator)
        self.out = linear(self.num_heads * self.dim_v, options.dim, generator, bias=True)

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        weights = HSTUWeights(self.w_uvqk, self.w_pos, self.w_ts, self.out.weight, self.out.bias)
        dropout = self.dropout.p if self.dropout.training else 0.0
        return hstu_layer(x, weights, sequences, self.num_heads, self.dim_v, dropout, self.attention)
