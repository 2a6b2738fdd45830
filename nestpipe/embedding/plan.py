"""Which keys of a batch travel with which of its micro-batches. Requester and owner plan alike, from the keys' uses."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.device.transfer import uploaded
from nestpipe.embedding.request import TableRequest
from nestpipe.embedding.route import OwnedTable, Route

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

    def map(self, function: Callable[[Tensor], Tensor]) -> "Plan":
        bring, take = ([None if p is None else function(p) for p in places] for places in (self.bring, self.take))
        return Plan(bring, take)


@dataclass(frozen=True)
class TablePlans:
    requester: Plan
    bring_counts: list[list[int]]
    """for each micro-batch, how many rows each owner sends"""
    take_counts: list[list[int]]
    """for each micro-batch, how many gradients each owner is sent"""
    bring_slots: list[list[Tensor]]
    """for each requester and micro-batch, the slots of the rows it is sent"""
    take_places: list[list[Places]]
    """for each requester and micro-batch, which of its keys it returns gradients of"""
    slots: list[Tensor]
    """for each requester, the slot of each of its keys"""

    @staticmethod
    def of(request: TableRequest, owned: OwnedTable, window: str) -> "TablePlans":
        requester = Plan.of(request.uses, window, request.table.frozen)
        plans = [Plan.of(uses, window, owned.table.frozen) for uses in owned.uses]
        bring_slots = [
            [slots if places is None else slots.index_select(0, places) for places in plan.bring]
            for slots, plan in zip(owned.slots, plans, strict=True)
        ]
        bring_counts, take_counts = (
            [_counts(request, places) for places in of_all] for of_all in (requester.bring, requester.take)
        )
        take_places = [plan.take for plan in plans]
        return TablePlans(requester, bring_counts, take_counts, bring_slots, take_places, owned.slots)

    def map(self, function: Callable[[Tensor], Tensor]) -> "TablePlans":
        return replace(
            self,
            requester=self.requester.map(function),
            bring_slots=[[function(slots) for slots in of] for of in self.bring_slots],
            take_places=[[None if p is None else function(p) for p in of] for of in self.take_places],
            slots=[function(slots) for slots in self.slots],
        )


@dataclass(frozen=True)
class Plans:
    window: str
    tables: list[TablePlans]
    """empty in a world of one"""

    @staticmethod
    def of(route: Route, window: str) -> "Plans":
        if len(route.owned) > 0 and len(route.owned[0].slots) == 1:
            return Plans(window, [])  # in a world of one nothing travels
        pairs = zip(route.request.tables, route.owned, strict=True)
        return Plans(window, [TablePlans.of(request, owned, window) for request, owned in pairs])

    def map(self, function: Callable[[Tensor], Tensor]) -> "Plans":
        return Plans(self.window, [table.map(function) for table in self.tables])

    def to(self, device: torch.device) -> "Plans":
        return uploaded(self, device)


def _counts(request: TableRequest, positions: Places) -> list[int]:
    """How many of these positions each owner has."""
    if positions is None:
        return request.counts
    ends = torch.searchsorted(positions, torch.tensor(request.counts).cumsum(0))
    return ends.diff(prepend=ends.new_zeros(1)).tolist()


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
