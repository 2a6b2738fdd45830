"""Tests that no blocked form makes a tensor that grows with the square of the length, or with tokens x negatives x dim.

Fails, for example, if PAIR_ELEMENTS or GATHERED_ELEMENTS has no effect (2**40), or if hstu_attention falls back to its
plain form. `nestpipe bench attention` measures the memory itself.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nestpipe.ops.attention import fuxi_attention, hstu_attention
from nestpipe.ops.sampled_softmax import GATHERED_ELEMENTS, sampled_softmax
from nestpipe.ops.sequences import PAIR_ELEMENTS, Sequences
from tests.histories import Rows


class LargestTensor(TorchDispatchMode):
    """Finds the largest tensor that operations return."""

    num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, torch.Tensor):
                self.num_elements = max(self.num_elements, result.untyped_storage().nbytes() // result.element_size())
        return results


def sequences(num_samples: int, length: int) -> Sequences:
    return Sequences(torch.arange(num_samples + 1) * length, torch.arange(length + 1).expand(num_samples, -1))


def largest_of_attention(op, length: int, num_samples: int, form: str) -> int:
    num_tokens, heads, dim = num_samples * length, 2, 4
    shapes = [*[(num_tokens, heads, dim)] * 3, (2 * length - 1,), (129,)]
    arrays = [torch.rand(shape).requires_grad_() for shape in shapes]
    with LargestTensor() as largest:
        op(*arrays, sequences(num_samples, length), form).sum().backward()
    assert all(array.grad is not None for array in arrays)
    return largest.num_elements


@pytest.mark.parametrize("op", [hstu_attention, fuxi_attention])
def test_attention(op) -> None:
    for length, num_samples in ((1024, 4), (512, 8)):
        assert largest_of_attention(op, length, num_samples, "blocked") <= PAIR_ELEMENTS
    assert largest_of_attention(op, 512, 4, "plain") >= 4 * 2 * 512 * 512


@pytest.mark.parametrize("per", ["position", "sample"])
def test_sampled_softmax(per: str) -> None:
    num_samples, length, num_negatives, dim = 8, 128, 64, 32
    num_tokens = num_samples * length
    outputs, rows = torch.rand(num_tokens, dim, requires_grad=True), torch.rand(500, dim, requires_grad=True)
    count = num_tokens if per == "position" else num_samples
    negatives = torch.randint(500, (count * num_negatives,), generator=torch.Generator().manual_seed(0))
    index = torch.arange(num_tokens) % 500, torch.arange(num_samples), negatives
    features = [Rows(rows, numbers, torch.zeros(1)) for numbers in index]  # the offsets are those of sequences
    arguments = outputs, *features, sequences(num_samples, length), per
    for form, limit in (("blocked", GATHERED_ELEMENTS), ("plain", num_tokens * num_negatives * dim * 2)):
        with LargestTensor() as largest:
            sampled_softmax(*arguments, form=form).backward()
        assert largest.num_elements <= limit
    assert largest.num_elements >= num_tokens * num_negatives * dim
