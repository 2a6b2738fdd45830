"""Tests the layer of HSTU by kernels against the plain form in float64.

Fails if _Layer.backward leaves `added=gradient` out of the last norm_backward, takes uvqk for z in silu_backward, or
does not hand d_u to norm_backward.
"""

import pytest
import torch
import torch.nn.functional as F

from nestpipe.kernels.flops import counting
from nestpipe.ops.hstu import HSTUWeights, hstu_layer
from tests.kernels.attention.cases import (
    DEVICE,
    import_triton,
    interpreted,  # noqa: F401 (a fixture)
    make_sequences,
)

import_triton()


def make_arrays(num_tokens: int, dim: int, max_length: int, heads: int, dim_qk: int, dim_v: int):
    generator = torch.Generator().manual_seed(num_tokens)

    def draw(*shape: int, std: float = 1.0):
        return (torch.randn(shape, generator=generator) * std).double()

    shapes = (dim, 2 * heads * (dim_qk + dim_v)), (2 * max_length - 1,), (129,), (dim, heads * dim_v), (dim,)
    return [draw(num_tokens, dim), *(draw(*shape, std=0.3) for shape in shapes)]


def outcome(arrays, sequences, heads: int, dim_v: int, dropout: float, form: str, device, dtype=None):
    """Returns the output and all gradients."""
    arrays = [array.to(device, dtype or array.dtype, copy=True).requires_grad_() for array in arrays]
    out = hstu_layer(arrays[0], HSTUWeights(*arrays[1:]), sequences, heads, dim_v, dropout, form)
    slopes = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out)
    out.backward(slopes)
    return [out.detach(), *(array.grad for array in arrays)]


@pytest.mark.parametrize(
    ("lengths", "max_length", "dim", "heads", "dims"),
    [([0, 1, 34, 0, 33], 34, 6, 2, (5, 3)), ([], 4, 4, 1, (2, 2)), ([2, 1], 3, 16, 1, (16, 16))],
)
@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_output_and_gradients(lengths, max_length, dim, heads, dims, dropout, monkeypatch) -> None:
    def kept(shape: tuple[int, ...]):
        return torch.rand(shape, generator=torch.Generator().manual_seed(3)) >= dropout

    def native_dropout(y, p, train):
        mask = kept(y.shape).to(y.device)
        return y * mask / (1 - p), mask

    monkeypatch.setattr(torch, "native_dropout", native_dropout)
    monkeypatch.setattr(F, "dropout", lambda y, p: y * kept(y.shape) / (1 - p))
    sequences = make_sequences(lengths, max_length)
    arrays = make_arrays(sum(lengths), dim, max_length, heads, *dims)
    arguments = heads, dims[1], dropout
    on_cpu = make_sequences(lengths, max_length, torch.device("cpu"))
    expected = outcome(arrays, on_cpu, *arguments, "plain", "cpu")
    got = outcome(arrays, sequences, *arguments, "kernel", DEVICE, torch.float32)
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == torch.float32
        assert float((one.cpu().double() - other).norm()) <= 1e-5 * float(other.norm())


def test_products_have_the_dtype_of_autocast() -> None:
    """All else is in float32: the output is more precise than bfloat16 could be."""
    lengths, max_length = [20, 3], 20
    sequences, arrays = make_sequences(lengths, max_length), make_arrays(23, 16, max_length, 1, 16, 16)
    arrays[0] = arrays[0] * 100
    on_cpu = make_sequences(lengths, max_length, torch.device("cpu"))
    expected = outcome(arrays, on_cpu, 1, 16, 0.0, "plain", "cpu")
    with torch.autocast(DEVICE.type, torch.bfloat16):
        got = outcome(arrays, sequences, 1, 16, 0.0, "kernel", DEVICE, torch.float32)
    errors = [
        float((one.cpu().double() - other).norm() / other.norm()) for one, other in zip(got, expected, strict=True)
    ]
    assert errors[0] < 1e-3
    assert 1e-4 < max(errors) < 5e-2, errors


def test_operations_of_a_layer() -> None:
    """Fails if the kernels' part of a layer does not count, or counts other pairs than the plain form."""
    lengths, heads, dim_qk, dim_v = [0, 1, 34, 0, 33], 2, 5, 3
    sequences = make_sequences(lengths, 34)
    arrays = [array.to(DEVICE, torch.float32) for array in make_arrays(sum(lengths), 6, 34, heads, dim_qk, dim_v)]
    totals = {}
    for form in ("kernel", "plain"):
        with torch.no_grad(), counting() as count:
            hstu_layer(arrays[0], HSTUWeights(*arrays[1:]), sequences, heads, dim_v, 0.0, form)
        totals[form] = count.total
    num_pairs = sum(i + 1 for length in lengths for i in range(length))
    products = 2 * sum(lengths) * 6 * heads * (2 * (dim_qk + dim_v) + dim_v)
    assert totals == dict.fromkeys(totals, products + 2 * heads * (dim_qk + dim_v) * num_pairs)
