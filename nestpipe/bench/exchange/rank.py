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

from nestpipe.bench.exchange.batches import QUICK, Size, make_batches
from nestpipe.bench.harness.pairs import alternate, spread
from nestpipe.bench.harness.ways import Values, Way, medians
from nestpipe.bench.network.loop import SEED, Loop, Paced, make_features
from nestpipe.bench.network.loop import Size as LoopSize
from nestpipe.distributed import World
from nestpipe.embedding.exchange.rounding import ROUNDING

Record = dict[str, int | float | str | bool]
Options = Mapping[str, Any]
"""Options of the pipeline."""

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
        self._batches = make_batches(size, world.rank)

    def records(self) -> Iterator[Record]:
        yield from self._forms()

    def _forms(self) -> Iterator[Record]:
        """Yields a record for each form of rows and gradients in messages."""
        names = (None, *(name for name in ROUNDING if name != "float32"))
        rounds = self._measured({str(name): {"row_dtype": name, "gradient_dtype": name} for name in names})
        plain = rounds["None"]
        for name in names:
            record = self._record("forms", rounds[str(name)], plain) | {"row_dtype": name or "float32"}
            yield record | {"gradient_dtype": name or "float32"}

    def _measured(self, ways: Mapping[str, Options]) -> Mapping[str, Sequence[Values]]:
        """Returns the rounds of each way. Dense compute is paced by the exchange without any option."""
        sizes = LoopSize(batch_size=self._size.batch_size, dim=self._size.dim)
        features, parts = make_features(self._size.dim), (self._batches, self._world, 1)

        def loop_of(way: Way, options: Options) -> Loop:
            loop = Loop(way, Paced(sizes), features, *parts, **options)
            loop.turn(self._size.num_batches)  # creates every row and touches all memory
            return loop

        serial = loop_of(Way("serial", 1), {})
        times = [serial.turn(self._size.num_batches)["exposed_exchange_ms"] for _ in range(3)]
        serial.close()
        loops = {name: loop_of(WAY, options) for name, options in ways.items()}
        for loop in loops.values():
            assert isinstance(loop.model, Paced)
            loop.model.sleep_ms = PACE * statistics.median(times)
        turns = {name: partial(loop.turn, self._size.num_batches) for name, loop in loops.items()}
        rounds = alternate(turns, self._size.num_rounds)
        for loop in loops.values():
            loop.close()
        del loops, serial, turns
        gc.collect()  # their stores need the memory of the next ones
        return rounds

    def _record(self, part: str, mine: Sequence[Values], plain: Sequence[Values]) -> Record:
        """plain: the same rounds without any option."""
        pairs = list(zip(mine, plain, strict=True))
        fields = ("exchanged_row_bytes_per_step", "exchanged_gradient_bytes_per_step")
        row_ratio, gradient_ratio = (statistics.median(m[field] / p[field] for m, p in pairs) for field in fields)
        return {
            "part": part,
            "ranks": self._world.size,
            "threads": 1,
            "schedule": WAY.schedule,
            "num_micro_batches": WAY.num_micro_batches,
            "cross_batch": WAY.cross_batch,
            "dim": self._size.dim,
            "batch_size": self._size.batch_size,
            "keys_per_rank": self._size.num_occurrences,
            "num_rounds": self._size.num_rounds,
            "seed": SEED,
            **medians(mine),
            "row_bytes_vs_float32": row_ratio,
            "gradient_bytes_vs_float32": gradient_ratio,
            **spread("speed_vs_float32", [p["step_ms"] / m["step_ms"] for m, p in pairs]),
        }


if __name__ == "__main__":
    main()
