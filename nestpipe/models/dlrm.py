"""DLRM: clicks from dense features and pooled embeddings, through their pairwise dot products."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DLRM(nn.Module):
    """Bottom layers num_dense -> *bottom -> dim; dot products; top layers -> *top -> 1; ReLU between layers.

    inputs: `dense` [n, num_dense] and `click` [n]. Embeddings: [n, dim] for each of feature_names, as Pooled features
    give them. The initial parameters depend on the seed alone.
    """

    pairs: Tensor

    def __init__(
        self,
        num_dense: int,
        feature_names: Sequence[str],
        dim: int,
        bottom: Sequence[int] = (128,),
        top: Sequence[int] = (256, 128),
        interaction: str = "dot",
        seed: int = 0,
    ) -> None:
        super().__init__()
        if interaction != "dot":
            raise ValueError(f"interaction is {interaction!r}, must be 'dot'")
        self.feature_names = tuple(feature_names)
        self.dim = dim
        generator = torch.Generator().manual_seed(seed)
        num_vectors = len(self.feature_names) + 1
        rows, columns = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        self.register_buffer("pairs", rows * num_vectors + columns, persistent=False)
        self.bottom = _layers([num_dense, *bottom, dim], generator)
        self.top = _layers([dim + len(rows), *top, 1], generator)

    def forward(self, embeddings: Mapping[str, object], inputs: Mapping[str, Tensor]) -> Tensor:
        """The sum of the samples' binary cross-entropies."""
        logits = self.predict(embeddings, inputs)
        return F.binary_cross_entropy_with_logits(logits, inputs["click"].to(logits.dtype), reduction="sum")

    def predict(self, embeddings: Mapping[str, object], inputs: Mapping[str, Tensor]) -> Tensor:
        """[n] logits."""
        pooled = [self._pooled(name, embeddings[name]) for name in self.feature_names]
        dense = self.bottom(inputs["dense"].to(next(self.parameters()).dtype))
        vectors = torch.stack([dense, *pooled], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        logits: Tensor = self.top(torch.cat([dense, products.index_select(1, self.pairs)], dim=1))
        return logits.squeeze(1)

    def _pooled(self, name: str, embedding: object) -> Tensor:
        if not isinstance(embedding, Tensor) or embedding.dim() != 2 or embedding.shape[1] != self.dim:
            what = list(embedding.shape) if isinstance(embedding, Tensor) else type(embedding).__name__
            raise ValueError(f"feature {name!r} must be pooled and of dim {self.dim}, got {what}")
        return embedding


def _layers(widths: Sequence[int], generator: torch.Generator) -> nn.Sequential:
    modules: list[nn.Module] = []
    for width_in, width_out in pairwise(widths):
        # Linear's own initialisation would draw from the default generator.
        linear = nn.utils.skip_init(nn.Linear, width_in, width_out)
        nn.init.kaiming_uniform_(linear.weight, nonlinearity="relu", generator=generator)
        nn.init.zeros_(linear.bias)
        modules += [linear, nn.ReLU()]
    return nn.Sequential(*modules[:-1])
