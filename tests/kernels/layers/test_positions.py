"""Tests the input layer by kernels against torch in float64.

Fails if add_kernel takes the token's number for its place, or if sum_kernel leaves out the first sample.
"""

import pytest
import torch
import torch.nn.functional as F

from nestpipe.kernels.attention.tiles import SIZES
from nestpipe.ops.sequences import add_positions
from tests.kernels.attention.cases import (
    DEVICE,
    import_triton,
    interpreted,  # noqa: F401 (a fixture)
    make_sequences,
)

import_triton()


@pytest.mark.parametrize(
    ("lengths", "max_length", "dim"), [([3, 0, 70, 65, 1], 70, 5), ([64, 64], 64, 130), ([0], 3, 4), ([], 3, 4)]
)
@pytest.mark.parametrize("size", sorted(SIZES.values()))
def test_output_and_gradients(lengths: list[int], max_length: int, dim: int, size: int) -> None:
    generator = torch.Generator().manual_seed(dim)
    values, positions = (torch.randn(n, dim, generator=generator) for n in (sum(lengths), max_length + 11))
    slopes = torch.randn(values.shape, generator=generator)
    places = torch.cat([torch.arange(length) for length in lengths] or [torch.zeros(0, dtype=torch.int64)])
    exact = [x.double().requires_grad_() for x in (values, positions)]
    expected = 3.0 * exact[0] + F.embedding(places, exact[1])
    expected.backward(slopes.double())
    arrays = [x.to(DEVICE).requires_grad_() for x in (values, positions)]
    out = add_positions(*arrays, make_sequences(lengths, max_length), 3.0, size)
    out.backward(slopes.to(DEVICE))
    torch.testing.assert_close(out.detach().cpu().double(), expected.detach(), rtol=1e-6, atol=1e-6)
    for array, wanted in zip(arrays, exact, strict=True):
        assert array.grad.shape == array.shape
        torch.testing.assert_close(array.grad.cpu().double(), wanted.grad, rtol=1e-5, atol=1e-5)


def test_refusals() -> None:
    from nestpipe.kernels.layers.positions import add_positions_kernel

    tiles = make_sequences([2], 3).in_tiles(32)
    with pytest.raises(ValueError, match="must be float32"):
        add_positions_kernel(torch.zeros(2, 4).double(), torch.zeros(3, 4), tiles, 1.0)
    with pytest.raises(ValueError, match="there are 3 values for 2 tokens"):
        add_positions_kernel(torch.zeros(3, 4), torch.zeros(3, 4), tiles, 1.0)
