"""The channels of an exchange in two hops: inside each host, and between the ranks at the same place in their hosts."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

from nestpipe.distributed.channel import Channel
from nestpipe.distributed.host_map import HostMap
from nestpipe.distributed.link import Link
from nestpipe.distributed.shared_memory import LARGE_RING_BYTES, Listener, Neighbours, SharedMemory, are_on_one_host
from nestpipe.distributed.sockets import FILES_OF_A_GROUP, reserve_files
from nestpipe.distributed.transport import GlooTransport, Transport

NUM_CHANNELS = 3
"""Channels of each hop."""


@dataclass(frozen=True)
class Hop:
    """The channels of one hop. Their ranks are numbered in order of rank."""

    route: Channel
    rows: Channel
    gradients: Channel

    @property
    def rank(self) -> int:
        return self.route.rank

    @property
    def size(self) -> int:
        return self.route.size

    def close(self) -> None:
        for channel in (self.route, self.rows, self.gradients):
            channel.close()


MakeChannel = Callable[[str, Transport, Sequence[int]], Channel]


class Hosts:
    """The map of hosts, and this rank's two hops."""

    def __init__(self, host_map: HostMap, rank: int, link: Link, make: MakeChannel, shared_memory: bool) -> None:
        """make: makes a channel by name, transport and ranks. shared_memory: ranks of one host share memory; otherwise
        they use gloo. All ranks call it together."""
        self.map = host_map
        self._memories: list[SharedMemory] = []
        inside, between = host_map.inside(rank), host_map.between(rank)
        self.inside = self._hop("inside the host", inside, rank, link, make, shared_memory)
        self.between = self._hop("between hosts", between, rank, link, make, shared_memory)

    def _hop(
        self, where: str, ranks: Sequence[int], rank: int, link: Link, make: MakeChannel, shared_memory: bool
    ) -> Hop:
        shared = shared_memory_of(link, rank, ranks, [LARGE_RING_BYTES] * NUM_CHANNELS) if shared_memory else None
        if shared is not None:
            self._memories.append(shared)
            transports: list[Transport] = [shared.next_transport() for _ in range(NUM_CHANNELS)]
        else:
            num_files = NUM_CHANNELS * (len(ranks) - 1 + FILES_OF_A_GROUP)
            reserve_files(num_files, f"{NUM_CHANNELS} connections to each of {len(ranks) - 1} other ranks {where}")
            transports = [GlooTransport(link.new_group("gloo", ranks)) for _ in range(NUM_CHANNELS)]
        names = "route", "row exchange", "gradient return"
        return Hop(*(make(f"{name} {where}", way, ranks) for name, way in zip(names, transports, strict=True)))

    def close_channels(self) -> None:
        self.inside.close()
        self.between.close()

    def close(self) -> None:
        for memory in self._memories:
            memory.close()


def shared_memory_of(link: Link, rank: int, ranks: Sequence[int], ring_bytes: Sequence[int]) -> SharedMemory | None:
    """Returns the memory that some ranks share, this one among them; None if they are not all on one host. All ranks of
    the world call it together."""
    with closing(Listener()) as listener:
        addresses = link.gather(listener.address)
        theirs = [addresses[other] for other in ranks]
        if not are_on_one_host(theirs):
            return None
        return link.run(lambda: SharedMemory(Neighbours(rank, listener, theirs, ranks), ring_bytes))
