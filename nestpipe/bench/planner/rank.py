"""One rank of `bench planner`, on its own host. Rank 0 prints one record per line, as JSON."""

import argparse
import itertools
import json
import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from nestpipe.bench.harness.pairs import alternate, spread
from nestpipe.bench.network.loop import QUICK, SEED, Size, make_features
from nestpipe.bench.network.overlap import KeySize, Ring
from nestpipe.bench.planner.workloads import WORKLOADS, Paced, Workload
from nestpipe.data.batch import Batch
from nestpipe.distributed import World
from nestpipe.prediction.choose import CANDIDATES, Choice, choose_num_micro_batches
from nestpipe.store.cores import usable_cores
from nestpipe.train.trainer import Trainer

Record = dict[str, int | float | str | bool]


@dataclass(frozen=True)
class Effort:
    rounds: int
    counted: int
    """Counted steps of a turn. Those before and after them fill and drain the pipeline."""
    paces: int


NUM_BATCHES = 6
"""Enough for consecutive batches of a ring to share four fifths of their keys."""
FULL_SIZE, FULL_KEYS, FULL = Size(dim=256), KeySize(8_000, NUM_BATCHES), Effort(7, 6, 3)
QUICK_EFFORT = Effort(1, 1, 1)
NUM_FILLING, NUM_DRAINING = 3, 2
"""Steps of a turn that are not counted: the first and the last ones."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    world = World.from_environment(device="cpu")
    torch.set_num_threads(max(1, usable_cores() // world.size))
    settings = (QUICK, KeySize(600, NUM_BATCHES), QUICK_EFFORT) if options.quick else (FULL_SIZE, FULL_KEYS, FULL)
    for workload in WORKLOADS:
        for record in Measurement(workload, world, *settings).records():
            if world.rank == 0:
                print(json.dumps(record), flush=True)
    world.control.all_reduce_sum(torch.zeros(1))
    os._exit(0)


class Measurement:
    """One workload: the number that is chosen, and the steps of all numbers that could have been."""

    def __init__(self, workload: Workload, world: World, size: Size, keys: KeySize, effort: Effort) -> None:
        self._workload, self._world, self._size, self._keys, self._effort = workload, world, size, keys, effort
        self._batches = Ring(size, keys, workload.overlap, world.size).batches(world.rank)
        self._exchange_ms = 0.0

    def records(self) -> Iterator[Record]:
        self._exchange_ms = self._serial_exchange_ms()
        choice = choose_num_micro_batches(self._trainer("nested", 1), self._batches)
        trainers = {num: _Turns(self._trainer("nested", num), self._batches, self._effort) for num in CANDIDATES}
        for turns in trainers.values():
            turns.turn()  # creates every row and touches all memory
        works = {num: partial(turns.turn) for num, turns in trainers.items()}
        rounds = alternate(works, self._effort.rounds, warm_up_rounds=0)
        for num in CANDIDATES:
            yield self._about("fixed", num) | self._step(rounds[num]) | self._predicted(choice, num)
        best = min(CANDIDATES, key=lambda num: statistics.median(rounds[num]))
        ratios = [mine / theirs for mine, theirs in zip(rounds[choice.num_micro_batches], rounds[best], strict=True)]
        yield {
            **self._about("auto", choice.num_micro_batches),
            **self._step(rounds[choice.num_micro_batches]),
            "best_num_micro_batches": best,
            **spread("auto_over_best", ratios),
        }

    def _trainer(self, schedule: str, num_micro_batches: int) -> Trainer:
        model = Paced(self._size.dim)
        model.batch_ms = self._workload.pace * self._exchange_ms
        model.micro_batch_ms = self._workload.split_pace * self._exchange_ms
        return Trainer(
            model,
            make_features(self._size.dim),
            dense_optimizer=lambda parameters: torch.optim.SGD(parameters, 1e-3),
            world=self._world,
            check_split=False,
            schedule=schedule,
            num_micro_batches=num_micro_batches,
            num_threads=torch.get_num_threads(),
            seed=SEED,
        )

    def _serial_exchange_ms(self) -> float:
        turns = _Turns(self._trainer("serial", 1), self._batches, self._effort)
        for _ in range(self._effort.paces):
            turns.turn()
        times = turns.times[-self._effort.counted :]
        own_ms = statistics.median(step.stages["send_rows"] + step.stages["return_gradients"] for step in times)
        return float(_by_rank(self._world, own_ms).mean())

    def _about(self, table: str, num: int) -> Record:
        workload = self._workload
        return {
            "table": table,
            "workload": workload.name,
            "num_micro_batches": num,
            "schedule": "nested",
            "cross_batch": True,
            "pace": workload.pace,
            "split_pace": workload.split_pace,
            "overlap": workload.overlap,
            "exchange_ms": self._exchange_ms,
            "ranks": self._world.size,
            "threads": torch.get_num_threads(),
            "dim": self._size.dim,
            "batch_size": self._size.batch_size,
            "keys_per_rank": self._keys.num_keys,
            "num_rounds": self._effort.rounds,
            "seed": SEED,
        }

    def _step(self, steps_ms: list[float]) -> Record:
        return {**spread("step_ms", steps_ms)}

    def _predicted(self, choice: Choice, num: int) -> Record:
        return {"predicted_step_ms": choice.predicted_step_ms[num]} if num in choice.predicted_step_ms else {}


class _Turns:
    """A trainer that takes turns with others."""

    def __init__(self, trainer: Trainer, batches: list[Batch], effort: Effort) -> None:
        self._trainer, self._effort = trainer, effort
        self._batches = itertools.cycle(batches)
        self.times = trainer.fit(self._batches, 1).times

    def turn(self) -> float:
        """Trains, and returns the milliseconds of a step, of the slowest rank."""
        counted = self._effort.counted
        times = self._trainer.fit(self._batches, NUM_FILLING + counted + NUM_DRAINING).times
        self.times = times[NUM_FILLING : NUM_FILLING + counted]
        own_ms = statistics.mean(step.step_ms for step in self.times)
        return float(_by_rank(self._trainer.world, own_ms).max())


def _by_rank(world: World, number: float) -> torch.Tensor:
    return world.control.all_to_all_equal(torch.full((world.size, 1), number, dtype=torch.float64))


if __name__ == "__main__":
    main()
