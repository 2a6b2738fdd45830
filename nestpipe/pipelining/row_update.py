"""The update of rows by their gradients. With late gradients a batch has two, the second one during the next batch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from nestpipe.embedding.exchange import RowGradients
from nestpipe.embedding.memory import Memory
from nestpipe.embedding.resident import ResidentRows


@dataclass(frozen=True)
class RowUpdate:
    """What the updates of a batch need of its step. Those of late gradients come when the next step has begun."""

    step: int
    """Number of the step, from 0."""
    scale: float | Tensor
    is_masked: Tensor | None
    """On a device: True if the step does not count."""
    learning_rates: tuple[float, ...] | None = None
    """Learning rate of each group; None for that of the step."""

    def kept(self, groups: Sequence[ResidentRows]) -> "RowUpdate":
        """Returns a copy that later changes of the learning rates or the scale do not reach."""
        rates = tuple(rows.group.optimizer.learning_rate(self.step + 1) for rows in groups)
        scale = self.scale.clone() if isinstance(self.scale, Tensor) else self.scale
        return replace(self, scale=scale, learning_rates=rates)

    def apply(self, memory: Memory, groups: Sequence[ResidentRows], gradients: Sequence[RowGradients | None]) -> None:
        for g, (rows, sums) in enumerate(zip(groups, gradients, strict=True)):
            if sums is None:
                continue
            values, slots = sums.values, rows.slots
            if isinstance(self.scale, Tensor) or self.scale != 1.0:
                values = values * self.scale
            if sums.keys is not None:
                assert slots is not None
                slots = slots.index_select(0, sums.keys)
            lr = None if self.learning_rates is None else self.learning_rates[g]
            memory.update(rows.group, rows.records, slots, values, self.step + 1, self.is_masked, lr)
