"""Embeddings that torch.compile can trace: plain tensors, made before the compiled model is called.

`Embeddings` makes a feature when the model reads it, by native calls and kernels of our own, which torch.compile cannot
follow. Here all pooled features are made first, side by side, so that the compiled model begins with few tensors and
cuts its features out of them.

Importing this module imports torch's compiler, and Triton with it. So only what compiles imports it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nestpipe.embedding.features import Embeddings, SequenceEmbedding


def compile_model(model: nn.Module) -> Callable[[Embeddings, Mapping[str, Tensor]], Any]:
    """Returns the model, compiled by torch. Sizes are dynamic: micro-batches differ in them."""
    compiled = torch.compile(model, dynamic=True)
    return lambda embeddings, inputs: compiled(TraceableEmbeddings(embeddings), inputs)


class TraceableEmbeddings(Mapping[str, "SequenceEmbedding | Tensor"]):
    """The same mapping as Embeddings."""

    def __init__(self, embeddings: Embeddings) -> None:
        self._names = list(embeddings)
        self._sets = embeddings.pooled_sets()
        self._joined = [embeddings.side_by_side(names) for names in self._sets]
        self._columns: dict[str, tuple[int, int, int]] = {}
        """Tensor of each pooled feature, its first column and its end."""
        for s, names in enumerate(self._sets):
            end = 0
            for name in names:
                first, end = end, end + embeddings.dim(name)
                self._columns[name] = s, first, end
        self._sequences = {
            name: TraceableSequence(embeddings.sequence(name), embeddings.is_by_index(name))
            for name in self._names
            if name not in self._columns
        }

    def __getitem__(self, name: str) -> "SequenceEmbedding | Tensor":
        if name in self._columns:
            s, first, end = self._columns[name]
            return self._joined[s][:, first:end]
        return self._sequences[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def side_by_side(self, names: Iterable[str] | None = None) -> Tensor:
        """See Embeddings.side_by_side."""
        names = self._names if names is None else list(names)
        for s in range(len(self._sets)):
            if names == self._sets[s]:
                return self._joined[s]
        parts = []
        for name in names:
            s, first, end = self._columns[name]
            parts.append(self._joined[s][:, first:end])
        return torch.cat(parts, dim=1)


class TraceableSequence(SequenceEmbedding):
    """A sequence of rows as plain tensors. What is not made beforehand interrupts the compiled model."""

    def __init__(self, sequence: SequenceEmbedding, is_by_index: bool) -> None:
        self._sequence = sequence
        self.table = sequence.table
        self._rows = sequence.rows if is_by_index else None
        self._offsets = sequence.offsets
        self._values = None if is_by_index else sequence.values
        self._length = _common_length(sequence.host_offsets)

    @property
    def rows(self) -> Tensor:
        return _rows(self._sequence) if self._rows is None else self._rows

    @property
    def index(self) -> Tensor:
        return _index(self._sequence)

    @property
    def offsets(self) -> Tensor:
        return self._offsets

    @property
    def host_offsets(self) -> Tensor:
        return _host_offsets(self._sequence)

    @property
    def values(self) -> Tensor:
        return _values(self._sequence) if self._values is None else self._values

    def padded(self, length: int) -> Tensor:
        if self._values is None or length != self._length:
            return _padded(self._sequence, length)
        return self._values.view(-1, length, self._values.shape[1])


def _common_length(host_offsets: Tensor) -> int:
    """Returns the length of all sequences; -1 if they differ."""
    num_samples = len(host_offsets) - 1
    if num_samples == 0:
        return -1
    length = int(host_offsets[-1]) // num_samples
    return length if torch.equal(host_offsets, torch.arange(num_samples + 1) * length) else -1


# Calls that torch.compile does not trace.
_rows: Callable[[SequenceEmbedding], Tensor] = torch.compiler.disable(lambda sequence: sequence.rows)
_index: Callable[[SequenceEmbedding], Tensor] = torch.compiler.disable(lambda sequence: sequence.index)
_host_offsets: Callable[[SequenceEmbedding], Tensor] = torch.compiler.disable(lambda sequence: sequence.host_offsets)
_values: Callable[[SequenceEmbedding], Tensor] = torch.compiler.disable(lambda sequence: sequence.values)
_padded: Callable[[SequenceEmbedding, int], Tensor] = torch.compiler.disable(
    lambda sequence, length: sequence.padded(length)
)
