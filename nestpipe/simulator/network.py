"""Times of collectives on a cluster's network."""

import math
from dataclasses import dataclass

from nestpipe.prediction.work import DIRECT
from nestpipe.simulator.cluster import NetworkSection


@dataclass(frozen=True)
class Exchange:
    """Time of a collective: a part without bandwidth, and a part that takes all of it."""

    latency_ms: float
    transfer_ms: float

    def __add__(self, other: "Exchange") -> "Exchange":
        """Returns the time of both, one after the other."""
        return Exchange(self.latency_ms + other.latency_ms, self.transfer_ms + other.transfer_ms)


def all_to_all(
    network: NetworkSection, num_workers: int, num_bytes: float, hops: str = DIRECT, node_share: float = 1.0
) -> Exchange:
    """Returns the time in which each worker sends num_bytes, spread evenly over all workers, itself included.

    node_share: share of the bytes that two hops send between nodes, once for all workers of a node.
    """
    in_node = min(network.devices_per_node, num_workers)
    num_nodes = math.ceil(num_workers / in_node)
    if hops == DIRECT:
        inside, between = in_node - 1, num_workers - in_node
        inside_ms = _ms(num_bytes * inside / num_workers, network.inside_gb_per_second)
        between_ms = _between_ms(network, num_bytes * between / num_workers, between)
        latency_us = inside * network.inside_latency_us + between * network.between_latency_us
        return Exchange(latency_us / 1e3, max(inside_ms, between_ms))
    # One hop is between a node's workers, the other between the workers at one place of all nodes.
    inside, between = in_node - 1, num_nodes - 1
    inside_ms = _ms(num_bytes * inside / in_node, network.inside_gb_per_second)
    between_ms = _between_ms(network, node_share * num_bytes * between / num_nodes, between)
    latency_us = inside * network.inside_latency_us + between * network.between_latency_us
    return Exchange(latency_us / 1e3, inside_ms + between_ms)


def all_reduce(network: NetworkSection, num_workers: int, num_bytes: float) -> Exchange:
    """Returns the time of a sum over all workers: a ring for the bytes, a tree for the latency."""
    if num_workers == 1:
        return Exchange(0.0, 0.0)
    is_one_node = num_workers <= network.devices_per_node
    rate = network.inside_gb_per_second if is_one_node else network.between_gb_per_second
    latency_us = network.inside_latency_us if is_one_node else network.between_latency_us
    rounds = 2 * math.ceil(math.log2(num_workers))
    return Exchange(rounds * latency_us / 1e3, _ms(2 * num_bytes * (num_workers - 1) / num_workers, rate))


def _between_ms(network: NetworkSection, num_bytes: float, num_peers: int) -> float:
    return _ms(num_bytes, network.between_gb_per_second) * (1 + network.incast * num_peers)


def _ms(num_bytes: float, gb_per_second: float) -> float:
    return num_bytes / gb_per_second / 1e6
