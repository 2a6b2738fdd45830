"""The world: this rank, all ranks, and the channels between them. A world of one is an ordinary case."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist

from nestpipe.device.streams import (
    Streams,
    default_device,
    device_of_rank,
    finish_all,
    full_device,
    is_accelerator,
)
from nestpipe.distributed.backend import choose_backend, device_place
from nestpipe.distributed.channel import Channel
from nestpipe.distributed.lane import Lane
from nestpipe.distributed.link import Link
from nestpipe.distributed.sockets import check_open_files
from nestpipe.distributed.watch import Watch

NUM_GROUPS = 5
"""gloo groups of a world, each with a connection to every other rank; see docs/distributed.md"""


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
        stall_seconds: float = 600.0,
        link: Link | None = None,
    ) -> None:
        """backend: gloo, or nccl, which carries what is in device memory. has_issuer: whether one thread issues all
        collectives of rows and dense gradients, in schedule order; None: if the backend needs it.

        timeout_seconds: a rank that shows no sign of life for as long ends the run. stall_seconds: so does one that
        lives but makes no progress. link: to the other ranks; None: torch.distributed has been initialised, and leads
        to them.
        """
        self.rank = rank
        self.size = size
        self.device = full_device(device)
        """of the model and of the rows in training"""
        self.streams = Streams(self.device)
        self.runs_ahead = is_accelerator(self.device)
        """whether the host runs ahead of the device: what a step computes is known later than it is launched"""
        self.backend = backend
        if size > 1 and link is None:
            link = _link(rank, size, timeout_seconds, stall_seconds)
        self._link = link
        self.watch = link.watch if link is not None else Watch(rank, size, None, timeout_seconds, stall_seconds)
        needs_issuer = backend == "nccl" if has_issuer is None else has_issuer
        self.issuer = Lane("issuer") if size > 1 and needs_issuer else None
        """the one thread that issues collectives of device memory; None: each lane issues its own"""
        self.route = self._channel("route")
        self.rows = self._channel("row exchange", is_on_device=True)
        self.gradients = self._channel("gradient return", is_on_device=True)
        self.dense = self._channel("dense reduction", is_on_device=True, needs_host=True)
        # All three are used by the caller's thread only, which waits for each, so they may share a group.
        group, lane = link.group if link is not None else None, Lane("agreement")
        self.evaluate = Channel("evaluation", self.watch, group, self.streams, lane)
        self.control = Channel("agreement", self.watch, group, self.streams, lane)
        self.commit = Channel("commit", self.watch, group, self.streams, self.issuer or lane, self.dense.device_group)
        self._reductions: list[ReferenceType[Reduction]] = []
        if link is not None:
            link.settle()

    @staticmethod
    def from_environment(
        timeout_seconds: float = 25.0,
        device: torch.device | str | None = None,
        backend: str = "auto",
        stall_seconds: float = 600.0,
    ) -> "World":
        """The ranks that torchrun, or another launcher that sets its variables, has started; otherwise a world of one.

        device: None takes the accelerator if there is one. What was found is printed once, by rank 0.
        """
        global _of_environment
        size = int(os.environ.get("WORLD_SIZE", "1"))
        local_rank = int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")))
        own_device = device_of_rank(default_device() if device is None else device, local_rank)
        if size == 1:
            choose_backend(backend, [device_place(own_device)])  # refuses one that is not to be had here
            world = World(device=own_device)
        else:
            rank = dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"])
            link = _link(rank, size, timeout_seconds, stall_seconds)
            chosen = choose_backend(backend, link.gather(device_place(own_device)))
            world = World(rank, size, timeout_seconds, own_device, chosen, link=link)
            _of_environment = ref(world)
        if device is None:
            _print_once(world)
        return world

    @staticmethod
    def given_or_found(world: "World | None") -> "World":
        """The given world; for None the environment's: the one that this process has already, or a new one."""
        if world is not None:
            return world
        known = _of_environment() if _of_environment is not None else None
        return known if known is not None else World.from_environment()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Around long work of one rank, for messages. The others wait for it, with or without this."""
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

    def finish_device(self) -> None:
        """Waits until the device has done all it was given, unless another rank is lost."""
        if self.size == 1 or not self.runs_ahead:
            finish_all(self.device)
            return
        lane = Lane("device")  # the device may be in a collective that a lost rank never joins
        self.watch.wait(lane.submit(lambda: finish_all(self.device)), "the end of the run")
        lane.close()

    def close(self) -> None:
        """Ends the threads of this world, and its groups. After a failure no other rank is waited for."""
        global _of_environment
        if self._link is None:
            return
        if _of_environment is not None and _of_environment() is self:
            _of_environment = None
        if self.watch.failure is None:
            channels = self.route, self.rows, self.gradients, self.dense, self.evaluate, self.control, self.commit
            for channel in channels:
                channel.close()
            if dist.is_initialized():
                lane = Lane("end")
                self.watch.wait(lane.submit(dist.destroy_process_group), "the end")
                lane.close()
        self._link.end()

    def _channel(self, name: str, is_on_device: bool = False, needs_host: bool = False) -> Channel:
        lane, device_group = None, None
        if is_on_device and self.issuer is not None:
            lane = self.issuer
            if self.backend == "nccl" or not self.runs_ahead:  # gloo cannot take what is on a device
                device_group = self._group(self.backend)
        group = self._group("gloo") if device_group is None or needs_host else None
        return Channel(name, self.watch, group, self.streams, lane, device_group)

    def _group(self, backend: str) -> dist.ProcessGroup | None:
        return self._link.new_group(backend) if self._link is not None else None


_of_environment: "ReferenceType[World] | None" = None
"""the world of several ranks that this process has joined, until it is closed"""
_has_printed = False


def _print_once(world: World) -> None:
    """What nobody said, but the environment: a run that trains on less than the user thinks must not be silent."""
    global _has_printed
    if world.rank == 0 and not _has_printed:
        ranks = "1 rank" if world.size == 1 else f"{world.size} ranks, {world.backend} between them"
        print(f"nestpipe: {ranks}, on {world.device}", file=sys.stderr, flush=True)
    _has_printed = True


def _link(rank: int, size: int, timeout_seconds: float, stall_seconds: float) -> Link:
    check_open_files(size, NUM_GROUPS, holds_store=rank == 0)
    make = Link if dist.is_initialized() else Link.from_environment
    return make(rank, size, timeout_seconds, stall_seconds)
