"""The world: this rank, all ranks, and the channels between them. A world of one is an ordinary case."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from nestpipe.device.streams import Streams, device_of_rank, full_device
from nestpipe.distributed.channel import Channel
from nestpipe.distributed.watch import Watch

START_SECONDS = 120
"""how long ranks may take to find each other"""


class Reduction(Protocol):
    """Collectives that ranks begin one by one and end together."""

    @property
    def has_begun(self) -> bool: ...
    def complete(self) -> None: ...


class World:
    """One process among `size`. `World()` is a world of one, without a process group."""

    def __init__(
        self, rank: int = 0, size: int = 1, timeout_seconds: float = 25.0, device: torch.device | str = "cpu"
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = full_device(device)
        """of the model and of the rows in training"""
        self.streams = Streams(self.device)
        store = PrefixStore("nestpipe", _get_default_store()) if size > 1 else None
        self.watch = Watch(rank, size, store, timeout_seconds)
        self.route = self._channel("route")
        self.rows = self._channel("row exchange")
        self.gradients = self._channel("gradient return")
        self.dense = self._channel("dense reduction")
        self.evaluate = self._channel("evaluation")
        self.control = self._channel("agreement")
        self._reductions: list[ReferenceType[Reduction]] = []

    @staticmethod
    def from_environment(timeout_seconds: float = 25.0, device: torch.device | str = "cpu") -> "World":
        """The ranks that torchrun, or whoever set its variables, has started; a world of one if nobody has."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        device = device_of_rank(device, int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))))
        if size == 1:
            return World(device=device)
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=timedelta(seconds=START_SECONDS))
        return World(dist.get_rank(), dist.get_world_size(), timeout_seconds, device)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Around long work of one rank (compiling, reading a large file): the others wait longer than the timeout."""
        with self.watch.busy():
            yield

    def when_left(self, reduction: "Reduction") -> None:
        """As long as it lives it is completed when a step is left halfway. Call it on all ranks, in the same order."""
        self._reductions.append(ref(reduction))

    def leave(self) -> None:
        """On all ranks, when a step is left halfway. What some ranks have begun together and others not, all complete;
        otherwise the next collectives would meet those."""
        alive = {i: found for i, reference in enumerate(self._reductions) if (found := reference()) is not None}
        begun = [i for i, reduction in alive.items() if reduction.has_begun]
        for i in sorted({i for text in self.control.share_text(json.dumps(begun)) for i in json.loads(text)}):
            alive[i].complete()

    def close(self) -> None:
        if self.size > 1 and self.watch.failure is None:
            for channel in (self.route, self.rows, self.gradients, self.dense, self.evaluate, self.control):
                channel.close()
            if dist.is_initialized():
                dist.destroy_process_group()

    def _channel(self, name: str) -> Channel:
        # The watch decides how long to wait, by the main thread's clock; gloo's own limit must not come first.
        group = dist.new_group(backend="gloo", timeout=timedelta(days=1)) if self.size > 1 else None
        return Channel(name, self.watch, group, self.streams)
