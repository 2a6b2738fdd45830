"""Rows brought to mean 0 and variance 1, each multiplied by a gate if there is one; and the way back.

In float32, whatever goes in and comes out. A row's bits do not depend on the others.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.kernels.dispatch import runs_triton

WIDEST = 8192
"""elements of a row: a program has all of them at once"""


@dataclass(frozen=True)
class Norm:
    """What was done to rows x, as the way back needs it."""

    means: Tensor
    scales: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.means, self.scales


def norm(x: Tensor, dtype: torch.dtype, eps: float, gate: Tensor | None = None) -> tuple[Tensor, Norm]:
    """[n, width] of `dtype`: gate * (x - mean) / sqrt(variance + eps)"""
    _check(x, gate)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    done = Norm(*(torch.empty(len(x), dtype=torch.float32, device=x.device) for _ in range(2)))
    if len(x) == 0:
        return out, done
    if runs_triton(x):
        from nestpipe.kernels.layers import triton_norms

        triton_norms.norm(x, gate, out, *done.tensors, eps)
        return out, done
    variance, mean = torch.var_mean(x.float(), dim=1, correction=0)
    done.means.copy_(mean)
    torch.rsqrt(variance + eps, out=done.scales)
    normed = _normed(x, done)
    out.copy_(normed if gate is None else normed * gate.float())
    return out, done


def norm_backward(
    d_out: Tensor,
    x: Tensor,
    done: Norm,
    added: Tensor | None = None,
    gate: Tensor | None = None,
    d_gate: Tensor | None = None,
) -> Tensor:
    """The gradient of x, of its dtype, with `added` on top of it; that of the gate goes into d_gate."""
    _check(x, gate)
    if added is not None and (added.shape != x.shape or not added.is_contiguous()):
        raise ValueError(f"added has shape {list(added.shape)}, must be contiguous and {list(x.shape)}")
    d_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(x) == 0:
        return d_x
    if runs_triton(x):
        from nestpipe.kernels.layers import triton_norms

        triton_norms.norm_backward(d_out, x, gate, *done.tensors, added, d_x, d_gate)
        return d_x
    normed, slope = _normed(x, done), d_out.float()
    if gate is not None and d_gate is not None:
        d_gate.copy_(slope * normed)
        slope = slope * gate.float()
    along = slope.mean(1, keepdim=True) + normed * (slope * normed).mean(1, keepdim=True)
    result = done.scales[:, None] * (slope - along)
    return d_x.copy_(result if added is None else result + added)


def _normed(x: Tensor, done: Norm) -> Tensor:
    return (x.float() - done.means[:, None]) * done.scales[:, None]


def _check(x: Tensor, gate: Tensor | None) -> None:
    for name, array in (("x", x), ("gate", gate)):
        if array is not None and (array.shape != x.shape or array.stride(1) != 1):
            raise ValueError(
                f"{name} has shape {list(array.shape)} and strides {list(array.stride())}, must have {list(x.shape)} "
                "and the elements of a row side by side"
            )
    if x.shape[1] > WIDEST:
        raise ValueError(f"rows have {x.shape[1]} elements, at most {WIDEST} can be normed at once")
