"""Measures the links between hosts after the training.

The stamps of a collective show that it takes long, not which of the links it waited for. So one rank of each host sends
to one other host, and receives from one, at a time: nothing else uses these links then.
"""

import platform
import time
from typing import Any

import torch

from nestpipe.distributed import World
from nestpipe.distributed.shared_memory import host_identity

FIRST_BYTES, MOST_BYTES = 256 << 10, 32 << 20
"""Bytes of the first messages, and of the largest."""
MESSAGE_SECONDS = 0.01
"""Time that a message should take."""
NUM_REPEATS = 10
MOST_DISTANCES = 8
"""Hosts to which a host sends: all others, or those at distances of powers of two."""


def probe_links(world: World) -> dict[str, Any]:
    """Returns when this rank entered and left each exchange of one message, from which rank it was, and its bytes.

    All ranks call it. With one host there is nothing to measure, and NCCL may use another network than this one.
    """
    hosts = world.control.share_text(host_identity())
    senders = [hosts.index(host) for host in dict.fromkeys(hosts)]
    found: dict[str, Any] = {"host": platform.node(), "senders": senders, "messages": []}
    if len(senders) == 1 or world.backend != "gloo":
        return found
    num_bytes = FIRST_BYTES
    for repeat in range(NUM_REPEATS):
        for distance in _distances(len(senders)):
            message = _exchange(world, senders, distance, num_bytes)
            found["messages"] += [message] if world.rank in senders else []
        if repeat == 0:
            num_bytes = _enough_bytes(world, found["messages"])
    return found


def _distances(num_hosts: int) -> list[int]:
    if num_hosts <= MOST_DISTANCES + 1:
        return list(range(1, num_hosts))
    return [1 << i for i in range((num_hosts - 1).bit_length())]


def _exchange(world: World, senders: list[int], distance: int, num_bytes: int) -> list[int]:
    """Has each host send to the one that is so many further. Returns the sender, the bytes, and the times."""
    send, receive, source = [0] * world.size, [0] * world.size, -1
    if world.rank in senders:
        place = senders.index(world.rank)
        source = senders[place - distance]
        send[senders[(place + distance) % len(senders)]] = receive[source] = num_bytes
    message, received = (torch.zeros(sum(sizes), dtype=torch.uint8) for sizes in (send, receive))
    entered = time.perf_counter_ns()
    world.control.all_to_all(message, send, received, receive)
    return [source, num_bytes, entered, time.perf_counter_ns()]


def _enough_bytes(world: World, messages: list[list[int]]) -> int:
    """Returns the bytes that take MESSAGE_SECONDS on average. The same on all ranks."""
    seconds = [(left - entered) / 1e9 for _, _, entered, left in messages]
    sums = torch.tensor([sum(seconds), len(seconds)], dtype=torch.float64)
    world.control.all_reduce_sum(sums)
    mean = float(sums[0] / sums[1])
    return min(max(FIRST_BYTES, int(FIRST_BYTES * MESSAGE_SECONDS / max(mean, 1e-9))), MOST_BYTES)
