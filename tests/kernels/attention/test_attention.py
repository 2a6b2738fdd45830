"""Tests the kernels of attention against the plain form in float64, their order of summation, and buckets of time.

Fails, for example, if a kernel does not mask keys after their query, if `- (query_number - key_number) * SIZE` is left
out of load_weights, if positions_kernel leaves out `far`, if a gradient is not divided by max_length, if _sum_buckets
stops before the last bucket, or if tiles_kernel leaves out a head.
"""

import pytest
import torch
from torch import Tensor

from nestpipe.models import HSTU, FuXi
from nestpipe.ops.attention import fuxi_attention, hstu_attention
from nestpipe.ops.sequences import Sequences, time_bounds, time_buckets
from tests.histories import NUM_ITEMS, Rows, histories
from tests.kernels.attention.cases import (
    DEVICE,
    import_triton,
    interpreted,  # noqa: F401 (a fixture)
    make_arrays,
    make_sequences,
)

import_triton()

OPS = {"hstu": hstu_attention, "fuxi": fuxi_attention}
SIZE = 16
"""Tokens in a block: so small that even short sequences have several blocks."""


def by_kernel(name: str):
    from nestpipe.kernels.attention import attention

    return {"hstu": attention.hstu_attention_kernel, "fuxi": attention.fuxi_attention_kernel}[name]


