"""Ranks that are threads of this process, with channels between them: as much of a world as routing and exchanges need.

A rank that fails breaks the barrier, so that the others end too.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import torch
from torch import Tensor

from nestpipe.distributed import Channel


class Meeting:
    """Where the ranks lay down what they send, and pick up what is for them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=20)
        self.table: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.table[rank] = value
        self.barrier.wait()
        found = list(self.table)
        self.barrier.wait()
        return found


class ThreadChannel:
    """One rank's end. Refuses messages whose receiver expects another size than the sender sends."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank = rank
        self.size = meeting.size
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
        mine = [of_rank[self.rank] for of_rank in parts]
        assert [len(part) for part in mine] == receive_bytes
        torch.cat(mine, out=received)
        meanwhile()


def on_threads(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """[function(channel, *arguments) of rank 0, 1, ...]"""
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
