"""Which keys of a batch travel with which of its micro-batches. Requester and owner plan alike, from the keys' uses."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.embedding.route import Route

WINDOWS = ("once", "resend")

Places = Tensor | None
"""Ascending places in a list of keys; None: all of them."""


@dataclass(frozen=True)
class Plan:
    """Which keys of a list travel with each micro-batch; both ends make the same one from the keys' uses."""

    bring: list[Places]
    take: list[Places]

    @staticmethod
    def of(uses: Tensor, window: str, frozen: bool) -> "Plan":
        num_micro_batches = uses.shape[1]
        bring: list[Places]
        take: list[Places]
        if num_micro_batches == 1:
            bring = take = [None]
        elif window == "resend":
            bring = take = [_where(uses[:, i]) for i in range(num_micro_batches)]
        else:
            columns = uses.T.contiguous()
            bring = _grouped(num_micro_batches - 1 - _last_use(columns.flip(0)), num_micro_batches)
            take = _grouped(_last_use(columns), num_micro_batches)
        none = torch.empty(0, dtype=torch.int64)
        return Plan(bring, [none] * num_micro_batches if frozen else take)


@dataclass(frozen=True)
class TablePlans:
    requester: Plan
    owner: list[Plan]
    """for each requester"""


@dataclass(frozen=True)
class Plans:
    window: str
    tables: list[TablePlans]

    @staticmethod
    def of(route: Route, window: str) -> "Plans":
        tables = []
        for request, owned in zip(route.request.tables, route.owned, strict=True):
            owner = [Plan.of(uses, window, owned.table.frozen) for uses in owned.uses]
            tables.append(TablePlans(Plan.of(request.uses, window, request.table.frozen), owner))
        return Plans(window, tables)


def _where(mask: Tensor) -> Tensor:
    return mask.nonzero().flatten()


def _last_use(columns: Tensor) -> NDArray[np.int16]:
    """[keys] the last micro-batch that uses each key, from [num_micro_batches, keys]. A pass over all keys for each
    micro-batch: several times as fast as argmax over the few uses of each key."""
    last = np.zeros(columns.shape[1], dtype=np.int16)
    for i, column in enumerate(columns.numpy().view(np.uint8)):
        np.maximum(last, column * np.int16(i), out=last)
    return last


def _grouped(numbers: NDArray[np.int16], num_groups: int) -> list[Places]:
    """For each group the places where its number stands, ascending. Numbers of 16 bits are sorted digit by digit."""
    order = torch.from_numpy(np.argsort(numbers, kind="stable"))
    return list(order.split(np.bincount(numbers, minlength=num_groups).tolist()))
