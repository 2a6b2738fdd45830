"""The world: this rank, all ranks, and the channels between them. A world of one is an ordinary case."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
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
from nestpipe.distributed.backend import choose_backend, device_place, take_ranks_for_hosts
from nestpipe.distributed.channel import Channel
from nestpipe.distributed.host_map import HostMap, HostSetting, agreed_map, check_hosts, told_hosts
from nestpipe.distributed.hosts import Hosts, shared_memory_of
from nestpipe.distributed.lane import Lane
from nestpipe.distributed.link import Link
from nestpipe.distributed.mesh import Mesh
from nestpipe.distributed.notice import Notice
from nestpipe.distributed.shared_memory import (
    LARGE_RING_BYTES,
    RING_BYTES,
    SharedMemory,
    host_identity,
)
from nestpipe.distributed.sockets import check_open_files
from nestpipe.distributed.transport import GlooTransport, Transport
from nestpipe.distributed.watch import Watch

NUM_GROUPS = 5
"""Number of gloo groups of a world, each with a connection to every other rank; see docs/distributed.md."""


NUM_LARGE_CHANNELS, NUM_SMALL_CHANNELS = 4, 3
"""Channels of keys, rows, gradients and dense sums, and those of short messages."""


class Reduction(Protocol):
    """A set of collectives that ranks begin one by one and complete together."""

    @property
    def has_begun(self) -> bool: ...
    def complete(self) -> None: ...


class World:
    """This rank among `size` ranks. `World()` is a world of one, without a process group."""

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
        shared_memory: bool = True,
        replicas: int = 1,
        hosts: HostSetting = None,
    ) -> None:
        """backend: "gloo", or "nccl", which carries device memory. has_issuer: one thread issues all collectives of
        rows and dense gradients, in schedule order; None if the backend decides.

        timeout_seconds: time without a sign of life after which a rank ends the run. stall_seconds: time without
        progress after which a living rank does. link: connections to the other ranks; by default, those of
        torch.distributed or of the environment. shared_memory: ranks that are all on one host exchange host memory
        through memory that they share; otherwise, or if False, through gloo. replicas: groups of ranks of which each
        has all rows of all tables (2D sparse parallel; docs/large-clusters.md). It divides size. hosts: "auto", or a
        number of hosts with equally many ranks, for an exchange of rows in two hops (docs/large-clusters.md).
        """
        self.rank = rank
        self.size = size
        self.mesh = Mesh(rank, size, replicas)
        """Groups of ranks: those that have all rows together, and those that have the same rows."""
        self.device = full_device(device)
        """Device of the model and of the rows in training."""
        self.streams = Streams(self.device)
        self.runs_ahead = is_accelerator(self.device)
        """True if the host runs ahead of the device, so that results are known later than they are launched."""
        self.backend = backend
        self.num_sharing_device = 1 if backend == "nccl" else size
        """Ranks that share this rank's device; an upper bound if they were not started by from_environment."""
        if size > 1 and link is None:
            link = _link(rank, size, timeout_seconds, stall_seconds)
        self._link = link
        if link is not None:
            _check_replicas(link, replicas)
        self.watch = link.watch if link is not None else Watch(rank, size, None, timeout_seconds, stall_seconds)
        needs_issuer = backend == "nccl" if has_issuer is None else has_issuer
        self.issuer = Lane("issuer") if size > 1 and needs_issuer else None
        """The one thread that issues collectives of device memory; None if each lane issues its own."""
        self._shared = _shared_memory(link, rank) if link is not None and shared_memory else None
        self.host_transport = "gloo" if self._shared is None else "shared memory"
        """Way of host memory between ranks."""
        self.route = self._channel("route")
        self.rows = self._channel("row exchange", is_on_device=True)
        self.gradients = self._channel("gradient return", is_on_device=True)
        self.dense = self._channel("dense reduction", is_on_device=True, needs_host=True)
        # Only the caller's thread uses these three, and waits for each collective. So they can share a group.
        group, lane = link.group if link is not None else None, Lane("agreement")
        self.evaluate = Channel("evaluation", self.watch, self._transport(group), self.streams, lane, mesh=self.mesh)
        self.control = Channel("agreement", self.watch, self._transport(group), self.streams, lane, mesh=self.mesh)
        agreeing = self.issuer or lane, self.dense.device_group
        self.commit = Channel("commit", self.watch, self._transport(group), self.streams, *agreeing, mesh=self.mesh)
        self.notice = Notice()
        """What this rank tells all others with each batch that it trains."""
        self._reductions: list[ReferenceType[Reduction]] = []
        self.hosts_setting = hosts
        self.hosts = self._join_hosts(hosts, shared_memory)
        """Hosts of the ranks, for an exchange in two hops; None if rows and gradients travel in one."""
        if link is not None:
            link.settle()

    @staticmethod
    def from_environment(
        timeout_seconds: float = 25.0,
        device: torch.device | str | None = None,
        backend: str = "auto",
        stall_seconds: float = 600.0,
        shared_memory: bool = True,
        nccl_may_share_device: bool = False,
        replicas: int = 1,
        hosts: HostSetting = None,
    ) -> "World":
        """Returns the world of the ranks that torchrun, or a launcher with the same variables, started; else a world of
        one.

        device: None takes the accelerator if there is one. Rank 0 then prints ranks and device once.
        nccl_may_share_device: for tests of NCCL on one device. Ranks that share it exchange through loopback sockets,
        which is slow. replicas: groups of ranks of which each has all rows.
        """
        global _environment_world
        size = int(os.environ.get("WORLD_SIZE", "1"))
        local_rank = int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")))
        own_device = device_of_rank(default_device() if device is None else device, local_rank)
        if size == 1:
            choose_backend(backend, [device_place(own_device)])  # refuses a backend that is not available
            world = World(device=own_device, replicas=replicas)
        else:
            Mesh(0, size, replicas)  # refuses a number that does not divide the ranks, before they connect
            rank = dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"])
            link = _link(rank, size, timeout_seconds, stall_seconds)
            places = link.gather(device_place(own_device))
            chosen = choose_backend(backend, places, may_share_device=nccl_may_share_device)
            if nccl_may_share_device:
                take_ranks_for_hosts(rank)
            parts = rank, size, timeout_seconds, own_device, chosen
            world = World(*parts, link=link, shared_memory=shared_memory, replicas=replicas, hosts=hosts)
            if places[rank]:
                world.num_sharing_device = places.count(places[rank])
            _environment_world = ref(world)
        if device is None:
            _print_once(world)
        return world

    @staticmethod
    def given_or_found(world: "World | None") -> "World":
        """Returns the given world; for None, the environment's: the one that this process has joined, or a new one."""
        if world is not None:
            return world
        known = _environment_world() if _environment_world is not None else None
        return known if known is not None else World.from_environment()

    @property
    def host_map(self) -> HostMap | None:
        """Returns the ranks of each host, if rows and gradients travel in two hops; else None."""
        return None if self.hosts is None else self.hosts.map

    @property
    def step_channels(self) -> tuple[Channel, ...]:
        """Returns the channels of the collectives that every step has."""
        return self.route, self.rows, self.gradients, self.dense, self.commit

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Marks long work of one rank, for messages. The other ranks wait for it in any case."""
        with self.watch.busy():
            yield

    def when_left(self, reduction: "Reduction") -> None:
        """Registers a reduction to complete when a step is left halfway. Call it on all ranks, in the same order."""
        self._reductions.append(ref(reduction))

    @property
    def has_reductions(self) -> bool:
        """Returns whether a reduction was registered, whose collectives this world issues. The same on all ranks."""
        return len(self._reductions) > 0

    def leave(self) -> None:
        """Completes, on all ranks, every reduction that any rank has begun. Call it on all ranks when a step is left
        halfway: an unfinished collective would be matched with a later one."""
        alive = {i: live for i, reference in enumerate(self._reductions) if (live := reference()) is not None}
        begun = [i for i, reduction in alive.items() if reduction.has_begun]
        for i in sorted({i for text in self.control.share_text(json.dumps(begun)) for i in json.loads(text)}):
            alive[i].complete()

    def finish_device(self) -> None:
        """Waits until the device has finished its work. Raises if another rank is lost meanwhile."""
        if self.size == 1 or not self.runs_ahead:
            finish_all(self.device)
            return
        lane = Lane("device")  # the device may wait for a rank that is lost
        self.watch.wait(lane.submit(lambda: finish_all(self.device)), "the end of the run")
        lane.close()

    def close(self) -> None:
        """Ends the threads and groups of this world. Does not wait for other ranks after a failure."""
        global _environment_world
        if self._link is None:
            return
        if _environment_world is not None and _environment_world() is self:
            _environment_world = None
        if self.watch.failure is None:
            for channel in (*self.step_channels, self.evaluate, self.control):
                channel.close()
            if self.hosts is not None:
                self.hosts.close_channels()
            if dist.is_initialized():
                lane = Lane("end")
                self.watch.wait(lane.submit(dist.destroy_process_group), "the end")
                lane.close()
        self._link.end()
        if self._shared is not None:
            self._shared.close()
        if self.hosts is not None:
            self.hosts.close()

    def _join_hosts(self, setting: HostSetting, shared_memory: bool) -> Hosts | None:
        """Makes the channels of two hops. All ranks call it, whatever their setting, and raise alike."""
        check_hosts(setting)
        if self._link is None:
            return None
        host_map = agreed_map(self._link.gather(told_hosts(setting, host_identity())))
        if host_map is None:
            return None
        if self.rank == 0:
            what = "two hops" if host_map.has_two_hops else "one hop, which is all that these hosts need"
            print(f"nestpipe: ranks by host: {host_map}; rows travel in {what}", file=sys.stderr, flush=True)
        if not host_map.has_two_hops:
            return None
        if self.mesh.num_replicas > 1:
            raise ValueError(
                f"exchange.hosts does not combine with exchange.replicas = {self.mesh.num_replicas}: set only one"
            )
        if self.issuer is not None:
            raise ValueError(
                "exchange.hosts does not combine with NCCL: its hops go through host memory. Leave it out, or set "
                'distributed.backend = "gloo"'
            )

        def make(name: str, transport: Transport, ranks: Sequence[int]) -> Channel:
            return Channel(name, self.watch, transport, self.streams, ranks=ranks)

        return Hosts(host_map, self.rank, self._link, make, shared_memory)

    def _channel(self, name: str, is_on_device: bool = False, needs_host: bool = False) -> Channel:
        lane, device_group = None, None
        if is_on_device and self.issuer is not None:
            lane = self.issuer
            if self.backend == "nccl" or not self.runs_ahead:  # gloo cannot send device memory
                device_group = self._group(self.backend)
        needs_group = self._shared is None and (device_group is None or needs_host)
        transport = self._transport(self._group("gloo") if needs_group else None)
        return Channel(name, self.watch, transport, self.streams, lane, device_group, self.mesh)

    def _transport(self, group: dist.ProcessGroup | None) -> Transport | None:
        """Returns the way of host memory on the next channel. All ranks make their channels in the same order."""
        if self._shared is not None:
            return self._shared.next_transport()
        return GlooTransport(group) if group is not None else None

    def _group(self, backend: str) -> dist.ProcessGroup | None:
        return self._link.new_group(backend) if self._link is not None else None


_environment_world: "ReferenceType[World] | None" = None
"""World of several ranks that this process has joined from its environment, until it is closed."""
_has_printed = False


def _print_once(world: World) -> None:
    """Prints ranks and device, which the environment decided: the user may expect more than there are."""
    global _has_printed
    if world.rank == 0 and not _has_printed:
        between = world.backend if world.backend == "nccl" else world.host_transport
        ranks = "1 rank" if world.size == 1 else f"{world.size} ranks, {between} between them"
        print(f"nestpipe: {ranks}, on {world.device}", file=sys.stderr, flush=True)
    _has_printed = True


def _shared_memory(link: Link, rank: int) -> SharedMemory | None:
    """Returns the memory of a world whose ranks are all on one host; else None."""
    rings = [LARGE_RING_BYTES] * NUM_LARGE_CHANNELS + [RING_BYTES] * NUM_SMALL_CHANNELS
    return shared_memory_of(link, rank, range(link.size), rings)


def _check_replicas(link: Link, replicas: int) -> None:
    by_rank = link.gather(str(replicas))
    if len(set(by_rank)) > 1:
        raise ValueError(
            f"the ranks disagree on exchange.replicas: in order of rank {', '.join(by_rank)}; give all ranks the same"
        )


def _link(rank: int, size: int, timeout_seconds: float, stall_seconds: float) -> Link:
    check_open_files(size, NUM_GROUPS, holds_store=rank == 0)
    make = Link if dist.is_initialized() else Link.from_environment
    return make(rank, size, timeout_seconds, stall_seconds)
