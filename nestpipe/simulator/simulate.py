"""Simulates all ways of training on a cluster, for several numbers of workers."""

from collections.abc import Iterator, Sequence

from nestpipe.pipelining.schedule import WINDOWED
from nestpipe.prediction.play import Played, play
from nestpipe.prediction.result import LANES, Result, sum_up
from nestpipe.prediction.ways import all_ways, operations_of
from nestpipe.prediction.work import Way
from nestpipe.simulator.cluster import Cluster
from nestpipe.simulator.costs import Case, costs_on
from nestpipe.simulator.jitter import Jitter

Record = dict[str, int | float | str | bool]


def simulate(cluster: Cluster, workers: Sequence[int], ways: Sequence[Way] | None = None) -> Iterator[Record]:
    """Yields a record for each way and number of workers. Efficiency is relative to the fewest workers."""
    fewest_ms: dict[str, float] = {}
    for num_workers in sorted(set(workers)):
        for way in ways or all_ways(cluster.two_d.num_groups):
            result = sum_up(play_case(cluster, num_workers, way))
            fewest_ms.setdefault(way.name, result.step_ms)
            yield record_of(cluster, num_workers, way, result, fewest_ms[way.name])


def play_case(cluster: Cluster, num_workers: int, way: Way, traced: range = range(0)) -> Played:
    """Plays one way. Without jitter all workers are equal, so one of them is played for all."""
    num = micro_batches_of(cluster, way)
    case = Case(cluster, num_workers, way, num)
    jitter = Jitter(cluster.jitter, cluster.run.seed, num_workers)
    played_workers = max(1, len(traced)) if jitter.is_none else num_workers
    has_issuer = cluster.network.has_issuer
    operations = operations_of(way, num, num_workers, has_issuer, cluster.batch.replicated_keys > 0)
    return play(
        operations, costs_on(case), cluster.run.steps, played_workers, jitter, traced=traced, has_issuer=has_issuer
    )


def micro_batches_of(cluster: Cluster, way: Way) -> int:
    return cluster.batch.num_micro_batches if way.schedule in WINDOWED else 1


def record_of(cluster: Cluster, num_workers: int, way: Way, result: Result, fewest_ms: float) -> Record:
    return {
        "way": way.name,
        "schedule": way.schedule,
        "stale": way.is_stale,
        "cross_batch": way.cross_batch,
        "exchange": way.exchange,
        "groups": way.num_groups,
        "workers": num_workers,
        "num_micro_batches": micro_batches_of(cluster, way),
        "step_ms": result.step_ms,
        **result.parts,
        **{f"busy_share_{lane}": result.busy_shares[lane] for lane in LANES},
        "samples_per_second": cluster.batch.samples * num_workers / result.step_ms * 1e3,
        "scaling_efficiency": fewest_ms / result.step_ms,
    }
