"""The update of rows by their gradients. With late gradients a batch has two, the second one during the next batch."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace

from torch import Tensor

from nestpipe.device.streams import use_here
from nestpipe.embedding.exchange import RowGradients
from nestpipe.embedding.memory import Memory
from nestpipe.embedding.optim import RowOptimizer
from nestpipe.embedding.resident import ResidentRows, StoredUpdate


@dataclass(frozen=True)
class RowUpdate:
    """What the updates of a batch need of its step. Those of late gradients come when the next step has begun."""

    step: int
    """Number of the step, from 0."""
    scale: float | Tensor
    is_masked: Tensor | None
    """On a device: True if the step does not count."""
    optimizers: tuple[RowOptimizer, ...]
    """Row optimizer of each group."""

    def kept(self) -> "RowUpdate":
        """Returns a copy that later changes of the optimizers or the scale do not reach."""
        optimizers = tuple(copy(optimizer) for optimizer in self.optimizers)
        for optimizer in optimizers:
            optimizer.lr = optimizer.learning_rate(self.step + 1)
        scale = self.scale.clone() if isinstance(self.scale, Tensor) else self.scale
        return replace(self, scale=scale, optimizers=optimizers)

    def apply(self, memory: Memory, groups: Sequence[ResidentRows], gradients: Sequence[RowGradients | None]) -> None:
        use_here(self.scale if isinstance(self.scale, Tensor) else None, self.is_masked)
        for rows, optimizer, sums in zip(groups, self.optimizers, gradients, strict=True):
            if sums is None:
                continue
            values, slots = sums.values if sums.everywhere is None else sums.everywhere, rows.slots
            if isinstance(self.scale, Tensor) or self.scale != 1.0:
                values = values * self.scale
            if sums.keys is not None:
                assert slots is not None
                slots = slots.index_select(0, sums.keys)
            native = optimizer.native_for(self.step + 1) if rows.can_update_stored else None
            if native is not None:
                rows.stored_update = StoredUpdate(native, values)
                continue
            memory.update(rows.group, optimizer, rows.records, slots, values, self.step + 1, self.is_masked)
