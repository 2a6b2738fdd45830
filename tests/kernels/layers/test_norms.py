"""Tests norms and their backward against torch's in float64.

Fails if norm_backward_kernel leaves out along_ones or along_normed, or if norm_kernel counts padding columns (no
`tl.where` around `values - mean`).
"""

import pytest
import torch
import torch.nn.functional as F

from nestpipe.kernels.layers.norms import norm, norm_backward

EPS = 1e-6


@pytest.mark.parametrize(("num_rows", "width"), [(0, 4), (1, 1), (5, 7), (3, 64), (40, 100)])
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_forward_and_backward(device, num_rows: int, width: int, is_gated: bool, dtype, tolerance) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    x, wide, slopes, added = (torch.randn(num_rows, 2 * width, generator=generator).to(dtype) for _ in range(4))
    x, slopes, added = x[:, :width], slopes[:, :width], added[:, :width].contiguous()
    gate = wide[:, width:] if is_gated else None  # columns of a wider array, as in a layer
    arrays = [array.double().requires_grad_() for array in ((x, gate) if gate is not None else (x,))]
    expected = F.layer_norm(arrays[0], [width], eps=EPS) * (arrays[1] if is_gated else 1.0)
    expected.backward(slopes.double())
    on_device = [None if a is None else _with_strides(a, device) for a in (x, slopes, added, gate)]
    d_wide = torch.full((num_rows, 2 * width), 7.0, dtype=dtype, device=device) if is_gated else None
    d_gate = None if d_wide is None else d_wide[:, width:]
    x, slopes, added, gate = on_device
    out, saved = norm(x, dtype, EPS, gate)
    d_x = norm_backward(slopes, x, saved, added, gate, d_gate)
    scale = max(1.0, float(arrays[0].grad.abs().max())) if num_rows else 1.0
    torch.testing.assert_close(out.double().cpu(), expected.detach(), rtol=tolerance, atol=4 * tolerance)
    expected_d_x = arrays[0].grad + added.double().cpu()
    torch.testing.assert_close(d_x.double().cpu(), expected_d_x, rtol=tolerance, atol=4 * tolerance * scale)
    if d_wide is not None:
        torch.testing.assert_close(d_gate.double().cpu(), arrays[1].grad, rtol=tolerance, atol=4 * tolerance)
        assert bool((d_wide[:, :width] == 7.0).all())


def _with_strides(array, device):
    """Copies an array with its strides."""
    copy = torch.empty_strided(array.shape, array.stride(), dtype=array.dtype, device=device)
    return copy.copy_(array)


def test_bits_of_a_row_do_not_depend_on_others(device) -> None:
    x = torch.randn(33, 50, generator=torch.Generator().manual_seed(1)).to(device)
    whole, saved = norm(x, torch.float32, EPS)
    alone, saved_alone = norm(x[32:].clone(), torch.float32, EPS)
    assert torch.equal(whole[32:], alone)
    slopes = x.flip(0).contiguous()
    expected = norm_backward(slopes, x, saved)[32:]
    assert torch.equal(norm_backward(slopes[32:], x[32:], saved_alone), expected)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="side by side"):
        norm(torch.zeros(4, 6).t(), torch.float32, EPS)
    with pytest.raises(ValueError, match="at most 8192"):
        norm(torch.zeros(1, 9000), torch.float32, EPS)
    with pytest.raises(ValueError, match="gate has shape"):
        norm(torch.zeros(1, 4), torch.float32, EPS, torch.zeros(1, 3))
