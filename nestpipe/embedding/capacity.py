"""The number of slots in a row pool: what the batches in flight need, or more if there is memory for it."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from nestpipe.device.growing import free_bytes
from nestpipe.device.streams import is_accelerator
from nestpipe.embedding.resident import Growth

CHOICES = ("minimum", "auto")
REMEDY = "Raise memory.resident_bytes, or take a smaller batch or more ranks"


@dataclass(frozen=True)
class PoolSize:
    """Slots of one table group."""

    num_slots: int
    most_slots: int
    """Slots that the group may take when rows would have to leave otherwise."""
    slot_bytes: int


class Capacity:
    """Decides how many slots each group gets.

    The batches in flight must fit: slots are added when they do not. Beyond that, groups share a number of bytes, or
    with "auto" half of the device memory that the first step leaves free. They take it bit by bit, when rows would have
    to leave otherwise.
    """

    def __init__(
        self,
        resident_bytes: int | str | None,
        device: torch.device,
        num_sharing: int = 1,
        has_spare: bool = True,
    ) -> None:
        """resident_bytes: None for "auto" on an accelerator and "minimum" in host memory. num_sharing: ranks that share
        the device. has_spare: groups get an eighth more slots than they need, so that they grow less often."""
        if resident_bytes is None or (resident_bytes == "auto" and not is_accelerator(device)):
            resident_bytes = "auto" if is_accelerator(device) else "minimum"
        self.limit_bytes = resident_bytes if isinstance(resident_bytes, int) else None
        """Limit for all slots of a rank: a batch that needs more is refused. None if there is none."""
        self._has_spare = has_spare and self.limit_bytes is None
        self._is_auto = resident_bytes == "auto"
        self._is_expanded = resident_bytes == "minimum"
        self._device = device
        self._num_sharing = num_sharing
        self._needed: list[int] = []
        """Most slots that each group has needed."""

    def growth(self, needed: Sequence[int], sizes: Sequence[PoolSize]) -> Growth:
        """Returns the slots of each group if it needs these for the batches in flight."""
        self._needed = [max(pair) for pair in zip(needed, self._needed or needed, strict=True)]
        grown = [number + number // 8 if self._has_spare else number for number in needed]
        trios = zip(needed, grown, sizes, strict=True)
        num_slots = tuple(size.num_slots if number <= size.num_slots else more for number, more, size in trios)
        pairs = list(zip(num_slots, sizes, strict=True))
        num_bytes = sum(number * size.slot_bytes for number, size in pairs)
        error = None
        if self.limit_bytes is not None and num_bytes > self.limit_bytes:
            error = ValueError(_refusal(needed, sizes, num_bytes, self.limit_bytes))
        most_bytes = sum(max(number, size.most_slots) * size.slot_bytes for number, size in pairs)
        return Growth(num_slots, most_bytes, error)

    def expansion(self, sizes: Sequence[PoolSize], most_bytes: int | None) -> list[int]:
        """Returns the most slots of each group, after the first step. most_bytes: another limit, None if there is
        none."""
        if self._is_expanded or not any(self._needed):
            return [size.most_slots for size in sizes]
        self._is_expanded = True
        used = sum(size.num_slots * size.slot_bytes for size in sizes)
        limit = self.limit_bytes if self.limit_bytes is not None else used + self._free_share()
        spare = (limit if most_bytes is None else min(limit, most_bytes)) - used
        if len(sizes) > 1:
            spare -= spare // 10  # left for groups that need more later
        weights = [number * size.slot_bytes for number, size in zip(self._needed, sizes, strict=True)]
        shares = [max(spare, 0) * weight // sum(weights) for weight in weights]
        return [size.num_slots + share // size.slot_bytes for size, share in zip(sizes, shares, strict=True)]

    def _free_share(self) -> int:
        if not self._is_auto:
            return 0
        with suppress(RuntimeError):  # a device that cannot tell
            return free_bytes(self._device) // 2 // self._num_sharing
        return 0


def check_resident_bytes(value: int | str | None) -> None:
    is_number = isinstance(value, int) and not isinstance(value, bool) and value > 0
    if value is not None and value not in CHOICES and not is_number:
        raise ValueError(f"resident_bytes is {value!r}, must be 'minimum', 'auto' or a positive number of bytes")


def _refusal(needed: Sequence[int], sizes: Sequence[PoolSize], num_bytes: int, limit_bytes: int) -> str:
    terms = [f"{number:,} x {size.slot_bytes}" for number, size in zip(needed, sizes, strict=True) if number > 0]
    return (
        f"a batch and those in flight before it need {num_bytes:,} bytes for their resident rows on this rank, more "
        f"than memory.resident_bytes = {limit_bytes:,}: distinct owned keys of all x record, {' + '.join(terms)} "
        f"bytes. The batch was not trained. {REMEDY}"
    )
