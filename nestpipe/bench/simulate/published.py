"""The published cluster: costs from the published rows of TorchRec alone, and what they predict for the other systems.

docs/simulator.md has the derivation. All times are milliseconds of a step.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from nestpipe.bench.harness.report import Record
from nestpipe.bench.paper.published import COUNTERPARTS, NO_COUNTERPART, SERIAL, System
from nestpipe.prediction.result import Result, sum_up
from nestpipe.prediction.ways import CROSSING, in_groups, way_named
from nestpipe.prediction.work import Way
from nestpipe.simulator.cluster import (
    BatchSection,
    ByWorkersSection,
    Cluster,
    DenseSection,
    HostSection,
    JitterSection,
    NetworkSection,
    PoolSection,
    RunSection,
)
from nestpipe.simulator.network import all_to_all
from nestpipe.simulator.simulate import play_case

FEW, MANY = 128, 1536
LOOKUP_SHARE, EXCHANGE_SHARE = 0.244, 0.092
"""Published shares of TorchRec's step with 128 workers."""
NUM_GROUPS = 4
HEAD_SHARE, HIT_RATE, OVERLAP = 0.078, 0.57, 0.3
"""Assumed for our additions: head and tail of `bench network`, hits of `bench h200 --model dlrm-10`, shared keys of
`bench h200 --part one-rank`."""
ROUTE_SHARES = (0.2, 0.35, 0.4, 0.5, 0.6, 0.65, 0.8)


@dataclass(frozen=True)
class Row:
    """A published row of TorchRec."""

    step_ms: float
    lookup_ms: float
    exchange_ms: float

    @property
    def rest_ms(self) -> float:
        return self.step_ms - self.lookup_ms - self.exchange_ms


@dataclass(frozen=True)
class Spread:
    """Assumed spread of a look-up over lanes: routing of keys, reads of the store, copies to the device."""

    route: float = 0.5
    gather: float = 0.25
    copy: float = 0.25

    def of(self, lookup_ms: float) -> dict[str, float]:
        """Returns the time of each lane."""
        return {"route": self.route * lookup_ms, "gather": self.gather * lookup_ms, "copy": self.copy * lookup_ms}


def torchrec_rows() -> dict[int, Row]:
    """Returns the published rows by number of workers. Efficiency is the step with few workers over that with many."""
    assert SERIAL.lookup_ms is not None
    assert SERIAL.exchange_ms is not None
    assert SERIAL.efficiency is not None
    few_ms = SERIAL.efficiency * SERIAL.step_ms
    return {
        FEW: Row(few_ms, LOOKUP_SHARE * few_ms, EXCHANGE_SHARE * few_ms),
        MANY: Row(SERIAL.step_ms, SERIAL.lookup_ms, SERIAL.exchange_ms),
    }


def published_cluster(spread: Spread | None = None) -> Cluster:
    """Returns the cluster on which the schedule serial has exactly the published rows of TorchRec."""
    spread = spread or Spread()
    rows = torchrec_rows()
    few, many = rows[FEW], rows[MANY]
    batch = BatchSection(keys=200_000, owned_share=1.0, dim=512, state_columns=0, input_mb=0.0, key_overlap=OVERLAP)
    megabytes = batch.keys * batch.dim * batch.bytes_per_number / 1e6
    network = _network(few.exchange_ms / 2, many.exchange_ms / 2, megabytes)
    keys_ms = {num: all_to_all(network, num, batch.keys * 8).transfer_ms for num in rows}
    return Cluster(
        RunSection((FEW, 256, 512, 1024, MANY)),
        batch,
        HostSection(
            gather_gb_per_second=megabytes / (spread.gather * few.lookup_ms),
            pcie_gb_per_second=megabytes / (spread.copy * few.lookup_ms),
            written_share=0.0,
            planning_keys=batch.keys,
        ),
        ByWorkersSection(
            workers=(FEW, MANY),
            dedup_ms=(0.0, 0.0),
            route_ms=tuple(spread.route * row.lookup_ms - keys_ms[num] for num, row in rows.items()),
            reduce_ms=(0.0, many.rest_ms - few.rest_ms),
            imbalance=(1.0, many.lookup_ms / few.lookup_ms),
        ),
        network,
        DenseSection(few.rest_ms, 0.0, 0.0, 0.0, 0.0, 0.0),
        PoolSection(0.0),
        jitter=JitterSection(sigma=0.0),
    )


