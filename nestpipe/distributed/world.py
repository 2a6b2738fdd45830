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

from nestpipe.device.streams import Streams, device_of_rank, full_device, has_streams
from nestpipe.distributed.backend import choose_backend, device_place
from nestpipe.distributed.channel import Channel
from nestpipe.distributed.lane import Lane
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
        self,
        rank: int = 0,
        size: int = 1,
        timeout_seconds: float = 25.0,
        device: torch.device | str = "cpu",
        backend: str = "gloo",
        has_issuer: bool | None = None,
    ) -> None:
        """backend: gloo, or nccl, which carries what is in device memory. has_issuer: whether one thread issues all
        collectives of rows and dense gradients, in schedule order; None: if the backend needs it."""
        self.rank = rank
        self.size = size
        self.device = full_device(device)
        """of the model and of the rows in training"""
        self.streams = Streams(self.device)
        store = PrefixStore("nestpipe", _get_default_store()) if size > 1 else None
        self.watch = Watch(rank, size, store, timeout_seconds)
        self.backend = backend
        needs_issuer = backend == "nccl" if has_issuer is None else has_issuer
        self.issuer = Lane("issuer") if size > 1 and needs_issuer else None
        """the one thread that issues collectives of device memory; None: each lane issues its own"""
        self.route = self._channel("route")
        self.rows = self._channel("row exchange", is_on_device=True)
        self.gradients = self._channel("gradient return", is_on_device=True)
        self.dense = self._channel("dense reduction", is_on_device=True)
        self.evaluate = self._channel("evaluation")
        self.control = self._channel("agreement")
        self._reductions: list[ReferenceType[Reduction]] = []

    @staticmethod
    def from_environment(
        timeout_seconds: float = 25.0, device: torch.device | str = "cpu", backend: str = "auto"
    ) -> "World":
        """The ranks that torchrun, or whoever set its variables, has started; a world of one if nobody has."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        device = device_of_rank(device, int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))))
        if size == 1:
            choose_backend(backend, [device_place(device)])  # refuses one that is not to be had here
            return World(device=device)
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=timedelta(seconds=START_SECONDS))
        places = [""] * size
        dist.all_gather_object(places, device_place(device))
        return World(dist.get_rank(), size, timeout_seconds, device, choose_backend(backend, places))

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

    def _channel(self, name: str, is_on_device: bool = False) -> Channel:
        group, lane, device_group = self._group("gloo"), None, None
        if is_on_device and self.issuer is not None:
            lane = self.issuer
            if self.backend == "nccl" or not has_streams(self.device):  # gloo cannot take what is on a device
                device_group = self._group(self.backend)
        return Channel(name, self.watch, group, self.streams, lane, device_group)

    def _group(self, backend: str) -> dist.ProcessGroup | None:
        # The watch decides how long to wait, by the main thread's clock; the backend's own limit must not come first.
        return dist.new_group(backend=backend, timeout=timedelta(days=1)) if self.size > 1 else None
