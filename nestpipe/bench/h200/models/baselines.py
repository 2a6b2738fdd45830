"""The baselines of part models: the dense part alone, and the model in plain torch with all rows in device memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nestpipe.bench.h200.models.workload import Workload
from nestpipe.data.batch import Batch
from nestpipe.embedding.optim import SGD, Adagrad, Adam, RowOptimizer
from nestpipe.embedding.table import Table


@dataclass(frozen=True)
class FixedSequence:
    """Rows of equally long sequences, as a model reads them from a sequence embedding."""

    values: Tensor
    num_samples: int

    def padded(self, length: int) -> Tensor:
        return self.values.view(self.num_samples, length, -1)


class FixedPooled(dict[str, Tensor]):
    """Pooled embeddings that are columns of one tensor, as those of an accelerator are."""

    def __init__(self, joined: Tensor, dims: Mapping[str, int]) -> None:
        super().__init__(zip(dims, joined.split(list(dims.values()), dim=1), strict=True))
        self._joined = joined

    def side_by_side(self, names: Sequence[str]) -> Tensor:
        return self._joined if list(names) == list(self) else torch.cat([self[name] for name in names], dim=1)


class _Dense:
    """Trains the dense part of a model."""

    def __init__(self, workload: Workload, device: torch.device) -> None:
        self.device = device
        self.num_samples = workload.batch_size
        self.model = workload.make_model(workload).to(device)
        self._forward = torch.compile(self.model, dynamic=True) if workload.compiled else self.model
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-3, fused=device.type == "cuda")

    def train(self, embeddings: Mapping[str, object], inputs: Mapping[str, Tensor]) -> None:
        self.model.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self._forward(embeddings, inputs) / self.num_samples
        loss.backward()
        self.optimizer.step()


class DenseStep:
    """One step of the dense part on fixed embeddings: forward, backward, optimizer."""

    def __init__(self, workload: Workload, batch: Batch, device: torch.device) -> None:
        self._dense = _Dense(workload, device)
        dims = {name: workload.dims[workload.table_of(name)] for name in workload.lists}
        self._sequences = {
            name: _leaf(workload.batch_size * lists.most, dims[name], device)
            for name, lists in workload.lists.items()
            if lists.is_sequence
        }
        self._pooled_dims = {name: dim for name, dim in dims.items() if name not in self._sequences}
        self._pooled = _leaf(workload.batch_size, sum(self._pooled_dims.values()), device)
        self._num_samples = workload.batch_size
        self._inputs = {name: values.to(device) for name, values in batch.inputs.items()}

    def __call__(self) -> None:
        for leaf in (self._pooled, *self._sequences.values()):
            leaf.grad = None
        embeddings: Mapping[str, object] = FixedPooled(self._pooled, self._pooled_dims)
        if self._sequences:
            embeddings = {name: FixedSequence(leaf, self._num_samples) for name, leaf in self._sequences.items()}
        self._dense.train(embeddings, self._inputs)


def _leaf(num_rows: int, dim: int, device: torch.device) -> Tensor:
    return (torch.randn(num_rows, dim, device=device) * 0.02).requires_grad_()


class PlainStep:
    """One step in plain torch. All rows, and the keys of a few batches, are in device memory."""

    def __init__(self, workload: Workload, batches: list[Batch], device: torch.device) -> None:
        self._workload = workload
        self._dense = _Dense(workload, device)
        self._tables = nn.ModuleDict()
        for name, lists in workload.lists.items():
            table, dim = workload.table_of(name), workload.dims[workload.table_of(name)]
            if table not in self._tables:
                self._tables[table] = _embedding(
                    workload.num_rows, dim, lists.most > 1 and not lists.is_sequence, device
                )
        self._optimizer = _optimizer(workload.optimizer, list(self._tables.parameters()))
        self._batches = [_uploaded(batch, device) for batch in batches]
        self._number = 0

    def __call__(self) -> None:
        keys, inputs = self._batches[self._number % len(self._batches)]
        self._number += 1
        self._tables.zero_grad()
        embeddings = {name: self._embed(name, *lists) for name, lists in keys.items()}
        self._dense.train(embeddings, inputs)
        self._optimizer.step()

    def _embed(self, name: str, values: Tensor, offsets: Tensor) -> object:
        table = self._tables[self._workload.table_of(name)]
        if self._workload.lists[name].is_sequence:
            return FixedSequence(table(values), self._workload.batch_size)
        return table(values, offsets) if isinstance(table, nn.EmbeddingBag) else table(values)


def _embedding(num_rows: int, dim: int, has_bags: bool, device: torch.device) -> nn.Module:
    rows = torch.randn(num_rows, dim, device=device) * 0.02
    table: nn.Module = nn.Embedding.from_pretrained(rows, False, sparse=True)
    if has_bags:
        table = nn.EmbeddingBag.from_pretrained(rows, False, mode="sum", sparse=True, include_last_offset=True)
    return table


def _optimizer(optimizer: RowOptimizer, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if isinstance(optimizer, SGD):
        return torch.optim.SGD(parameters, 0.01)
    if isinstance(optimizer, Adagrad):
        return torch.optim.Adagrad(parameters, 0.01)
    assert isinstance(optimizer, Adam)
    return torch.optim.SparseAdam(parameters, 1e-3)


def _uploaded(batch: Batch, device: torch.device) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor]]:
    keys = {name: (lists.values.to(device), lists.offsets.to(device)) for name, lists in batch.keys.items()}
    return keys, {name: values.to(device) for name, values in batch.inputs.items()}


def record_bytes(table: Table) -> int:
    """Returns the bytes of a row and its state."""
    return table.spec(seed=0).num_columns * table.dtype.itemsize
