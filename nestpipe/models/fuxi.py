"""FuXi-alpha: the next item from a history, by attention in three channels (position, time, content) and a SwiGLU.

nestpipe/models/sequence.py says which features and inputs it needs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestpipe.models.sequence import NextItemModel, linear, normal
from nestpipe.ops.attention import check_form, fuxi_attention, tile_size
from nestpipe.ops.sequences import NUM_TIME_BUCKETS, Sequences
from nestpipe.registry import models

EPS = 1e-6
STD = 0.02


@models.register("fuxi")
class FuXi(NextItemModel):
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
        ffn_multiply: int = 1,
        negatives_per: str = "position",
        temperature: float = 0.05,
        attention: str = "blocked",
        seed: int = 0,
    ) -> None:
        def layers(generator: torch.Generator) -> list[nn.Module]:
            sizes = (dim, max_length, num_heads, dim_qk, dim_v, dim * ffn_multiply)
            return [FuXiLayer(*sizes, dropout, attention, generator) for _ in range(num_layers)]

        super().__init__(dim, max_length, layers, dropout, negatives_per, temperature, seed)


class FuXiLayer(nn.Module):
    def __init__(
        self,
        dim: int,
        max_length: int,
        num_heads: int,
        dim_qk: int,
        dim_v: int,
        hidden: int,
        dropout: float,
        attention: str,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        check_form(attention)
        self.num_heads = num_heads
        self.dim_qk, self.dim_v = dim_qk, dim_v
        self.attention = attention
        self.widths = [3 * num_heads * dim_v, num_heads * dim_v, num_heads * dim_qk, num_heads * dim_qk]
        self.w_uvqk = normal((dim, sum(self.widths)), STD, generator)
        self.w_pos = normal((2 * max_length - 1,), STD, generator)
        self.w_ts = normal((NUM_TIME_BUCKETS,), STD, generator)
        self.dropout = nn.Dropout(dropout)
        self.w0 = linear(3 * num_heads * dim_v, dim, generator, bias=True)
        self.w1 = linear(dim, hidden, generator)
        self.w2 = linear(hidden, dim, generator)
        self.w3 = linear(dim, hidden, generator)

    def tile_size(self, x: Tensor) -> int | None:
        return tile_size(x, self.dim_qk, self.dim_v, self.attention)

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        out = x + self.w0(self.dropout(self._channels(x, sequences)))
        z = self.dropout(_rms_norm(out))
        gated: Tensor = out + self.w2(F.silu(self.w1(z)) * self.w3(z))
        return gated

    def _channels(self, x: Tensor, sequences: Sequences) -> Tensor:
        """[num_tokens, 3 * heads * dim_v]"""
        u, v, q, k = F.silu(_rms_norm(x) @ self.w_uvqk).split(self.widths, dim=1)
        q, k, v = (part.unflatten(1, (self.num_heads, -1)) for part in (q, k, v))
        attended = fuxi_attention(q, k, v, self.w_pos, self.w_ts, sequences, self.attention).flatten(1)
        gated: Tensor = u * _rms_norm(attended)
        return gated


def _rms_norm(x: Tensor) -> Tensor:
    normed: Tensor = F.rms_norm(x, x.shape[1:], eps=EPS)
    return normed