def _network(few_ms: float, many_ms: float, megabytes: float) -> NetworkSection:
    """Returns bandwidth and incast for which an All2All takes few_ms and many_ms, without latency."""
    few, many = few_ms * FEW / (FEW - 1), many_ms * MANY / (MANY - 1)
    incast = (many - few) / ((MANY - 1) * few - (FEW - 1) * many)
    alone_ms = few / (1 + incast * (FEW - 1))
    return NetworkSection(1, 1.0, megabytes / alone_ms, 0.0, 0.0, incast)


def _systems() -> Iterator[tuple[System, Way]]:
    """Yields the published systems that are predicted, and the way of training of each."""
    for system in COUNTERPARTS[1:]:
        yield system, way_named("stale" if system.stale else system.schedule)
    two_d = ("serial", "nested")
    for system, schedule in zip(NO_COUNTERPART, two_d, strict=True):
        yield system, Way(f"{schedule}-2d", schedule, num_groups=NUM_GROUPS)


def result_of(cluster: Cluster, num_workers: int, way: Way) -> Result:
    return sum_up(play_case(cluster, num_workers, way))


def published_records() -> Iterator[Record]:
    """Yields the rows that the cluster is calibrated on, the predicted rows, our additions, and other spreads."""
    cluster = published_cluster()
    for num_workers, row in torchrec_rows().items():
        step_ms = result_of(cluster, num_workers, way_named("serial")).step_ms
        yield {
            **{"table": "calibrated", "system": "TorchRec", "workers": num_workers, "published_step_ms": row.step_ms},
            **{"predicted_step_ms": step_ms, "fit_error": abs(step_ms / row.step_ms - 1)},
        }
    for system, way in _systems():
        yield _predicted(cluster, system, way)
    yield from _additions(cluster)
    for share in ROUTE_SHARES:
        spread = Spread(share, (1 - share) / 2, (1 - share) / 2)
        yield _spread_record(spread)


def _predicted(cluster: Cluster, system: System, way: Way) -> Record:
    few, many = (result_of(cluster, num, way) for num in (FEW, MANY))
    record: dict[str, int | float | str | bool] = {
        **{"table": "published", "system": system.name, "way": way.name, "workers": MANY},
        "published_step_ms": system.step_ms,
        "predicted_step_ms": many.step_ms,
        "published_step_error": abs(many.step_ms / system.step_ms - 1),
        "predicted_exposed_lookup_ms": many.parts["exposed_lookup_ms"],
        "predicted_exposed_exchange_ms": many.parts["exposed_exchange_ms"],
        "predicted_efficiency": few.step_ms / many.step_ms,
    }
    if system.efficiency is not None:
        difference = abs(few.step_ms / many.step_ms - system.efficiency)
        record |= {"published_efficiency": system.efficiency, "published_efficiency_error": difference}
    return record


def _additions(cluster: Cluster) -> Iterator[Record]:
    """Yields what our additions would bring, one on top of the other; and sharding groups with the paper's method."""
    once = replace(cluster, batch=replace(cluster.batch, head_share=HEAD_SHARE, tail_share=HEAD_SHARE))
    resident = replace(once, pool=PoolSection(HIT_RATE))
    cases = {
        "method": (cluster, way_named("nested")),
        "send-once": (once, way_named("nested")),
        "resident-rows": (resident, way_named("nested")),
        "cross-batch": (resident, CROSSING),
        "groups": (resident, in_groups(CROSSING, NUM_GROUPS)),
        "method-in-groups": (cluster, in_groups(way_named("nested"), NUM_GROUPS)),
    }
    for name, (changed, way) in cases.items():
        few, many = (result_of(changed, num, way) for num in (FEW, MANY))
        yield {
            **{"table": "additions", "addition": name, "workers": MANY, "predicted_step_ms": many.step_ms},
            "predicted_exposed_exchange_ms": many.parts["exposed_exchange_ms"],
            "busy_share_host": many.busy_shares["host"],
            "predicted_efficiency": few.step_ms / many.step_ms,
            "predicted_speedup": SERIAL.step_ms / many.step_ms,
        }


def _spread_record(spread: Spread) -> Record:
    result = result_of(published_cluster(spread), MANY, way_named("nested"))
    lanes = spread.of(torchrec_rows()[MANY].lookup_ms)
    return {
        **{"table": "spread", "route_share": spread.route, "workers": MANY},
        **{f"{lane}_ms": ms for lane, ms in lanes.items()},
        "host_lane_ms": lanes["gather"] + lanes["copy"],
        "predicted_step_ms": result.step_ms,
        "predicted_exposed_lookup_ms": result.parts["exposed_lookup_ms"],
    }
