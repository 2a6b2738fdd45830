"""Copies of batches as a pipeline makes them.

Fails, for example, if _Copier.copy hands over an input without copying it, if find_ranges stops before the last number,
if `joined` does not check where a part begins, or if _arrays lets arrays of other widths overlap.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from nestpipe import Batch, Pooled, Sequence, Table
from nestpipe.data import Jagged
from nestpipe.embedding.batch_copy import CopiedBatch, copied_source
from nestpipe.store.native import pack_ops

A, B, OTHER = Table("a", 4), Table("b", 4), Table("other", 8)
FEATURES = {"b": Pooled(B), "other": Pooled(OTHER), "a": Sequence(A), "b_again": Pooled(B)}


def make_batch(num_samples: int = 5) -> Batch:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 4, (num_samples,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    number = int(offsets[-1])
    keys = {
        "b": Jagged.one_each(torch.randint(-9, 9, (num_samples,), generator=generator)),
        "other": Jagged(torch.randint(-9, 9, (number,), generator=generator), offsets, torch.rand(number)),
        "a": Jagged(torch.randint(-9, 9, (number,), generator=generator), offsets.clone()),
        "b_again": Jagged.one_each(torch.randint(-9, 9, (num_samples,), generator=generator)),
    }
    inputs = {
        "bytes": torch.arange(3 * num_samples, dtype=torch.uint8).view(num_samples, 3),
        "turned": torch.rand(7, num_samples).t(),
        "half": torch.rand(num_samples).to(torch.bfloat16),
        "flag": torch.ones(num_samples, dtype=torch.bool),
    }
    return Batch(keys, inputs, weight={"x": 2.0})


def copied(batch: Batch) -> CopiedBatch:
    copy = next(copied_source(iter([batch]), None, FEATURES, torch.device("cpu"), 2))
    assert isinstance(copy, CopiedBatch)
    return copy


def tensors(batch: Batch) -> list[Tensor]:
    lists = [t for jagged in batch.keys.values() for t in (jagged.values, jagged.offsets, jagged.weights)]
    return [t for t in (*lists, *batch.inputs.values()) if t is not None]


@pytest.mark.parametrize("num_samples", [0, 1, 5, 3000])
def test_equal_and_apart(num_samples: int) -> None:
    """The reader may then write to its own tensors."""
    batch = make_batch(num_samples)
    before = [tensor.clone() for tensor in tensors(batch)]
    copy = copied(batch)
    for tensor in tensors(batch):
        tensor.numpy().fill(1) if tensor.dtype != torch.bfloat16 else tensor.fill_(1)
    assert copy.weights == batch.weights
    for got, expected in zip(tensors(copy), before, strict=True):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)


@pytest.mark.parametrize("num_samples", [0, 5, 3000])
def test_keys_of_a_group_lie_one_after_the_other(num_samples: int) -> None:
    copy = copied(make_batch(num_samples))
    assert set(copy.group_keys) == {("a", "b", "b_again"), ("other",)}
    for names, joined in copy.group_keys.items():
        assert torch.equal(joined, torch.cat([copy.keys[name].values for name in names]))
        if num_samples > 0:
            assert joined.data_ptr() == copy.keys[names[0]].values.data_ptr()


def test_features_with_one_key_in_each_sample() -> None:
    """As many keys as samples are not enough."""
    batch = make_batch()
    uneven = Jagged(batch.keys["b"].values, torch.tensor([0, 2, 2, 3, 4, 5]))
    copy = copied(replace(batch, keys={**batch.keys, "b": uneven}))
    assert copy.one_each == {"b_again"}
    assert copy.keys["b"].offsets.tolist() == [0, 2, 2, 3, 4, 5]
    assert copied(batch).one_each == {"b", "b_again"}


def test_a_tensor_of_two_features_is_copied_once() -> None:
    batch = make_batch()
    keys = {**batch.keys, "b_again": Jagged.one_each(batch.keys["b"].values)}
    copy = copied(replace(batch, keys=keys))
    assert copy.keys["b"].values is copy.keys["b_again"].values
    assert set(copy.group_keys) == {("other",)}, "their keys do not lie one after the other"


def test_a_batch_without_some_features() -> None:
    """The pipeline refuses it later, and names what is missing."""
    batch = make_batch()
    copy = copied(replace(batch, keys={"a": batch.keys["a"], "unknown": batch.keys["b"]}))
    assert copy.keys.keys() == {"a", "unknown"}
    assert copy.group_keys == {}


@pytest.mark.parametrize("size", [1, 100_000])
def test_ranges(size: int) -> None:
    """A difference in the last number is found, and in every piece that a thread takes."""
    numbers = [torch.arange(size) for _ in range(3)]
    numbers[1][-1] += 1
    arrays = np.array([[t.data_ptr(), t.nbytes, 0] for t in numbers], dtype=np.int64)
    assert pack_ops.find_ranges(arrays, 3) == [True, False, True]


def test_refusals() -> None:
    source, target = torch.zeros(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
    for offset, size in ((1, 4), (-1, 2), (0, -1)):
        arrays = np.array([[source.data_ptr(), size, offset]], dtype=np.int64)
        with pytest.raises(ValueError, match=r"offset|num_bytes"):
            pack_ops.copy_arrays(arrays, target)


def test_columns_of_one_array() -> None:
    """No tensor is in one piece. Fails if _views takes for granted that there is one."""
    ids = torch.arange(60).view(20, 3)
    features = {"b": Pooled(B), "b_again": Pooled(B)}
    keys = {name: Jagged.one_each(ids[:, i]) for i, name in enumerate(features)}
    batch = Batch(keys, {"label": ids[:, 2]})
    copy = next(copied_source(iter([batch]), None, features, torch.device("cpu"), 1))
    assert all(torch.equal(mine, given) for mine, given in zip(tensors(copy), tensors(batch), strict=True))


def test_inputs_may_be_changed_in_place() -> None:
    """Fails if _views cuts memory by split, whose parts torch then refuses to change."""
    scale = torch.nn.Parameter(torch.full((5,), 2.0))
    copy = copied(make_batch())
    copy.inputs["half"].mul_(scale)
    copy.keys["other"].weights.mul_(scale[0])
