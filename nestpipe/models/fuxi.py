"""FuXi-alpha: predicts the next item of a history by attention in three channels and a SwiGLU.

nestpipe/models/sequence.py describes the features and inputs.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from nestpipe.models.sequence import AttentionLayer, LayerOptions, NextItemModel, linear
from nestpipe.ops.attention import fuxi_attention
from nestpipe.ops.sequences import Sequences
from nestpipe.registry import models

EPS = 1e-6


@models.register("fuxi")
class FuXi(NextItemModel):
    """FuXi-alpha: predicts the next item by attention in separate channels for position, time and content.

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
        ffn_multiply: int = 1,
        negatives_per: str = "position",
        temperature: float = 0.05,
        attention: str = "blocked",
        seed: int = 0,
    ) -> None:
        options = LayerOptions(dim, max_length, num_heads, dim_qk, dim_v, dropout, attention)
        make_layer = partial(FuXiLayer, ffn_multiply=ffn_multiply)
        super().__init__(make_layer, options, num_layers, negatives_per, temperature, seed)


class FuXiLayer(AttentionLayer):
    """A layer of FuXi: gated attention in three channels, then a SwiGLU, each with a residual."""

    def __init__(self, options: LayerOptions, generator: torch.Generator, ffn_multiply: int) -> None:
        super().__init__(options, 3, generator)
        dim, hidden = options.dim, options.dim * ffn_multiply
        self.w0 = linear(3 * self.num_heads * self.dim_v, dim, generator, bias=True)
        self.w1 = linear(dim, hidden, generator)
        self.w2 = linear(hidden, dim, generator)
        self.w3 = linear(dim, hidden, generator)

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        out = x + self.w0(self.dropout(self._channels(x, sequences)))
        z = self.dropout(_rms_norm(out))
        gated: Tensor = out + self.w2(F.silu(self.w1(z)) * self.w3(z))
        return gated

    def _channels(self, x: Tensor, sequences: Sequences) -> Tensor:
        """Returns [num_tokens, 3 * heads * dim_v]."""
        u, v, q, k = F.silu(_rms_norm(x) @ self.w_uvqk).split(self.widths, dim=1)
        q, k, v = (part.unflatten(1, (self.num_heads, -1)) for part in (q, k, v))
        attended = fuxi_attention(q, k, v, self.w_pos, self.w_ts, sequences, self.attention).flatten(1)
        gated: Tensor = u * _rms_norm(attended)
        return gated


def _rms_norm(x: Tensor) -> Tensor:
    normed: Tensor = F.rms_norm(x, x.shape[1:], eps=EPS)
    return normed
