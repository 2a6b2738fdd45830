"""How much of a batch waits for the boundary of two batches, if rows and gradients are exchanged across it."""

from dataclasses import dataclass

import numpy as np

from nestpipe.prediction.work import Times


@dataclass(frozen=True)
class Overlap:
    """Keys of a batch that the global batch before, or after, has, too. Rows of those before are blocked: they are
    sent after its update. Gradients of those after are urgent: they are returned before the batch's own update."""

    keys: float
    """Share of all keys."""
    head: float | None = None
    """Share among the rows of the first micro-batch; None if it is that of all keys."""
    tail: float | None = None
    """Share among the gradients of the last micro-batch; None if it is that of all keys."""

    def blocked(self, parts: Times) -> Times:
        """Returns what stays of the rows of each micro-batch, in the unit of `parts`. The rest is early."""
        return self._shared(parts, 0, self.head)

    def urgent(self, parts: Times) -> Times:
        """Returns what stays of the gradients of each micro-batch, in the unit of `parts`. The rest is late."""
        return self._shared(parts, -1, self.tail)

    def _shared(self, parts: Times, place: int, share: float | None) -> Times:
        """parts: a line for each micro-batch. share: that of the micro-batch at `place`. The other micro-batches share
        what is left, in proportion."""
        if share is None or len(parts) == 1:
            return self.keys * parts
        total = parts.sum(0)
        others = total - parts[place]
        left = np.maximum(0.0, self.keys * total - share * parts[place])
        shared: Times = parts * np.divide(left, others, out=np.zeros_like(others), where=others > 0)
        shared[place] = share * parts[place]
        return shared
