"""Costs of the stages on a cluster: one function for each stage, found by the stage's name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from nestpipe.pipelining.schedule import CROSSING, OVERLAPPING, WINDOWED, Op
from nestpipe.prediction.work import Cost, Times, Way, Work
from nestpipe.simulator.cluster import Cluster
from nestpipe.simulator.network import Exchange, all_reduce, all_to_all

KEY_BYTES = 8
NUMBER_BYTES = 4
"""Bytes of a number that tells owners which keys a partial sum adds up."""
REPLY_BYTES = 2 / 8
"""Bytes of a key in an owner's reply: a bit for its row, and one for its gradient."""


@dataclass(frozen=True)
class Case:
    """A simulation: some workers of a cluster, and a way of training."""

    cluster: Cluster
    num_workers: int
    way: Way
    num_micro_batches: int

    @property
    def group_size(self) -> int:
        """Workers among which rows travel."""
        return max(1, self.num_workers // self.way.num_groups)

    @property
    def replicas(self) -> int:
        """Returns the copies of a row, if sums keep them equal."""
        return min(self.way.replicas, self.num_workers)

    @property
    def owned_share(self) -> float:
        """Returns the keys of the global batch whose rows a worker has, relative to the keys of its own batch."""
        return self.cluster.batch.owned_share * self.replicas

    @property
    def crosses_batches(self) -> bool:
        """Whether rows and gradients are exchanged across batches. A world of one exchanges nothing."""
        return self.way.cross_batch and self.way.schedule in CROSSING and self.num_workers > 1

    def by_workers(self, name: str) -> float:
        section = self.cluster.by_workers
        return float(np.interp(self.num_workers, section.workers, getattr(section, name)))

    @property
    def hit_rate(self) -> float:
        return self.cluster.pool.hit_rate if self.way.schedule in OVERLAPPING else 0.0


def costs_on(case: Case) -> Cost:
    """Returns the cost of every operation. An operation of an unknown stage raises ValueError."""
    made: dict[tuple[str, int], Work] = {}

    def cost(op: Op) -> Work:
        place = op.stage, op.micro_batch
        if place not in made:
            if op.stage not in STAGE_COSTS:
                raise ValueError(f"there is no cost of stage {op.stage!r}; add it to STAGE_COSTS in {__name__}")
            made[place] = STAGE_COSTS[op.stage](case, op)
        return made[place]

    return cost


def _prefetch(case: Case, op: Op) -> Work:
    return Work(case.cluster.host.read_ms + case.by_workers("dedup_ms") * _planned(case))


def _upload(case: Case, op: Op) -> Work:
    return Work(case.cluster.batch.input_mb / case.cluster.host.pcie_gb_per_second)


def _route(case: Case, op: Op) -> Work:
    batch = case.cluster.batch  # keys of replicated tables go to their owners, and from there to all
    bag_bytes = batch.bag_keys * KEY_BYTES + (_partial_sums(case) + batch.bags * batch.keys_per_bag) * NUMBER_BYTES
    exchange = _all_to_all(case, (batch.keys + 2 * batch.replicated_keys) * KEY_BYTES + bag_bytes)
    exchange += _to_replicas(case, _keys_of_a_group(case) * KEY_BYTES)
    if case.crosses_batches:
        exchange += _all_to_all(case, case.cluster.batch.keys * REPLY_BYTES)
    return _collective(exchange, case.by_workers("route_ms") * _planned(case))


def _retrieve(case: Case, op: Op) -> Work:
    return Work(_host_ms(case, case.cluster.host.gather_gb_per_second))


def _write_back(case: Case, op: Op) -> Work:
    host = case.cluster.host
    return Work(host.written_share * _host_ms(case, host.scatter_gb_per_second))


def _begin(case: Case, op: Op) -> Work:
    copies = case.way.schedule in OVERLAPPING and not case.way.is_stale
    return Work(case.cluster.dense.sync_ms if copies else 0.0)


def _send_rows(case: Case, op: Op) -> Work:
    parts = _parts(case, 0, case.cluster.batch.head_share)
    if case.crosses_batches:
        parts = _first_uses_left(case, parts, case.cluster.overlap.blocked)
    sums = _partial_sums(case) / len(parts) * case.cluster.row_bytes
    return _collective(_all_to_all(case, float(parts[op.micro_batch]) * _row_bytes(case) + sums))


def _return_gradients(case: Case, op: Op) -> Work:
    parts = all_parts = _parts(case, -1, case.cluster.batch.tail_share)
    if case.crosses_batches:
        parts = _first_uses_left(case, parts, case.cluster.overlap.urgent)
    replicated = float(all_parts[op.micro_batch]) * case.cluster.batch.replicated_keys
    others = (replicated + _partial_sums(case) / len(parts)) * case.cluster.gradient_bytes
    return _collective(_all_to_all(case, float(parts[op.micro_batch]) * _gradient_bytes(case) + others))


def _share_sums(case: Case, op: Op) -> Work:
    share = case.cluster.batch.key_overlap if case.crosses_batches else 1.0
    exchange = _all_to_all(case, case.cluster.batch.replicated_keys * case.cluster.sum_bytes)
    return _collective(exchange + _among_replicas(case, share))


def _send_early_rows(case: Case, op: Op) -> Work:
    return _collective(_all_to_all(case, (1 - case.cluster.batch.key_overlap) * _row_bytes(case)))


def _return_late_gradients(case: Case, op: Op) -> Work:
    share = 1 - case.cluster.batch.key_overlap
    return _collective(_all_to_all(case, share * _gradient_bytes(case)) + _among_replicas(case, share))


def _dense(case: Case, op: Op) -> Work:
    dense, num = case.cluster.dense, case.num_micro_batches
    if op.micro_batch < 0:
        return Work(dense.optimizer_ms)
    return Work((dense.ms + (num - 1) * dense.split_ms) / num)


def _reduce(case: Case, op: Op) -> Work:
    dense = case.cluster.dense
    exchange = all_reduce(case.cluster.network, case.num_workers, dense.parameters_mb * 1e6)
    shown = 1 - (dense.hidden_reduce_share if case.way.schedule in WINDOWED else 0.0)
    added_ms = case.by_workers("reduce_ms")
    return Work(0.0, True, exchange.latency_ms + added_ms, shown * exchange.transfer_ms)


def _commit(case: Case, op: Op) -> Work:
    return _collective(all_reduce(case.cluster.network, case.num_workers, 0.0))


def _update(case: Case, op: Op) -> Work:
    share = case.cluster.batch.key_overlap if case.crosses_batches else 1.0
    averages = case.way.num_groups > 1 and not case.way.adds_sums
    sync_ms = case.cluster.two_d.sync_ms if averages else 0.0
    return Work(share * case.replicas * case.cluster.dense.row_update_ms + sync_ms)


def _late_update(case: Case, op: Op) -> Work:
    return Work((1 - case.cluster.batch.key_overlap) * case.replicas * case.cluster.dense.row_update_ms)


def _nothing(case: Case, op: Op) -> Work:
    return Work()


STAGE_COSTS: Mapping[str, Callable[[Case, Op], Work]] = {
    "prefetch": _prefetch,
    "upload": _upload,
    "route": _route,
    "retrieve": _retrieve,
    "begin": _begin,
    "send_rows": _send_rows,
    "dense": _dense,
    "return_gradients": _return_gradients,
    "share_sums": _share_sums,
    "reduce": _reduce,
    "commit": _commit,
    "sum_gradients": _nothing,  # counted in update
    "update": _update,
    "write_back": _write_back,
    "other": _nothing,
    "send_early_rows": _send_early_rows,
    "return_late_gradients": _return_late_gradients,
    "late_update": _late_update,
}


def _parts(case: Case, place: int, share: float | None) -> Times:
    """Returns the rows that travel with each micro-batch, relative to the rows of a batch. share: that of the
    micro-batch at `place`; the others have equal parts."""
    batch, num = case.cluster.batch, case.num_micro_batches
    if batch.window == "resend":
        return np.full(num, (1.0 if num == 1 else batch.resend_growth) / num)
    if share is None or num == 1:
        return np.full(num, 1 / num)
    parts = np.full(num, (1 - share) / (num - 1))
    parts[place] = share
    return parts


def _first_uses_left(case: Case, parts: Times, shared: Callable[[Times], Times]) -> Times:
    """Returns what stays of `parts` if rows travel across batches. With resend, only one of a row's uses does so."""
    if case.cluster.batch.window == "resend":
        return parts - (1 - case.cluster.batch.key_overlap) / len(parts)
    return shared(parts)


def _row_bytes(case: Case) -> float:
    """Returns the bytes of the rows of a batch in messages."""
    return case.cluster.batch.keys * case.cluster.row_bytes


def _gradient_bytes(case: Case) -> float:
    return case.cluster.batch.keys * case.cluster.gradient_bytes


def _partial_sums(case: Case) -> float:
    """Returns the partial sums of a batch: for each bag one of each owner that has some of its keys."""
    batch, size = case.cluster.batch, case.group_size
    return batch.bags * size * float(1 - (1 - 1 / size) ** batch.keys_per_bag)


def _all_to_all(case: Case, num_bytes: float) -> Exchange:
    return all_to_all(
        case.cluster.network, case.group_size, num_bytes, case.way.exchange, case.cluster.batch.node_share
    )


def _keys_of_a_group(case: Case) -> float:
    """Returns the keys for which a worker has a sum of its group's gradients: at most those of its own batch, if no two
    workers share keys, and those of all groups."""
    return case.cluster.batch.keys * min(1.0, case.owned_share)


def _among_replicas(case: Case, share: float) -> Exchange:
    """Returns the exchange of a share of the sums."""
    return _to_replicas(case, share * _keys_of_a_group(case) * case.cluster.gradient_bytes)


def _to_replicas(case: Case, num_bytes: float) -> Exchange:
    """Returns the time of sending the same bytes to each worker that has the same rows. These are on other nodes."""
    network = replace(case.cluster.network, devices_per_node=1)
    return all_to_all(network, case.replicas, case.replicas * num_bytes)


def _collective(exchange: Exchange, local_ms: float = 0.0) -> Work:
    return Work(local_ms, True, exchange.latency_ms, exchange.transfer_ms)


def _host_ms(case: Case, store_gb_per_second: float) -> float:
    """Returns the time in which the busiest owner moves its records between the store and the device."""
    batch, host = case.cluster.batch, case.cluster.host
    num_keys = (batch.keys + batch.bag_keys) * case.owned_share
    num_records = num_keys * case.by_workers("imbalance") * (1 - case.hit_rate)
    num_bytes = num_records * case.cluster.record_bytes
    return num_bytes / 1e6 * (1 / store_gb_per_second + 1 / host.pcie_gb_per_second)


def _planned(case: Case) -> float:
    return case.cluster.batch.keys / case.cluster.host.planning_keys
