"""What `bench network` concludes from its rounds: the ratios between schedules, round by round."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from nestpipe.bench.harness.pairs import spread
from nestpipe.recipe.summary import STEP_FIELDS

Values = Mapping[str, float]
"""Of one loop in one round: milliseconds a step, by field."""

FIELDS = (*STEP_FIELDS, "exchanged_row_bytes_per_step", "exchanged_gradient_bytes_per_step")
EXCHANGES = ("send_rows_ms", "return_gradients_ms")
"""row exchange and gradient return: on the compute lane, in or waiting for it"""
OF_SLOWEST = ("step_ms", "unattributed_ms")
"""the other fields are means over ranks"""


@dataclass(frozen=True)
class Way:
    schedule: str
    num_micro_batches: int
    window: str = "once"


@dataclass(frozen=True)
class Shares:
    """Of the distinct keys of the requesters' batches: what the first micro-batch brings, and the last returns."""

    head: float
    tail: float


Rounds = Mapping[Way, Sequence[Values]]
Figure = Callable[[int], float]


def ratios(way: Way, rounds: Rounds, shares: Shares, compute: str) -> dict[str, float]:
    """The fields that compare a way with others of the same rounds: medians, and their range."""
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
    """Which step a perfect overlap of the same work would leave: of compute, host and exchange, the longest.

    `same_parts` is serial with as many micro-batches.
    """
    head, tail = shares.head * serial["send_rows_ms"], shares.tail * serial["return_gradients_ms"]
    rest = mine["row_update_ms"] + mine["overlap_sync_ms"] + mine["exposed_reduce_ms"]
    compute = same_parts["dense_ms"] + rest + head + tail
    if way.schedule == "intra":
        compute += serial["exposed_lookup_ms"]
    return max(compute, mine["busy_host_ms"], mine["busy_exchange_ms"])


def medians(rounds: Sequence[Values]) -> dict[str, float]:
    return {name: statistics.median(values[name] for values in rounds) for name in FIELDS}
