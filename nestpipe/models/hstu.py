"""HSTU: the next item from a history, by attention without softmax with weights for distance and time.

nestpipe/models/sequence.py says which features and inputs it needs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestpipe.models.sequence import NextItemModel, linear, normal
from nestpipe.ops.attention import check_form, hstu_attention
from nestpipe.ops.sequences import NUM_TIME_BUCKETS, Sequences

EPS = 1e-6
STD = 0.02


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
        self.attention = attention
        self.widths = [num_heads * dim_v, num_heads * dim_v, num_heads * dim_qk, num_heads * dim_qk]
        self.w_uvqk = normal((dim, sum(self.widths)), STD, generator)
        self.w_pos = normal((2 * max_length - 1,), STD, generator)
        self.w_ts = normal((NUM_TIME_BUCKETS,), STD, generator)
        self.dropout = nn.Dropout(dropout)
        self.out = linear(num_heads * dim_v, dim, generator, bias=True)

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        z = F.silu(F.layer_norm(x, x.shape[1:], eps=EPS) @ self.w_uvqk)
        u, v, q, k = z.split(self.widths, dim=1)
        q, k, v = (part.unflatten(1, (self.num_heads, -1)) for part in (q, k, v))
        attended = hstu_attention(q, k, v, self.w_pos, self.w_ts, sequences, self.attention).flatten(1)
        y = u * F.layer_norm(attended, attended.shape[1:], eps=EPS)
        out: Tensor = x + self.out(self.dropout(y))
        return out
