"""The time of a step on some workers: the simulator, with costs that a trial has measured on one rank."""

from dataclasses import dataclass

import numpy as np

from nestpipe.pipelining.schedule import WINDOWED
from nestpipe.prediction.choose import CANDIDATES, MARGIN
from nestpipe.prediction.result import Result, sum_up
from nestpipe.prediction.split_costs import BACKWARD, FORWARD, play_split, predict_step_ms
from nestpipe.prediction.ways import CROSSING, in_groups, way_named
from nestpipe.recipe.config import AUTO, Config
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
from nestpipe.simulator.simulate import play_case
from nestpipe.sizing.need import Case

STEPS = 20
NO_TIME = 1e9
"""Gigabytes a second of a copy that takes no time of its own: it is part of what was measured."""


@dataclass(frozen=True)
class Step:
    """The step that is expected."""

    result: Result
    num_micro_batches: int
    samples_per_second: float

    @property
    def limit(self) -> tuple[str, float]:
        """Returns the field of the summary with the largest part of the step, and its share of it."""
        field = max(self.result.parts, key=lambda name: self.result.parts[name])
        return field, self.result.parts[field] / self.result.step_ms

    @property
    def busiest_lane(self) -> tuple[str, float]:
        shares = self.result.busy_shares
        lane = max(shares, key=lambda name: shares[name])
        return lane, shares[lane]


def expected_step(case: Case, recipe: Config, gb_per_second: float | None) -> Step:
    """Returns the expected step. gb_per_second: bandwidth of a worker, each way; None for the network of the default
    cluster. A number of micro-batches that is chosen later is the best one here."""
    trial, schedule = case.trial, case.trial.config.pipeline.schedule
    way = CROSSING if trial.crosses_batches and case.num_workers > 1 else way_named(schedule)
    way = in_groups(way, case.replicas)
    splits = schedule in WINDOWED and case.num_workers > 1
    chooses = recipe.pipeline.num_micro_batches == AUTO
    numbers = [trial.num_micro_batches] if not chooses else [n for n in CANDIDATES if splits or n == 1]
    results = {
        num: sum_up(play_case(cluster_of(case, num, gb_per_second), case.num_workers, way))
        for num in numbers
        if num <= trial.batch_size
    }
    best_ms = min(result.step_ms for result in results.values())
    num = min(num for num, result in results.items() if result.step_ms <= (1 + MARGIN) * best_ms)
    step_ms = results[num].step_ms
    return Step(results[num], num, trial.batch_size * case.num_workers / step_ms * 1e3)


def cluster_of(case: Case, num_micro_batches: int, gb_per_second: float | None) -> Cluster:
    """Returns the cluster of workers like the rank of the trial."""
    trial, exchange = case.trial, case.trial.config.exchange
    owned_share = case.num_owned / case.replicas / max(1.0, case.num_keys)
    record_bytes = max(1.0, case.num_keys * case.record_bytes)

    # Lanes take cores from each other, so work takes longer than the serial steps of the trial show.
    factor = predict_step_ms(trial.costs, num_micro_batches) / play_split(trial.costs, num_micro_batches).step_ms

    def measured(stage: str) -> float:
        return factor * float(np.mean(trial.costs.stages[stage].at(num_micro_batches)))

    def rate(stage: str) -> float:
        """Returns gigabytes of records a second. A rank alone owns all keys of its batch."""
        return record_bytes / 1e6 / max(measured(stage), 1e-6)

    table = case.tables[0]
    network = NetworkSection(has_issuer=trial.is_on_device)
    if gb_per_second is not None:
        network = NetworkSection(1, between_gb_per_second=gb_per_second, has_issuer=trial.is_on_device)
    planned = ByWorkersSection()
    dense = [trial.costs.stages[name] for name in (FORWARD, BACKWARD)]
    return Cluster(
        RunSection(steps=STEPS),
        BatchSection(
            samples=trial.batch_size,
            keys=max(1, round(case.num_keys)),
            owned_share=owned_share,
            dim=max(1, round(case.row_bytes / table.item_bytes)),
            state_columns=round((case.record_bytes - case.row_bytes) / table.item_bytes),
            bytes_per_number=table.item_bytes,
            row_dtype=exchange.row_dtype,
            gradient_dtype=exchange.gradient_dtype,
            input_mb=measured("upload") * NO_TIME,
            num_micro_batches=num_micro_batches,
            window=exchange.window,
            key_overlap=case.keys.overlap,
        ),
        HostSection(
            read_ms=measured("prefetch"),
            gather_gb_per_second=rate("retrieve"),
            scatter_gb_per_second=rate("write_back"),
            pcie_gb_per_second=NO_TIME,
        ),
        # The dedup of one worker is in read_ms; what more workers add is not.
        ByWorkersSection(dedup_ms=tuple(max(0.0, ms - planned.dedup_ms[0]) for ms in planned.dedup_ms)),
        network,
        DenseSection(
            ms=factor * float(np.mean(trial.costs.dense_ms(1))),
            split_ms=factor * float(sum(np.mean(line.added_ms) for line in dense)),
            optimizer_ms=trial.optimizer_ms,
            parameters_mb=trial.parameter_bytes / 1e6,
            row_update_ms=owned_share * (measured("sum_gradients") + measured("update")),
        ),
        PoolSection(hit_rate=case.keys.overlap),
        jitter=JitterSection(sigma=0.0),
    )
