"""HSTU: the next item from a history, by attention without softmax with weights for distance and time.

nestpipe/models/sequence.py says which features and inputs it needs.
"""

import torch
from torch import Tensor, nn

from nestpipe.models.sequence import NextItemModel, linear, normal
from nestpipe.ops.attention import check_form, tile_size
from nestpipe.ops.hstu import HSTUWeights, hstu_layer
from nestpipe.ops.sequences import NUM_TIME_BUCKETS, Sequences
from nestpipe.registry import models

STD = 0.02


@models.register("hstu")
class HSTU(NextItemModel):
    """The defaults are those published for MovieLens-1M. The initial parameters depend on the seed alone."""

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
        def layers(generator: torch.Generator) -> list[nn.Module]:
            sizes = (dim, max_length, num_heads, dim_qk, dim_v)
            return [HSTULayer(*sizes, dropout, attention, generator) for _ in range(num_layers)]

        super().__init__(dim, max_length, layers, dropout, negatives_per, temperature, seed)


class HSTULayer(nn.Module):
    def __init__(
        self,
        dim: int,
        max_length: int,
        num_heads: int,
        dim_qk: int,
        dim_v: int,
        dropout: float,
        attention: str,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        check_form(attention)
        self.num_heads = num_heads
        self.dim_qk, self.dim_v = dim_qk, dim_v
        self.attention = attention
        self.w_uvqk = normal((dim, 2 * num_heads * (dim_v + dim_qk)), STD, generator)
        self.w_pos = normal((2 * max_length - 1,), STD, generator)
        self.w_ts = normal((NUM_TIME_BUCKETS,), STD, generator)
        self.dropout = nn.Dropout(dropout)
        self.out = linear(num_heads * dim_v, dim, generator, bias=True)

    def tile_size(self, x: Tensor) -> int | None:
        return tile_size(x, self.dim_qk, self.dim_v, self.attention)

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        weights = HSTUWeights(self.w_uvqk, self.w_pos, self.w_ts, self.out.weight, self.out.bias)
        dropout = self.dropout.p if self.dropout.training else 0.0
        return hstu_layer(x, weights, sequences, self.num_heads, self.dim_v, dropout, self.attention)
