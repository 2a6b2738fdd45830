"""Transports: how a channel's collectives of host memory travel between ranks."""

from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from nestpipe.distributed.watch import LostConnectionError


class Transfer(Protocol):
    """A collective that has begun."""

    def advance(self, seconds: float) -> bool:
        """Returns whether the collective is complete. Waits for it at most so long, unless the transport blocks."""


class Transport(Protocol):
    """Collectives among all ranks. All ranks begin the same ones in the same order, one after another."""

    blocks: bool
    """True if a thread that waits for a transfer cannot give up."""

    def begin_all_to_all(
        self, message: Tensor, send_bytes: list[int], received: Tensor, receive_bytes: list[int]
    ) -> Transfer:
        """Begins Channel.all_to_all. The tensors must stay unchanged until the transfer is complete."""

    def begin_sum(self, values: Tensor) -> Transfer:
        """Begins to sum values over ranks, in place."""


class GlooTransport:
    """Collectives of a process group, which gloo's own threads carry out."""

    blocks = True

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def begin_all_to_all(
        self, message: Tensor, send_bytes: list[int], received: Tensor, receive_bytes: list[int]
    ) -> "_GlooTransfer":
        sizes = receive_bytes, send_bytes
        return self._begun(dist.all_to_all_single, received, message, *sizes)

    def begin_sum(self, values: Tensor) -> "_GlooTransfer":
        return self._begun(dist.all_reduce, values)

    def _begun(self, collective: object, *arguments: object) -> "_GlooTransfer":
        assert callable(collective)
        try:
            return _GlooTransfer(collective(*arguments, group=self._group, async_op=True))
        except RuntimeError as error:
            raise LostConnectionError(str(error)) from error


class _GlooTransfer:
    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def advance(self, seconds: float) -> bool:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise LostConnectionError(str(error)) from error
        return True
