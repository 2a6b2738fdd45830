"""Compares schedules that took turns among several ranks: ratios round by round, and their medians."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from nestpipe.bench.harness.pairs import spread
from nestpipe.distributed import World
from nestpipe.embedding.cluster import BY_KEYS
from nestpipe.embedding.dedup import RequesterDedup
from nestpipe.embedding.travel import TravelList
from nestpipe.pipelining.step_times import StepTimes
from nestpipe.recipe.summary import STEP_FIELDS, step_value

Values = Mapping[str, float]
"""Milliseconds or bytes per step, by field: means of one way in one round."""

EXCHANGED = ("exchanged_row_bytes_per_step", "exchanged_gradient_bytes_per_step", "exchanged_key_bytes_per_step")
FIELDS = (*STEP_FIELDS, *EXCHANGED)
EXCHANGES = ("send_rows_ms", "return_gradients_ms")
"""Time of the compute lane in the row exchange and the gradient return, or waiting for them."""
SLOWEST_RANK_FIELDS = ("step_ms", "unattributed_ms")
"""Fields taken from the slowest rank. The others are means over ranks."""


@dataclass(frozen=True)
class Way:
    """Schedule, number of micro-batches and window of a training loop."""

    schedule: str
    num_micro_batches: int
    window: str = "once"
    method: str = BY_KEYS.method
    """Method of clustering."""
    stale: bool = False
    """Whether the model sees shared rows as they were before the last update."""
    cross_batch: bool = False
    """Whether rows and gradients are exchanged across batches."""


@dataclass(frozen=True)
class Shares:
    """Shares of distinct keys whose rows arrive with the first micro-batch, and whose gradients leave with the last."""

    head: float
    tail: float


Rounds = Mapping[Way, Sequence[Values]]
Figure = Callable[[int], float]


def ratios(way: Way, rounds: Rounds, shares: Shares, compute: str) -> dict[str, float]:
    """Returns the fields that compare a way with others in the same rounds: medians and ranges."""
    serial = rounds[Way("serial", 1)]
    same_parts = rounds[Way("serial", way.num_micro_batches)]
    mine = rounds[way]

    def over_rounds(name: str, figure: Figure) -> dict[str, float]:
        return spread(name, [figure(i) for i in range(len(mine))])

    fields: dict[str, float] = {}
    baseline = same_parts if way.schedule == "inter" else serial
    speed = "speedup_vs_serial" if compute == "paced" else "real_speedup_vs_serial"
    if way.schedule != "serial":
        fields |= over_rounds(speed, lambda i: baseline[i]["step_ms"] / mine[i]["step_ms"])
        fields |= over_rounds("dense_slowdown", lambda i: mine[i]["dense_ms"] / same_parts[i]["dense_ms"])
    if way.schedule in ("intra", "nested"):
        before = rounds[Way("inter", 1)] if way.schedule == "nested" else serial
        exchange = [values["exposed_exchange_ms"] for values in serial]
        fraction = "exposed_exchange_fraction" if compute == "paced" else "waiting_exchange_fraction"
        fields |= {"head_share": shares.head, "tail_share": shares.tail}
        fields |= over_rounds(fraction, lambda i: mine[i]["exposed_exchange_ms"] / exchange[i])
        fields |= over_rounds(
            "exposed_exchange_end_to_end", lambda i: 1 - (before[i]["step_ms"] - mine[i]["step_ms"]) / exchange[i]
        )
    if way.schedule in ("intra", "nested") and compute == "paced":
        least = [least_step_ms(way, mine[i], serial[i], same_parts[i], shares) for i in range(len(mine))]
        fields |= over_rounds("allowed_speedup", lambda i: serial[i]["step_ms"] / least[i])
        fields |= over_rounds("speedup_vs_allowed", lambda i: least[i] / mine[i]["step_ms"])
    return fields


def least_step_ms(way: Way, mine: Values, serial: Values, same_parts: Values, shares: Shares) -> float:
    """Returns the step time of a perfect overlap of the same work: the longest of compute, host and exchange.

    `same_parts` are the values of serial with as many micro-batches.
    """
    head, tail = shares.head * serial["send_rows_ms"], shares.tail * serial["return_gradients_ms"]
    rest = mine["row_update_ms"] + mine["overlap_sync_ms"] + mine["exposed_reduce_ms"]
    compute = same_parts["dense_ms"] + rest + head + tail
    if way.schedule == "intra":
        compute += serial["exposed_lookup_ms"]
    return max(compute, mine["busy_host_ms"], mine["busy_exchange_ms"])


def means(times: Sequence[StepTimes], world: World) -> dict[str, float]:
    """Returns means over steps and ranks, or the slowest rank's for SLOWEST_RANK_FIELDS. All ranks call it."""
    names = (*FIELDS, *EXCHANGES)
    mine = torch.tensor([statistics.mean(_value(t, name) for t in times) for name in names], dtype=torch.float64)
    by_rank = world.control.all_to_all_equal(mine.expand(world.size, -1))
    return {
        name: float(by_rank[:, i].max() if name in SLOWEST_RANK_FIELDS else by_rank[:, i].mean())
        for i, name in enumerate(names)
    }


def _value(times: StepTimes, name: str) -> float:
    if name in EXCHANGES:
        return times.stages[name.removesuffix("_ms")]
    return step_value(times, name)


def count_exchanged(dedup: RequesterDedup, rows_in: TravelList, gradients_out: TravelList) -> list[int]:
    """Counts the keys whose rows arrive with the first micro-batch, whose gradients leave with the last, and all."""
    last = len(dedup.num_samples) - 1
    head = rows_in.num_others(0) + rows_in.num_own(0)
    tail = gradients_out.num_others(last) + gradients_out.num_own(last)
    return [head, tail, len(dedup.keys)]


def shares_of(counts: Sequence[float]) -> Shares:
    """Returns the shares of summed counts of `count_exchanged`."""
    head, tail, num_keys = counts
    return Shares(head / num_keys, tail / num_keys)


def medians(rounds: Sequence[Values]) -> dict[str, float]:
    return {name: statistics.median(values[name] for values in rounds) for name in FIELDS}
