"""The workloads of `bench planner`, and a model whose compute takes time but no processor."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from nestpipe.bench.network.loop import FEATURE
from nestpipe.embedding.features import Embeddings, SequenceEmbedding

BACKWARD_SHARE = 2 / 3
"""Share of the dense compute that is the backward."""


@dataclass(frozen=True)
class Workload:
    name: str
    pace: float
    """Dense compute of an unsplit batch, relative to serial's exchange."""
    split_pace: float
    """Dense compute that each further micro-batch adds, likewise."""
    overlap: float
    """Share of a batch's keys that the batch before has, too."""


WORKLOADS = (
    Workload("exchange-heavy", 0.7, 0.01, 0.3),
    Workload("dense-heavy", 3.0, 0.05, 0.3),
    Workload("tiny-dense", 0.03, 0.03, 0.3),
    Workload("high-overlap", 1.5, 0.01, 0.8),
)


class Paced(nn.Module):
    """Sleeps for the time of its compute. Gradients are constants."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim, dim))
        self.batch_ms = 0.0
        """Compute of an unsplit batch."""
        self.micro_batch_ms = 0.0
        """Compute that each micro-batch adds."""

    def forward(self, embeddings: Embeddings, inputs: Mapping[str, Tensor]) -> Tensor:
        history = embeddings[FEATURE]
        assert isinstance(history, SequenceEmbedding)
        compute_ms = float(inputs["share"].sum()) * self.batch_ms + self.micro_batch_ms
        loss: Tensor = _Compute.apply(history.rows, self.weight, compute_ms)  # type: ignore[no-untyped-call]
        return loss


class _Compute(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, compute_ms: float) -> Tensor:
        ctx.shapes, ctx.compute_ms = (rows.shape, weight.shape), compute_ms
        time.sleep((1 - BACKWARD_SHARE) * compute_ms / 1e3)
        return rows.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, None]:
        time.sleep(BACKWARD_SHARE * ctx.compute_ms / 1e3)
        rows, weight = (torch.full(shape, 1e-3) for shape in ctx.shapes)
        return rows, weight, None
