"""Sums whose order is fixed on every device."""

import torch
from torch import Tensor

from nestpipe.kernels.dispatch import adds_in_order


def add_in_order(target: Tensor, index: Tensor, source: Tensor) -> None:
    """target[index[i]] += source[i], [n, dim] each; what goes to one row in the order of i.

    On an accelerator index_add_ uses atomic additions, which come in any order, and so may index_put_.
    """
    if adds_in_order(target):
        target.index_add_(0, index, source)
    else:
        add_sorted(target, index, source)


def add_sorted(target: Tensor, index: Tensor, source: Tensor) -> None:
    """Sums of what goes to each row, by a program for each element of a row; then those to the rows."""
    if len(index) == 0:
        return
    order = index.argsort(stable=True)
    rows = torch.arange(len(target) + 1, device=index.device)
    starts = torch.searchsorted(index.index_select(0, order), rows)
    sorted_source = source.index_select(0, order)
    target.add_(torch.segment_reduce(sorted_source, "sum", offsets=starts, axis=0, initial=0, unsafe=True))
