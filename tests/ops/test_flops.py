"""Operations that attention and sampled softmax count as: by their formulas, in every form."""

import pytest
import torch

from nestpipe.kernels.flops import counting
from nestpipe.ops.attention import fuxi_attention, hstu_attention
from tests.ops import test_sampled_softmax as softmax
from tests.ops.test_attention import LENGTHS, make_arrays, make_sequences


@pytest.mark.parametrize("form", ["plain", "blocked"])
@pytest.mark.parametrize(("op", "num_sums"), [(hstu_attention, 1), (fuxi_attention, 3)])
def test_attention(op, num_sums: int, form: str) -> None:
    """Fails if masked pairs, padding, or what is computed again count."""
    sequences, arrays = make_sequences(LENGTHS), make_arrays(sum(LENGTHS))
    with torch.no_grad(), counting() as count:
        op(**arrays, sequences=sequences, form=form)
    num_pairs = sum(i + 1 for length in LENGTHS for i in range(length))
    assert count.total == num_pairs * 2 * 2 * (5 + num_sums * 3)


@pytest.mark.parametrize("form", ["plain", "blocked"])
@pytest.mark.parametrize("per", ["position", "sample"])
def test_sampled_softmax(per: str, form: str) -> None:
    """Fails if padding counts, or the gradients that the blocked form computes in its forward."""
    arrays, rest = softmax.make(per)
    with counting() as count:
        softmax.loss_of(**{name: array.requires_grad_() for name, array in arrays.items()}, **rest, form=form)
    assert count.total == 2 * sum(softmax.LENGTHS) * softmax.DIM * (1 + 5)
