"""Computes the figures of part four-ranks of `bench h200` from its rounds, next to published ones."""

import statistics
from collections.abc import Sequence

from nestpipe.bench.h200.four_ranks_recipe import AS_PUBLISHED, COVERED, PUBLISHED, Recipe, serial_shares
from nestpipe.bench.harness.pairs import spread
from nestpipe.bench.harness.report import Record
from nestpipe.bench.harness.ways import EXCHANGES, Rounds, Shares, Values, Way, least_step_ms, medians, ratios

SERIAL = Way("serial", 1)
WAYS_AS_SERIAL = 7.0
"""Estimated time of one step of each of the nine ways, in steps of serial: three are serial, none is slower."""


def counted_steps(round_seconds: float, left_out: int, most: int, serial_ms: float) -> int:
    """Returns how many steps of a stretch can be counted if a round takes `round_seconds`: at least two."""
    steps = int(round_seconds * 1e3 / (WAYS_AS_SERIAL * serial_ms))
    return min(max(steps - left_out, 2), most)


def calibration(recipe: Recipe, parts: Values, number: int) -> Record:
    """Makes a record of serial's step with the sizes of one attempt. Its fields are not results."""
    lookup, exchange = serial_shares(parts)
    return {
        "recipe": recipe.name,
        "calibration": number,
        "remote_share": recipe.remote_share,
        "repeats": recipe.repeats,
        "calibration_step_ms": parts["step_ms"],
        "calibration_lookup_share": lookup,
        "calibration_exchange_share": exchange,
        "calibration_dense_share": parts["dense_ms"] / parts["step_ms"],
    }


def figures(way: Way, rounds: Rounds, shares: Shares, recipe: Recipe) -> dict[str, float]:
    """Returns the times of a way, its ratios to serial, and limits and published figures to compare them with."""
    mine = rounds[way]
    fields = medians(mine)
    fields |= {name: statistics.median(values[name] for values in mine) for name in EXCHANGES}
    fields |= ratios(way, rounds, shares, "paced")
    if way.cross_batch:
        fields |= {"head_blocked_share": fields.pop("head_share"), "tail_urgent_share": fields.pop("tail_share")}
    fields |= _lookup_hidden(way, rounds)
    fields |= _allowed_parts(way, rounds, shares)
    if way == SERIAL:
        fields |= _shares_of_serial(rounds, recipe)
    is_ablation = way.schedule in ("intra", "nested") or way.num_micro_batches == 1
    if recipe.name == AS_PUBLISHED.name and is_ablation:
        published = PUBLISHED[way.schedule]
        fields |= {
            "published_speedup": published.speedup,
            "published_exposed_lookup_ms": published.lookup_ms,
            "published_exposed_exchange_ms": published.exchange_ms,
        }
    return fields


def best_of(records: Sequence[Record], recipe: Recipe) -> Record:
    """Returns what the best number of micro-batches gives, with exchange across batches."""
    best = min(records, key=lambda record: record["step_ms"])
    names = {"covered": ("exposed_exchange_end_to_end",), "published": ("speedup_vs_serial", "allowed_speedup")}
    return {
        "best_num_micro_batches": best["num_micro_batches"],
        **{f"best_{name}": best[name] for name in names[recipe.name]},
    }


def _shares_of_serial(rounds: Rounds, recipe: Recipe) -> dict[str, float]:
    """Returns the shares of serial's step that the recipe's sizes are chosen by."""
    serial = rounds[SERIAL]
    if recipe.name == COVERED.name:
        return spread("dense_over_exchange", [values["dense_ms"] / values["exposed_exchange_ms"] for values in serial])
    lookup, exchange = zip(*(serial_shares(values) for values in serial), strict=True)
    return spread("lookup_share", list(lookup)) | spread("exchange_share", list(exchange))


def _lookup_hidden(way: Way, rounds: Rounds) -> dict[str, float]:
    if way.schedule not in ("inter", "nested"):
        return {}
    pairs = zip(rounds[way], rounds[Way("serial", way.num_micro_batches)], strict=True)
    return spread("lookup_hidden_fraction", [1 - m["exposed_lookup_ms"] / s["exposed_lookup_ms"] for m, s in pairs])


def _allowed_parts(way: Way, rounds: Rounds, shares: Shares) -> dict[str, float]:
    """Returns the parts of allowed_speedup's step that are not among the way's own times."""
    if way.schedule not in ("intra", "nested"):
        return {}
    serial, same_parts = rounds[SERIAL], rounds[Way("serial", way.num_micro_batches)]
    trios = list(zip(rounds[way], serial, same_parts, strict=True))
    return {
        "allowed_step_ms": statistics.median(least_step_ms(way, m, s, p, shares) for m, s, p in trios),
        "allowed_dense_ms": statistics.median(values["dense_ms"] for values in same_parts),
        "allowed_head_ms": statistics.median(shares.head * values["send_rows_ms"] for values in serial),
        "allowed_tail_ms": statistics.median(shares.tail * values["return_gradients_ms"] for values in serial),
    }
