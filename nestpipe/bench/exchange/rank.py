"""One rank of `bench exchange --part link`. Rank 0 prints one record per line, as JSON."""

import argparse
import gc
import json
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from nestpipe.bench.exchange.batches import (
    QUICK,
    Size,
    bag_features,
    distinct_share,
    make_bag_batches,
    make_batches,
    make_hot_batches,
    make_small_batches,
    small_tables,
)
from nestpipe.bench.exchange.hops import mean_of_ranks, sent_bytes, union_share
from nestpipe.bench.exchange.link_loop import LINK_FIELDS, RANKS_PER_HOST, LinkLoop
from nestpipe.bench.harness.pairs import alternate, spread
from nestpipe.bench.harness.ways import EXCHANGED, Values, Way, medians
from nestpipe.bench.network.loop import SEED, Paced, make_features
from nestpipe.bench.network.loop import Size as LoopSize
from nestpipe.data.batch import Batch
from nestpipe.distributed import World
from nestpipe.distributed.host_map import AUTO
from nestpipe.embedding.exchange.rounding import ROUNDING
from nestpipe.embedding.table import PLACEMENTS, Feature

Record = dict[str, int | float | str | bool]
Variant = tuple[dict[str, Feature], Mapping[str, Any]]
"""Features, and options of the pipeline."""

