"""Layer norm without parameters, with an optional gate, and its backward.

Computations are in float32 for all dtypes of inputs and outputs. A row's bits do not depend on other rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.kernels.dispatch import runs_triton

WIDEST = 8192
"""Largest number of elements of a row: a program holds a whole row."""


@dataclass(frozen=True)
class Norm:
    """Means and scales of the rows, which backward needs."""

    means: Tensor
    scales: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.means, self.scales


def norm(x: Tensor, dtype: torch.dtype, eps: float, gate: Tensor | None = None) -> tuple[Tensor, Norm]:
    """Returns gate * (x - mean) / sqrt(variance + eps), [n, width] in `dtype`, and what backward needs."""
    _check(x, gate)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    saved = Norm(*(torch.empty(len(x), dtype=torch.float32, device=x.device) for _ in range(2)))
    if len(x) == 0:
        return out, saved
    if runs_triton(x):
        from nestpipe.kernels.layers import triton_norms

        triton_norms.norm(x, gate, out, *saved.tensors, eps)
        return out, saved
    variance, mean = torch.var_mean(x.float(), dim=1, correction=0)
    saved.means.copy_(mean)
    torch.rsqrt(variance + eps, out=saved.scales)
    normed = _normed(x, saved)
    out.copy_(normed if gate is None else normed * gate.float())
    return out, saved


def norm_backward(
    d_out: Tensor,
    x: Tensor,
    saved: Norm,
    added: Tensor | None = None,
    gate: Tensor | None = None,
    d_gate: Tensor | None = None,
) -> Tensor:
    """Returns the gradient of x plus `added`, in the dtype of x. Writes the gradient of the gate to d_gate."""
    _check(x, gate)
    if added is not None and (added.shape != x.shape or not added.is_contiguous()):
        raise ValueError(f"added has shape {list(added.shape)}, must be contiguous and {list(x.shape)}")
    d_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(x) == 0:
        return d_x
    if runs_triton(x):
        from nestpipe.kernels.layers import triton_norms

        triton_norms.norm_backward(d_out, x, gate, *saved.tensors, added, d_x, d_gate)
        return d_x
    normed, slope = _normed(x, saved), d_out.float()
    if gate is not None and d_gate is not None:
        d_gate.copy_(slope * normed)
        slope = slope * gate.float()
    along = slope.mean(1, keepdim=True) + normed * (slope * normed).mean(1, keepdim=True)
    result = saved.scales[:, None] * (slope - along)
    return d_x.copy_(result if added is None else result + added)


def _normed(x: Tensor, saved: Norm) -> Tensor:
    return (x.float() - saved.means[:, None]) * saved.scales[:, None]


def _check(x: Tensor, gate: Tensor | None) -> None:
    for name, array in (("x", x), ("gate", gate)):
        if array is not None and (array.shape != x.shape or array.stride(1) != 1):
            raise ValueError(
                f"{name} has shape {list(array.shape)} and strides {list(array.stride())}, must have {list(x.shape)} "
                "and the elements of a row side by side; take its contiguous()"
            )
    if x.shape[1] > WIDEST:
        raise ValueError(f"rows have {x.shape[1]} elements, at most {WIDEST} can be normed at once")
