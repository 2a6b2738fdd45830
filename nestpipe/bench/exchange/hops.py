"""What crosses the link between hosts: bytes that this host has sent, and keys that its ranks share."""

from collections.abc import Sequence
from pathlib import Path

import torch

from nestpipe.bench.network.loop import FEATURE
from nestpipe.data.batch import Batch
from nestpipe.distributed import World
from nestpipe.distributed.shared_memory import host_identity

SENT_BYTES = 8
"""Column of /proc/net/dev behind the name of an interface."""


def sent_bytes() -> int:
    """Returns the bytes that this host has sent to others, as its interfaces count them."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    interfaces = (line.split(":", 1) for line in lines)
    return sum(int(counts.split()[SENT_BYTES]) for name, counts in interfaces if name.strip() != "lo")


def mean_of_ranks(value: float, world: World) -> float:
    return float(world.control.all_to_all_equal(torch.full((world.size, 1), value, dtype=torch.float64)).mean())


def union_share(batches: Sequence[Batch], world: World) -> float:
    """Returns the distinct keys of hosts, added up over hosts and batches, relative to those of ranks."""
    hosts = world.control.share_text(host_identity())
    num_of_hosts = num_of_ranks = 0
    for batch in batches:
        own = batch.keys[FEATURE].values.unique()
        keys = [part.view(torch.int64) for part in world.control.all_gather_bytes(own.view(torch.uint8))]
        num_of_ranks += sum(len(part) for part in keys)
        for host in set(hosts):
            of_host = [part for part, name in zip(keys, hosts, strict=True) if name == host]
            num_of_hosts += len(torch.cat(of_host).unique())
    return num_of_hosts / num_of_ranks
