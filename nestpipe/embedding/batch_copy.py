"""Copies of batches as they are read: a reader may fill the same tensors again for its next batch.

The keys of a table group are copied one feature after the other, as an accelerator gets them. So they are not copied
again when the batch is packed.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.data.batch import Batch, Jagged
from nestpipe.data.dataset import BatchSource
from nestpipe.embedding.group import FeatureGroups, group_features
from nestpipe.embedding.table import Feature
from nestpipe.store.native import pack_ops

_ALIGNMENT = 16


@dataclass(frozen=True)
class CopiedBatch(Batch):
    """A batch whose tensors belong to the pipeline."""

    group_keys: Mapping[tuple[str, ...], Tensor] = field(default_factory=dict)
    """Keys of all features of a table group, one feature after the other, by the names of the features."""
    one_each: frozenset[str] = frozenset()
    """Features that have one key in each sample."""


def copied_source(
    batches: Iterator[Batch], data: object, features: Mapping[str, Feature], device: torch.device, num_threads: int
) -> BatchSource:
    """Returns a source of copies, in memory from which copies to the device are fastest."""
    from nestpipe.embedding.memory import memory_on  # whose batches are made of those of this module

    copier = _Copier(group_features(features), memory_on(device).new_bytes, num_threads)
    return BatchSource(batches, data, copier.copy)


class _Copier:
    def __init__(self, features: FeatureGroups, new_bytes: Callable[[int], Tensor], num_threads: int) -> None:
        self._groups = [group.features for group in features.groups]
        self._num_threads = num_threads
        self._new_bytes = new_bytes

    def copy(self, batch: Batch) -> Batch:
        """Copies by one native call. Tensors of unusual kinds are copied by torch."""
        one_each = self._one_each(batch)
        names = [name for group in self._groups for name in group if name in batch.keys]
        names += [name for name in batch.keys if name not in names]
        tensors = [batch.keys[name].values for name in names]
        tensors += [batch.keys[name].offsets for name in names if name not in one_each]
        tensors += [lists.weights for lists in batch.keys.values() if lists.weights is not None]
        tensors += [value for value in batch.inputs.values() if isinstance(value, Tensor)]
        copies = _Copies(tensors, self._num_threads, self._new_bytes)
        keys = {name: copies.jagged(lists, name in one_each) for name, lists in batch.keys.items()}
        inputs = {name: copies[v] if isinstance(v, Tensor) else v for name, v in batch.inputs.items()}
        weight = dict(batch.weight) if isinstance(batch.weight, Mapping) else batch.weight
        group_keys = {}
        for group in self._groups:
            lists = [keys[name].values for name in group if name in keys]
            if len(lists) == len(group) and (joined := copies.joined(lists)) is not None:
                group_keys[group] = joined
        copied = object.__new__(CopiedBatch)  # not a new Batch, which would be checked again
        copied.__dict__.update(keys=keys, inputs=inputs, weight=weight, group_keys=group_keys, one_each=one_each)
        return copied

    def _one_each(self, batch: Batch) -> frozenset[str]:
        """Returns features that have one key in each sample."""
        candidates = [
            name
            for name, lists in batch.keys.items()
            if lists.values.shape[0] == lists.offsets.shape[0] - 1 and _is_plain(lists.offsets)
        ]
        offsets = [batch.keys[name].offsets for name in candidates]
        flags = pack_ops.find_ranges(_arrays(offsets), self._num_threads) if offsets else []
        return frozenset(name for name, is_range in zip(candidates, flags, strict=True) if is_range)


class _Copies:
    """Copies of tensors, in one piece of memory and in order. A tensor that occurs twice is copied once."""

    def __init__(self, tensors: list[Tensor], num_threads: int, new_bytes: Callable[[int], Tensor]) -> None:
        by_id = {id(tensor): tensor for tensor in tensors}
        plain = {name: tensor for name, tensor in by_id.items() if _is_plain(tensor)}
        self._copies = {name: tensor.detach().clone() for name, tensor in by_id.items() if name not in plain}
        arrays = _arrays(list(plain.values()))
        self._memory = new_bytes(int(arrays[-1, 1] + arrays[-1, 2]) if len(arrays) else 0)
        pack_ops.copy_arrays(arrays, self._memory, num_threads)
        places = arrays[:, 2].tolist()
        self._copies |= zip(plain, _views(self._memory, list(plain.values()), places), strict=True)

    def __getitem__(self, tensor: Tensor) -> Tensor:
        return self._copies[id(tensor)]

    def jagged(self, lists: Jagged, is_one_each: bool) -> Jagged:
        offsets = shared_range(len(lists.offsets)) if is_one_each else self[lists.offsets]
        return Jagged(self[lists.values], offsets, None if lists.weights is None else self[lists.weights])

    def joined(self, parts: list[Tensor]) -> Tensor | None:
        """Returns parts as one array if they lie one after the other; else None."""
        first, number = parts[0], 0
        for part in parts:
            if part.data_ptr() != first.data_ptr() + number * first.itemsize or not part.is_cpu:
                return None
            number += part.shape[0]
        start = first.data_ptr() - self._memory.data_ptr()
        end = start + number * first.itemsize
        return self._memory[start:end].view(first.dtype) if 0 <= start <= end <= len(self._memory) else None


def _views(memory: Tensor, tensors: list[Tensor], places: list[int]) -> list[Tensor]:
    """Returns parts of memory like these tensors. Each call of torch gives Python's lock away, and the launching thread
    takes it; so tensors of one dtype that follow each other are cut from one piece."""
    views: list[Tensor] = []
    for dtype, group in groupby(zip(tensors, places, strict=True), key=lambda pair: pair[0].dtype):
        run = list(group)
        (_, first), (last_tensor, last) = run[0], run[-1]
        piece = memory[first : last + last_tensor.nbytes].view(dtype)
        ends = [*(place for _, place in run[1:]), last + last_tensor.nbytes]
        sizes = [(end - place) // dtype.itemsize for (_, place), end in zip(run, ends, strict=True)]
        # Not `split`, whose parts may not be changed in place together with a parameter.
        for (tensor, _), part in zip(run, piece.unsafe_split_with_sizes(sizes), strict=True):
            is_whole = part.shape == tensor.shape
            views.append(part if is_whole else part[: tensor.numel()].view(tensor.shape))
    return views


def _is_plain(tensor: Tensor) -> bool:
    """Returns whether a tensor is an array of bytes in host memory."""
    if not (type(tensor) is Tensor and tensor.is_cpu and tensor.is_contiguous()):
        return False
    # Only parts of complex tensors are negated or conjugated when they are read.
    return tensor.dtype == torch.int64 or not (tensor.is_neg() or tensor.is_conj())


def _arrays(tensors: list[Tensor]) -> NDArray[np.int64]:
    """Returns tensors as native calls take them: address, bytes, and a place in memory that holds them all."""
    arrays = np.zeros((len(tensors), 3), dtype=np.int64)
    arrays[:, 0] = [tensor.data_ptr() for tensor in tensors]
    arrays[:, 1] = [tensor.nbytes for tensor in tensors]
    # Arrays of 8-byte elements, which come first, lie side by side; others begin where a device reads fastest.
    sizes = -(-arrays[:, 1] // 8) * 8
    is_wide = np.array([tensor.itemsize == 8 for tensor in tensors], dtype=bool)
    place = 0
    for i, size in enumerate(sizes.tolist()):
        place = place if is_wide[i] else -(-place // _ALIGNMENT) * _ALIGNMENT
        arrays[i, 2] = place
        place += size
    return arrays


@lru_cache(maxsize=8)
def shared_range(number: int) -> Tensor:
    """Returns 0 .. number - 1. The tensor is shared: nobody may write to it."""
    return torch.arange(number)
