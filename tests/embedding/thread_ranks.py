"""Ranks that are threads of this process, with the channels that routing and exchanges need.

A rank that fails breaks the barrier, so that the others end too.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import torch
from torch import Tensor

from nestpipe.distributed import Channel
from nestpipe.distributed.mesh import Mesh


class Meeting:
    """Exchanges values between all ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=20)
        self.table: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.table[rank] = value
        self.barrier.wait()
        values = list(self.table)
        self.barrier.wait()
        return values


class ThreadChannel:
    """Channel of one rank. Fails if sender and receiver expect different sizes."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank = rank
        self.size = meeting.size
        self.mesh = Mesh(rank, meeting.size)
        self._meeting = meeting

    def all_to_all_equal(self, parts: Tensor) -> Tensor:
        return torch.stack([sent[self.rank] for sent in self._meeting.exchange(self.rank, parts.clone())])

    def all_to_all(
        self,
        message: Tensor,
        send_bytes: list[int],
        received: Tensor,
        receive_bytes: list[int],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        assert sum(send_bytes) == len(message)
        parts = self._meeting.exchange(self.rank, message.clone().split(send_bytes))
        mine = [rank_parts[self.rank] for rank_parts in parts]
        assert [len(part) for part in mine] == receive_bytes
        torch.cat(mine, out=received)
        meanwhile()


def on_threads(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Returns function(channel, *arguments) of each rank."""
    meeting = Meeting(size)

    def run(rank: int) -> Any:
        try:
            return function(cast(Channel, ThreadChannel(rank, meeting)), *arguments)
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        ranks = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for rank in ranks if (error := rank.exception()) is not None]
    broken = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if errors:
        raise (broken or errors)[0]
    return [rank.result() for rank in ranks]
