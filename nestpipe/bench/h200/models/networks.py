"""The dense parts of part models."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestpipe.bench.h200.models.workload import Lists, Workload
from nestpipe.embedding.optim import SGD, Adagrad, Adam
from nestpipe.models import DLRM

NUM_DENSE = 13
LENGTH, NUM_NEGATIVES, WIDTH = 128, 64, 256


class Rows(Protocol):
    """The part of a sequence embedding that the transformer reads."""

    @property
    def values(self) -> Tensor: ...
    def padded(self, length: int) -> Tensor: ...


class MultiHot(nn.Module):
    """A perceptron on the concatenated features."""

    def __init__(self, width: int, hidden: tuple[int, ...]) -> None:
        super().__init__()
        widths = (width, *hidden)
        layers = [layer for a, b in zip(widths, hidden, strict=False) for layer in (nn.Linear(a, b), nn.ReLU())]
        self.layers = nn.Sequential(*layers, nn.Linear(hidden[-1], 1))

    def forward(self, embeddings: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> Tensor:
        logits = self.layers(torch.cat(list(embeddings.values()), dim=1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, inputs["click"].to(logits.dtype), reduction="sum")


class Transformer(nn.Module):
    """Torch's own encoder layers on histories. The last position predicts the target among negatives."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)

    def forward(self, embeddings: Mapping[str, Rows], inputs: Mapping[str, Tensor]) -> Tensor:
        users = self.encoder(embeddings["history"].padded(LENGTH) + self.positions)[:, -1]
        target = embeddings["target"].values
        negatives = embeddings["negatives"].values.view(len(target), -1, WIDTH)
        items = torch.cat([target[:, None], negatives], dim=1)
        logits = torch.bmm(items.to(users.dtype), users[:, :, None]).squeeze(2).float()
        return F.cross_entropy(logits, logits.new_zeros(len(logits), dtype=torch.int64), reduction="sum")


def _dlrm(workload: Workload) -> nn.Module:
    dim = next(iter(workload.dims.values()))
    return DLRM(NUM_DENSE, tuple(workload.lists), dim, (512, 256), (1024, 1024, 512))


def _multi_hot(*hidden: int) -> Callable[[Workload], nn.Module]:
    def make(workload: Workload) -> nn.Module:
        torch.manual_seed(0)
        return MultiHot(sum(workload.dims[workload.table_of(name)] for name in workload.lists), hidden)

    return make


def _transformer(workload: Workload) -> nn.Module:
    torch.manual_seed(0)
    return Transformer()


def _tables(number: int) -> list[str]:
    return [f"t{i:03d}" for i in range(number)]


def _pooled(name: str, number: int, dims: tuple[int, ...], lists: Lists, **sizes: Any) -> Workload:
    tables = _tables(number)
    by_table = {table: dims[i % len(dims)] for i, table in enumerate(tables)}
    return Workload(name, lists=dict.fromkeys(tables, lists), table_of=str, dims=by_table, **sizes)


def workloads() -> list[Workload]:
    dlrm = {
        "num_rows": 1_000_000,
        "batch_size": 32_768,
        "optimizer": Adagrad(0.01),
        "make_model": _dlrm,
        "num_dense": NUM_DENSE,
    }
    one_key = Lists(1, 1)
    return [
        _pooled("dlrm", 26, (128,), one_key, **dlrm),
        _pooled("dlrm-10", 26, (128,), one_key, **dlrm, resident_share=0.1),
        _pooled(
            "many-tables",
            100,
            (16, 32, 64, 128),
            Lists(1, 20),
            num_rows=100_000,
            batch_size=8_192,
            optimizer=Adagrad(0.01),
            make_model=_multi_hot(1024, 512),
        ),
        _pooled(
            "multi-hot-sgd",
            20,
            (64,),
            Lists(1, 10),
            num_rows=500_000,
            batch_size=16_384,
            optimizer=SGD(0.01),
            make_model=_multi_hot(512, 128),
        ),
        Workload(
            "transformer",
            num_rows=4_000_000,
            batch_size=1_024,
            lists={
                "history": Lists(LENGTH, LENGTH, is_sequence=True),
                "target": Lists(1, 1, is_sequence=True),
                "negatives": Lists(NUM_NEGATIVES, NUM_NEGATIVES, is_sequence=True),
            },
            table_of=lambda name: "item",
            dims={"item": WIDTH},
            optimizer=Adam(1e-3),
            make_model=_transformer,
        ),
    ]
