"""A message on its way out."""

from dataclasses import dataclass

from torch import Tensor

from nestpipe.device.streams import Mark


@dataclass(frozen=True)
class Outgoing:
    """A message that kernels may still be writing."""

    message: Tensor
    ready: Mark
    """Event that fires when the message is complete; None if stream order already guarantees it."""
