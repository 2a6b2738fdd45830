"""DLRM: predicts clicks from dense features and pooled embeddings."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestpipe.registry import models

INTERACTIONS = ("dot", "cross")


@models.register("dlrm")
class DLRM(nn.Module):
    """Deep learning recommendation model (DLRM): predicts clicks from dense inputs and pooled embeddings.

    Bottom layers num_dense -> *bottom -> dim, then the interaction, then top layers -> *top -> 1, with ReLU between
    layers. The interaction "dot" concatenates the bottom's output with the pairwise dot products of that output and the
    embeddings. The interaction "cross" is a low-rank cross network (DCN v2) on the concatenation of them all.

    Inputs are `dense` [n, num_dense], `click` [n] and, if samples have weights, `weight` [n]. Embeddings are [n, dim]
    for each of feature_names, from Pooled features. The initial parameters depend on the seed alone.
    """

    learns_from = "clicks"
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
        cross_layers: int = 3,
        cross_rank: int = 512,
    ) -> None:
        super().__init__()
        if interaction not in INTERACTIONS:
            raise ValueError(f"interaction is {interaction!r}, must be 'dot' or 'cross'")
        self.feature_names = tuple(feature_names)
        self.dim = dim
        generator = torch.Generator().manual_seed(seed)
        num_vectors = len(self.feature_names) + 1
        self.cross: CrossNetwork | None = None
        width = num_vectors * dim
        if interaction == "dot":
            rows, columns = torch.tril_indices(num_vectors, num_vectors, offset=-1)
            self.register_buffer("pairs", rows * num_vectors + columns, persistent=False)
            width = dim + len(rows)
        self.bottom = _layers([num_dense, *bottom, dim], generator)
        self.top = _layers([width, *top, 1], generator)
        if interaction == "cross":
            self.cross = CrossNetwork(width, cross_layers, cross_rank, generator)

    def forward(self, embeddings: Mapping[str, object], inputs: Mapping[str, Tensor]) -> Tensor:
        """Returns the sum of the samples' binary cross-entropies, each times its `weight` if there are weights."""
        logits = self.predict(embeddings, inputs)
        weights = inputs["weight"].to(logits.dtype) if "weight" in inputs else None
        return F.binary_cross_entropy_with_logits(logits, inputs["click"].to(logits.dtype), weights, reduction="sum")

    def predict(self, embeddings: Mapping[str, object], inputs: Mapping[str, Tensor]) -> Tensor:
        """Returns logits [n]."""
        pooled = self._pooled(embeddings)
        dense = self.bottom(inputs["dense"].to(next(self.parameters()).dtype))
        logits: Tensor = self.top(self._interact(dense, pooled))
        return logits.squeeze(1)

    def _interact(self, dense: Tensor, pooled: Tensor) -> Tensor:
        vectors = torch.cat([dense, pooled], dim=1)
        if self.cross is not None:
            crossed: Tensor = self.cross(vectors)
            return crossed
        vectors = vectors.view(len(vectors), len(self.feature_names) + 1, self.dim)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        return torch.cat([dense, products.index_select(1, self.pairs)], dim=1)

    def _pooled(self, embeddings: Mapping[str, object]) -> Tensor:
        """Returns the embeddings of all features side by side, [n, features * dim]."""
        side_by_side = getattr(embeddings, "side_by_side", None)  # nestpipe's embeddings are made so, without a copy
        if side_by_side is not None:
            pooled: Tensor = side_by_side(self.feature_names)
            if pooled.shape[1] == len(self.feature_names) * self.dim:
                return pooled
        return torch.cat([self._checked(name, embeddings[name]) for name in self.feature_names], dim=1)

    def _checked(self, name: str, embedding: object) -> Tensor:
        if not isinstance(embedding, Tensor) or embedding.dim() != 2 or embedding.shape[1] != self.dim:
            got = list(embedding.shape) if isinstance(embedding, Tensor) else type(embedding).__name__
            raise ValueError(f"feature {name!r} must be pooled and of dim {self.dim}, got {got}")
        return embedding


class CrossNetwork(nn.Module):
    """Cross network: each layer maps x to x_first * (x V U + b) + x, with V [width, rank] and U [rank, width]."""

    def __init__(self, width: int, num_layers: int, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        if num_layers < 1 or rank < 1:
            raise ValueError(f"cross_layers is {num_layers} and cross_rank is {rank}, both must be at least 1")
        self.v = _matrices(num_layers, (width, rank), generator)
        self.u = _matrices(num_layers, (rank, width), generator)
        self.b = nn.ParameterList([nn.Parameter(torch.zeros(width)) for _ in range(num_layers)])

    def forward(self, first: Tensor) -> Tensor:
        x = first
        for v, u, b in zip(self.v, self.u, self.b, strict=True):
            x = first * torch.addmm(b, x @ v, u) + x
        return x


def _matrices(count: int, shape: tuple[int, int], generator: torch.Generator) -> nn.ParameterList:
    matrices = [nn.init.xavier_normal_(torch.empty(shape), generator=generator) for _ in range(count)]
    return nn.ParameterList([nn.Parameter(matrix) for matrix in matrices])


def _layers(widths: Sequence[int], generator: torch.Generator) -> nn.Sequential:
    modules: list[nn.Module] = []
    for width_in, width_out in pairwise(widths):
        # Linear's own initialisation would draw from the default generator.
        linear = nn.utils.skip_init(nn.Linear, width_in, width_out)
        nn.init.kaiming_uniform_(linear.weight, nonlinearity="relu", generator=generator)
        nn.init.zeros_(linear.bias)
        modules += [linear, nn.ReLU()]
    return nn.Sequential(*modules[:-1])