LINK_BYTES = "link_bytes"
"""Bytes that a host sent to others in a turn."""
WAY = Way("nested", 1, cross_batch=True)
PACE = 0.5
"""Time of paced dense compute, relative to the exchange time of serial without any option."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    world = World.from_environment(device="cpu")
    torch.set_num_threads(1)
    for record in Bench(QUICK if options.quick else Size(), world).records():
        if world.rank == 0:
            print(json.dumps(record), flush=True)
    world.control.all_reduce_sum(torch.zeros(1))
    os._exit(0)  # does not wait for lanes, which wait for further steps


class Bench:
    """The measurement, as this rank takes part in it."""

    def __init__(self, size: Size, world: World) -> None:
        self._size, self._world = size, world

    def records(self) -> Iterator[Record]:
        yield from self._forms()
        yield from self._placements()
        yield from self._groups()
        yield from self._hops()
        yield from self._poolings()

    def _forms(self) -> Iterator[Record]:
        """Yields a record for each form of rows and gradients in messages."""
        names = (None, *(name for name in ROUNDING if name != "float32"))
        features, batches = make_features(self._size.dim), make_batches(self._size, self._world.rank)
        variants = {str(name): (features, {"row_dtype": name, "gradient_dtype": name}) for name in names}
        rounds = self._measured(variants, batches)
        for name in names:
            mine, plain = rounds[str(name)], rounds["None"]
            pairs = list(zip(mine, plain, strict=True))
            row_ratio, gradient_ratio = (
                statistics.median(m[field] / p[field] for m, p in pairs) for field in EXCHANGED[:2]
            )
            yield {
                **self._record("forms", mine),
                "keys_per_rank": self._size.num_occurrences,
                "row_bytes_vs_float32": row_ratio,
                "gradient_bytes_vs_float32": gradient_ratio,
                **spread("speed_vs_float32", [p["step_ms"] / m["step_ms"] for m, p in pairs]),
                "row_dtype": name or "float32",
                "gradient_dtype": name or "float32",
            }

    def _placements(self) -> Iterator[Record]:
        """Yields a record for each placement of small hot tables. All bytes to other ranks count, keys included."""
        size = self._size
        variants: dict[str, Variant] = {placement: (small_tables(size, placement), {}) for placement in PLACEMENTS}
        rounds = self._measured(variants, make_small_batches(size, self._world.rank))
        for placement in PLACEMENTS:
            mine, plain = rounds[placement], rounds["sharded"]
            pairs = list(zip(mine, plain, strict=True))
            bytes_of = [tuple(sum(values[field] for field in EXCHANGED) for values in pair) for pair in pairs]
            yield {
                **self._record("placements", mine),
                "tables": size.num_small_tables,
                "rows_of_a_table": size.rows_of_a_small_table,
                "keys_per_rank": size.num_small_tables * size.batch_size * size.small_keys_a_sample,
                "placement": placement,
                "link_bytes_vs_sharded": statistics.median(m / p for m, p in bytes_of),
                **spread("speed_vs_sharded", [p["step_ms"] / m["step_ms"] for m, p in pairs]),
            }

    def _groups(self) -> Iterator[Record]:
        """Yields a record for one sharding group, and for one on each host. Bytes are those that a rank sends to the
        other host."""
        features, batches = make_features(self._size.dim), make_batches(self._size, self._world.rank)
        numbers = 1, self._world.size // RANKS_PER_HOST
        variants: dict[str, Variant] = {str(number): (features, {"replicas": number}) for number in numbers}
        rounds = self._measured(variants, batches)
        for number in numbers:
            mine = rounds[str(number)]
            pairs = list(zip(mine, rounds["1"], strict=True))
            yield {
                **self._record("groups", mine),
                "keys_per_rank": self._size.num_occurrences,
                "replicas": number,
                **{name: statistics.median(values[name] for values in mine) for name in LINK_FIELDS},
                "link_bytes_vs_flat": statistics.median(m[LINK_BYTES] / p[LINK_BYTES] for m, p in pairs),
                **spread("speed_vs_flat", [p["step_ms"] / m["step_ms"] for m, p in pairs]),
            }

    def _hops(self) -> Iterator[Record]:
        """Yields a record for an exchange in one hop, and one for two. Bytes are all that hosts send each other."""
        features, batches = make_features(self._size.dim), make_hot_batches(self._size, self._world.rank)
        share = union_share(batches, self._world)
        rounds = self._measured({"1": (features, {}), "2": (features, {"hosts": AUTO})}, batches)
        for number, mine in rounds.items():
            pairs = list(zip(mine, rounds["1"], strict=True))
            yield {
                **self._record("hops", mine),
                "hops": int(number),
                "keys_per_rank": self._size.num_hot_occurrences,
                "union_share": share,
                "link_bytes_vs_flat": statistics.median(m[LINK_BYTES] / p[LINK_BYTES] for m, p in pairs),
                **spread("speed_vs_flat", [p["step_ms"] / m["step_ms"] for m, p in pairs]),
            }

    def _poolings(self) -> Iterator[Record]:
        """Yields a record for each place where bags are pooled. All bytes to other ranks count, keys included."""
        size = self._size
        variants: dict[str, Variant] = {where: (bag_features(size, where), {}) for where in ("requester", "owner")}
        batches = make_bag_batches(size, self._world.rank)
        rounds = self._measured(variants, batches)
        for where, mine in rounds.items():
            pairs = list(zip(mine, rounds["requester"], strict=True))
            bytes_of = [tuple(sum(values[field] for field in EXCHANGED) for values in pair) for pair in pairs]
            yield {
                **self._record("poolings", mine),
                "features": size.num_bag_features,
                "keys_of_a_bag": size.keys_of_a_bag,
                "keys_per_rank": size.num_bag_features * size.batch_size * size.keys_of_a_bag,
                "distinct_share": distinct_share(batches),
                "pooled_at": where,
                "link_bytes_vs_rows": statistics.median(m / p for m, p in bytes_of),
                **spread("speed_vs_rows", [p["step_ms"] / m["step_ms"] for m, p in pairs]),
            }

    def _measured(self, variants: Mapping[str, Variant], batches: list[Batch]) -> Mapping[str, Sequence[Values]]:
        """Returns the rounds of each variant. Dense compute is paced by serial's exchange of the first one."""
        sizes = LoopSize(batch_size=self._size.batch_size, dim=self._size.dim)

        def loop_of(way: Way, features: dict[str, Feature], options: Mapping[str, Any]) -> LinkLoop:
            loop = LinkLoop(way, Paced(sizes), features, batches, self._world, 1, **options)
            loop.turn(self._size.num_batches)  # creates every row and touches all memory
            return loop

        first = next(iter(variants.values()))
        serial = loop_of(Way("serial", 1), *first)
        times = [serial.turn(self._size.num_batches)["exposed_exchange_ms"] for _ in range(3)]
        serial.close()
        loops = {name: loop_of(WAY, *variant) for name, variant in variants.items()}
        for loop in loops.values():
            assert isinstance(loop.model, Paced)
            loop.model.sleep_ms = PACE * statistics.median(times)
        turns = {name: partial(self._turn, loop) for name, loop in loops.items()}
        rounds = alternate(turns, self._size.num_rounds)
        for loop in loops.values():
            loop.close()
        del loops, serial, turns
        gc.collect()  # their stores need the memory of the next ones
        return rounds

    def _turn(self, loop: LinkLoop) -> Values:
        before = sent_bytes()
        values = loop.turn(self._size.num_batches)  # its last collective comes after all that was sent
        return {**values, LINK_BYTES: mean_of_ranks(sent_bytes() - before, self._world)}

    def _record(self, part: str, mine: Sequence[Values]) -> Record:
        return {
            "part": part,
            "ranks": self._world.size,
            "threads": 1,
            "schedule": WAY.schedule,
            "num_micro_batches": WAY.num_micro_batches,
            "cross_batch": WAY.cross_batch,
            "dim": self._size.dim,
            "batch_size": self._size.batch_size,
            "num_rounds": self._size.num_rounds,
            "seed": SEED,
            **medians(mine),
        }


if __name__ == "__main__":
    main()
