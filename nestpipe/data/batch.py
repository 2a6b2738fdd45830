"""A batch holds the keys of its features, its other inputs and its weight. It is checked when it is made."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

Weight = float | Mapping[str, float]
"""Divisor of a sum of losses: a number, or one for each named loss."""

NUMPY_DTYPES = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64} | {
    torch.float16,
    torch.float32,
    torch.float64,
}
"""Dtypes that numpy has, too."""


@dataclass(frozen=True)
class Jagged:
    """Lists of keys, one for each sample, concatenated."""

    values: Tensor
    """[n] int64."""
    offsets: Tensor
    """[num_samples + 1] int64: sample s has values[offsets[s]:offsets[s + 1]]"""
    weights: Tensor | None = None
    """[n] floats, one for each key, used by pooling."""

    @staticmethod
    def from_lists(lists: Sequence[Sequence[int]]) -> "Jagged":
        lengths = torch.tensor([0, *map(len, lists)], dtype=torch.int64)
        return Jagged(torch.tensor([key for keys in lists for key in keys], dtype=torch.int64), lengths.cumsum(0))

    @staticmethod
    def one_each(values: Tensor) -> "Jagged":
        """Makes lists of one key each."""
        return Jagged(values, torch.arange(len(values) + 1))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Tensor:
        return self.offsets.diff()

    def take(self, samples: Tensor) -> "Jagged":
        """Returns the lists of these samples, in this order."""
        lengths = self.lengths[samples]
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        shift = self.offsets[:-1][samples] - offsets[:-1]
        where = torch.arange(int(offsets[-1])) + torch.repeat_interleave(shift, lengths)
        return Jagged(self.values[where], offsets, None if self.weights is None else self.weights[where])

    def split(self, sizes: Sequence[int]) -> list["Jagged"]:
        """Splits into consecutive parts of these numbers of samples."""
        parts, first = [], 0
        for size in sizes:
            offsets = self.offsets[first : first + size + 1]
            begin, end = int(offsets[0]), int(offsets[-1])
            weights = None if self.weights is None else self.weights[begin:end]
            parts.append(Jagged(self.values[begin:end], offsets - begin, weights))
            first += size
        return parts

    def map(self, function: Callable[[Tensor], Tensor]) -> "Jagged":
        """Applies a function to each tensor."""
        weights = None if self.weights is None else function(self.weights)
        return replace(self, values=function(self.values), offsets=function(self.offsets), weights=weights)

    def check(self, name: str, is_rising: bool = False) -> None:
        """Raises if the arrays do not fit. is_rising: it is known that offsets do not fall."""
        for what, array in (("values", self.values), ("offsets", self.offsets)):
            if not isinstance(array, Tensor) or array.dtype != torch.int64 or array.dim() != 1:
                raise ValueError(
                    f"feature {name!r}: {what} must be a 1-dimensional int64 tensor, got {_describe(array)}"
                )
        if len(self.offsets) == 0 or int(self.offsets[0]) != 0 or int(self.offsets[-1]) != len(self.values):
            raise ValueError(
                f"feature {name!r}: offsets must begin with 0 and end with {len(self.values)}, the number of keys, "
                f"got {self.offsets[:1].tolist()} ... {self.offsets[-1:].tolist()}"
            )
        if not is_rising and len(falls := (self.offsets.diff() < 0).nonzero()) > 0:
            raise ValueError(f"feature {name!r}: offsets must not fall, but they do after sample {int(falls[0])}")
        if self.weights is not None and (
            self.weights.shape != self.values.shape or not self.weights.is_floating_point()
        ):
            raise ValueError(
                f"feature {name!r}: weights must be floats, one for each of {len(self.values)} keys, "
                f"got {_describe(self.weights)}"
            )


@dataclass(frozen=True)
class Batch:
    """The samples that one rank trains on between two updates. A batch may be empty."""

    keys: Mapping[str, Jagged]
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    weight: Weight | None = None
    """Contribution of this batch to the divisor of the losses; None for the number of samples."""

    def __post_init__(self) -> None:
        checked: set[int] = set()  # features may share their offsets
        for name, jagged in self.keys.items():
            if not isinstance(jagged, Jagged):
                raise ValueError(f"feature {name!r} must be a Jagged, got {_describe(jagged)}")
            jagged.check(name, is_rising=id(jagged.offsets) in checked)
            checked.add(id(jagged.offsets))
        sizes = self._sizes()
        if len(set(sizes.values())) > 1:
            raise ValueError(f"the parts of a batch disagree about the number of samples: {sizes}")

    def __len__(self) -> int:
        """Returns the number of samples."""
        return len(next((part for parts in (self.keys, self.inputs) for part in parts.values()), ()))

    def _sizes(self) -> dict[str, int]:
        sizes = {name: len(jagged) for name, jagged in self.keys.items()}
        return sizes | {name: len(values) for name, values in self.inputs.items()}

    def __getitem__(self, samples: Tensor | slice) -> "Batch":
        """Returns the batch of these samples, weighted by their number."""
        if isinstance(samples, slice):
            samples = torch.arange(len(self))[samples]
        return Batch(
            {name: jagged.take(samples) for name, jagged in self.keys.items()},
            {name: values[samples] for name, values in self.inputs.items()},
        )

    def clone(self) -> "Batch":
        """Returns a copy. A tensor that occurs twice in the batch is copied once."""
        tensors = [t for lists in self.keys.values() for t in (lists.values, lists.offsets, lists.weights)]
        tensors += [value for value in self.inputs.values() if isinstance(value, Tensor)]
        copies = _copies({id(tensor): tensor.detach() for tensor in tensors if tensor is not None})

        def cloned(tensor: Tensor) -> Tensor:
            return copies[id(tensor)]

        batch = copy(self)  # not a new Batch, which would be checked again
        keys = {name: jagged.map(cloned) for name, jagged in self.keys.items()}
        inputs = {name: cloned(v) if isinstance(v, Tensor) else v for name, v in self.inputs.items()}
        weight = dict(self.weight) if isinstance(self.weight, Mapping) else self.weight
        for name, value in (("keys", keys), ("inputs", inputs), ("weight", weight)):
            object.__setattr__(batch, name, value)
        return batch

    @property
    def weights(self) -> dict[str, float]:
        """Weights by name of the loss; the name of a single unnamed loss is ''."""
        if self.weight is None:
            return {"": float(len(self))}
        return dict(self.weight) if isinstance(self.weight, Mapping) else {"": float(self.weight)}


def _copies(tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Copies tensors, those of each dtype in one call: many calls would keep other threads from Python's lock.

    numpy copies in this thread alone; torch's threads would wait for the cores that train meanwhile.
    """
    copies: dict[int, Tensor] = {}
    by_dtype: dict[torch.dtype, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        if type(tensor) is Tensor and tensor.is_cpu and tensor.dtype in NUMPY_DTYPES:
            by_dtype.setdefault(tensor.dtype, {})[name] = tensor
        else:
            copies[name] = tensor.clone()
    for group in by_dtype.values():
        joined = np.concatenate([tensor.resolve_neg().numpy().ravel() for tensor in group.values()])
        parts = torch.from_numpy(joined).split([tensor.numel() for tensor in group.values()])
        for (name, tensor), part in zip(group.items(), parts, strict=True):
            copies[name] = part if tensor.dim() == 1 else part.view(tensor.shape)
    return copies


def _describe(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
