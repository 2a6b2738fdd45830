"""The world: this rank, all ranks, and the channels between them. A world of one is an ordinary case."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from nestpipe.distributed.channel import Channel
from nestpipe.distributed.watch import Watch

START_SECONDS = 120
"""how long ranks may take to find each other"""


class World:
    """One process among `size`. `World()` is a world of one, without a process group."""

    def __init__(self, rank: int = 0, size: int = 1, timeout_seconds: float = 25.0) -> None:
        self.rank = rank
        self.size = size
        self.device = torch.device("cpu")
        """of the model and of the rows in training"""
        store = PrefixStore("nestpipe", _get_default_store()) if size > 1 else None
        self.watch = Watch(rank, size, store, timeout_seconds)
        self.route = self._channel("route")
        self.rows = self._channel("row exchange")
        self.gradients = self._channel("gradient return")
        self.dense = self._channel("dense reduction")
        self.evaluate = self._channel("evaluation")
        self.control = self._channel("agreement")
        self._completions: list[WeakMethod[Callable[[], None]]] = []

    @staticmethod
    def from_environment(timeout_seconds: float = 25.0) -> "World":
        """The ranks that torchrun, or whoever set its variables, has started; a world of one if nobody has."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return World()
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=timedelta(seconds=START_SECONDS))
        return World(dist.get_rank(), dist.get_world_size(), timeout_seconds)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Around long work of one rank (compiling, reading a large file): the others wait longer than the timeout."""
        with self.watch.busy():
            yield

    def when_left(self, complete: Callable[[], None]) -> None:
        """Has this method called, as long as its object lives, when a step is left halfway: see `leave`."""
        self._completions.append(WeakMethod(complete))

    def leave(self) -> None:
        """On all ranks, when a step is left halfway. What some ranks have begun together and others not, all complete;
        otherwise the next collectives would meet those."""
        self._completions = [reference for reference in self._completions if reference() is not None]
        for reference in self._completions:
            if complete := reference():
                complete()

    def close(self) -> None:
        if self.size > 1 and self.watch.failure is None:
            for channel in (self.route, self.rows, self.gradients, self.dense, self.evaluate, self.control):
                channel.close()
            if dist.is_initialized():
                dist.destroy_process_group()

    def _channel(self, name: str) -> Channel:
        # The watch decides how long to wait, by the main thread's clock; gloo's own limit must not come first.
        group = dist.new_group(backend="gloo", timeout=timedelta(days=1)) if self.size > 1 else None
        return Channel(name, self.watch, group)
