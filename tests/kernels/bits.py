"""Dims, dtypes and arrays for tests of kernels, and a comparison of bits."""

import pytest
import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float64)


def dims_and_dtypes(*dims: int) -> pytest.MarkDecorator:
    """Tries each dim with one dtype, alternating; slow tests try the other one."""
    cases = [
        pytest.param(dim, dtype, marks=() if (i + j) % 2 == 0 else pytest.mark.slow)
        for i, dim in enumerate(dims)
        for j, dtype in enumerate(DTYPES)
    ]
    return pytest.mark.parametrize(("dim", "dtype"), cases)


ALL_DIMS = dims_and_dtypes(1, 3, 64, 100, 512, 513)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Compares bits, including signs of zeros and payloads of NaN."""
    whole = {torch.float32: torch.int32, torch.float64: torch.int64}[a.dtype]
    return torch.equal(a.cpu().contiguous().view(whole), b.cpu().contiguous().view(whole))


def columns(num_rows: int, width: int, dtype: torch.dtype, device: torch.device, gap: int = 5) -> tuple[Tensor, Tensor]:
    """Returns random rows that are columns of a wider array, and that array."""
    wide = torch.randn(num_rows, width + gap, dtype=dtype).to(device)
    return wide[:, 2 : 2 + width], wide