def kernel_outcome(
    name: str, arrays: dict[str, Tensor], sequences: Sequences, slopes: Tensor, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Returns the output and the gradients of all inputs."""
    arrays = {
        n: array.to(DEVICE, torch.float32 if n.startswith("w") else dtype).requires_grad_()
        for n, array in arrays.items()
    }
    out = by_kernel(name)(**arrays, tiles=sequences.in_tiles(SIZE))
    assert out.dtype == dtype
    out.backward(slopes.to(DEVICE, dtype))
    return {"out": out.detach()} | {n: array.grad for n, array in arrays.items()}


def plain_outcome(name: str, arrays: dict[str, Tensor], sequences: Sequences, slopes: Tensor) -> dict[str, Tensor]:
    arrays = {n: array.clone().requires_grad_() for n, array in arrays.items()}
    on_cpu = Sequences(sequences.offsets.cpu(), sequences.times.cpu())
    out = OPS[name](**arrays, sequences=on_cpu, form="plain")
    out.backward(slopes)
    return {"out": out.detach()} | {n: array.grad for n, array in arrays.items()}


def make_slopes(name: str, arrays: dict[str, Tensor]) -> Tensor:
    num_tokens, heads, dim = arrays["v"].shape
    width = dim if name == "hstu" else 3 * dim
    return torch.randn(num_tokens, heads, width, generator=torch.Generator().manual_seed(7)).bfloat16().double()


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(
    ("lengths", "max_length", "heads", "dims", "dtype", "tolerance"),
    [
        ([0, 1, 33, 0, 16], 34, 2, (5, 3), torch.float32, 2e-6),
        pytest.param([0, 1, 34, 0, 16, 49], 49, 2, (5, 3), torch.float32, 2e-6, marks=pytest.mark.slow),
        ([17, 3], 17, 3, (50, 25), torch.float32, 2e-6),
        ([33, 2], 40, 1, (16, 32), torch.bfloat16, 2e-2),
        pytest.param([5, 18], 20, 8, (25, 50), torch.bfloat16, 2e-2, marks=pytest.mark.slow),
    ],
)
def test_output_and_gradients(name: str, lengths, max_length, heads, dims, dtype, tolerance) -> None:
    sequences = make_sequences(lengths, max_length)
    arrays = make_arrays(sum(lengths), max_length, heads, *dims)
    slopes = make_slopes(name, arrays)
    expected = plain_outcome(name, arrays, sequences, slopes)
    got = kernel_outcome(name, arrays, sequences, slopes, dtype)
    for what, value in expected.items():
        assert got[what].dtype == (torch.float32 if what.startswith("w") else dtype)
        error = (got[what].cpu().double() - value).norm() / value.norm()
        assert float(error) < tolerance, (what, float(error))
    assert not got["w_pos"][max_length:].any()


@pytest.mark.parametrize("name", OPS)
def test_bits_of_a_sample_do_not_depend_on_others(name: str) -> None:
    """Other samples hold NaN. Fails if load_tokens reads beyond the sample."""
    lengths, max_length = [2, 20, 1], 21
    sequences = make_sequences(lengths, max_length)
    arrays = make_arrays(sum(lengths), max_length, 1, 4, 3)
    slopes = make_slopes(name, arrays)
    part = slice(2, 22)
    own = {n: array if n.startswith("w") else array[part] for n, array in arrays.items()}
    alone = Sequences(torch.tensor([0, 20], device=DEVICE), sequences.times[1:2])
    expected = kernel_outcome(name, own, alone, slopes[part])
    for poison in (None, float("nan")):
        if poison is not None:
            for n in ("q", "k", "v"):
                arrays[n][:2], arrays[n][22:] = poison, poison
            slopes[:2], slopes[22:] = poison, poison
        together = kernel_outcome(name, arrays, sequences, slopes)
        for what in ("out", "q", "k", "v"):
            assert torch.equal(together[what][part], expected[what]), what


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_no_tokens(lengths: list[int]) -> None:
    arrays = make_arrays(0, 3, 2, 5, 3)
    result = kernel_outcome("hstu", arrays, make_sequences(lengths, 3), torch.zeros(0, 2, 3))
    assert result["out"].shape == (0, 2, 3)
    assert not result["w_pos"].any()
    assert not result["w_ts"].any()


def test_buckets_are_exact_at_every_bound() -> None:
    """Fails if buckets_kernel compares with `bound < difference`."""
    bounds = time_bounds(torch.device("cpu"))
    differences = torch.cat([bounds - 1, bounds, bounds + 1, -bounds, torch.tensor([0, 2**62])])
    lines = torch.cat([differences, differences.new_zeros(-len(differences) % 64)]).view(-1, 64)
    times = torch.cat([lines.new_zeros(len(lines), 1), lines], dim=1)  # each query's difference to the first key
    offsets = torch.arange(len(times) + 1) * 64
    buckets = (
        Sequences(offsets.to(DEVICE), times.to(DEVICE), [64] * len(times)).in_tiles(64).buckets[: len(times)].cpu()
    )
    expected = time_buckets(times[:, 1:, None] - times[:, None, :-1])
    assert torch.equal(buckets.long(), expected)
    assert buckets[:, :, 0].unique().tolist() == time_buckets(differences).unique().tolist()


@pytest.mark.parametrize("model_class", [HSTU, FuXi])
def test_in_a_model(model_class) -> None:
    """In a model q, k, v are columns of one tensor, and tiles have the size for float32."""
    batch = histories([3, 0, 5], 5)
    index = {name: (keys.values.to(DEVICE), keys.offsets.to(DEVICE)) for name, keys in batch.keys.items()}
    times = {"times": batch.inputs["times"].clamp_(max=10).to(DEVICE)}
    results = []
    for form in ("kernel", "plain"):
        model = model_class(4, 5, 1, num_heads=2, dim_qk=3, dim_v=2, attention=form).to(DEVICE).eval()
        rows = torch.randn(NUM_ITEMS, 4, generator=torch.Generator().manual_seed(3)).to(DEVICE).requires_grad_()
        loss = model({name: Rows(rows, *arrays) for name, arrays in index.items()}, times)
        loss.backward()
        results.append([loss.detach(), rows.grad, *(p.grad for p in model.parameters())])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences, arrays = make_sequences([2], 3), make_arrays(2, 3, 1, 4, 4)
    tiles = sequences.in_tiles(SIZE)
    floats = {n: array.float().to(DEVICE) for n, array in arrays.items()}
    with pytest.raises(ValueError, match="all must be bfloat16, or all float32"):
        by_kernel("hstu")(**floats | {"k": floats["k"].double()}, tiles=tiles)
    with pytest.raises(ValueError, match="there are 1 tokens, but sequences have 2"):
        by_kernel("hstu")(**floats | {n: floats[n][:1] for n in "qkv"}, tiles=tiles)
    with pytest.raises(ValueError, match=r"got torch.float64 with dim_qk 4 and dim_v 4; use 'blocked'"):
        hstu_attention(**arrays, sequences=sequences, form="kernel")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    on_cpu = {n: array.float() for n, array in arrays.items()}
    with pytest.raises(ValueError, match="attention 'kernel' needs a CUDA device and Triton"):
        hstu_attention(**on_cpu, sequences=make_sequences([2], 3, torch.device("cpu")), form="kernel")
