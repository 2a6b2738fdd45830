"""Part four-ranks of `bench h200`: four ranks on one accelerator, every schedule against serial.

Short runs of serial determine the sizes of a recipe. Then the schedules take turns, a stretch of steps each, on one set
of ranks. They share one store; each has its own model.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from nestpipe.bench.h200.digests import digest_records
from nestpipe.bench.h200.four_ranks_data import (
    SEED,
    Tower,
    exchanged_keys,
    filled_store,
    keys_by_owner,
    make_batches,
    make_features,
)
from nestpipe.bench.h200.four_ranks_figures import SERIAL, best_of, calibration, counted_steps, figures
from nestpipe.bench.h200.four_ranks_recipe import AS_PUBLISHED, COVERED, Recipe, adjusted, is_close, tiny
from nestpipe.bench.harness.pairs import alternate
from nestpipe.bench.harness.ranks import records_of_ranks
from nestpipe.bench.harness.report import Record
from nestpipe.bench.harness.ways import Rounds, Way, means
from nestpipe.data.batch import Batch
from nestpipe.device.streams import is_accelerator
from nestpipe.distributed import World
from nestpipe.embedding.cluster import GIVEN_ORDER
from nestpipe.recipe.trace_file import write_trace
from nestpipe.simulator.trace_times import HAS_ISSUER
from nestpipe.store.cores import usable_cores
from nestpipe.train.fit_result import FitResult
from nestpipe.train.trainer import Trainer

TRACED_STEPS = 6
TIMEOUT_SECONDS = 90.0
"""Long, because ranks compile kernels and pin memory in their first steps, and on one device one after the other."""


@dataclass(frozen=True)
class Size:
    num_ranks: int = 4
    recipes: tuple[Recipe, ...] = (COVERED, AS_PUBLISHED)
    rows_a_rank: int = 500_000
    num_micro_batches: int = 8
    crossing: tuple[int, ...] = (1, 2, 8)
    """Numbers of micro-batches of nested with exchange across batches."""
    num_rounds: int = 4
    left_out: int = 5
    """Steps left out at the beginning of a stretch, while the pipeline fills."""
    left_out_last: int = 2
    """Steps at its end that do not count, because nothing is prefetched any more."""
    most_counted: int = 5
    round_seconds: float = 20.0
    num_calibrations: int = 4
    is_quick: bool = False

    @property
    def ways(self) -> list[Way]:
        many = self.num_micro_batches
        serial = [Way("serial", number) for number in sorted({1, many, *self.crossing})]
        plain = [Way("inter", 1), Way("intra", many), Way("nested", many)]
        return [*serial, *plain, *(Way("nested", number, cross_batch=True) for number in self.crossing)]


QUICK = Size(
    num_ranks=2,
    recipes=(tiny(COVERED), tiny(AS_PUBLISHED)),
    rows_a_rank=2_000,
    num_micro_batches=4,
    crossing=(1, 4),
    num_rounds=2,
    left_out=1,
    left_out_last=1,
    most_counted=2,
    num_calibrations=2,
    is_quick=True,
)


def records(device: str, quick: bool, backend: str, traces: Path | None) -> Iterator[Record]:
    size = QUICK if quick else Size()
    return records_of_ranks(
        size.num_ranks, _on_rank, size, traces, device=device, timeout_seconds=TIMEOUT_SECONDS, backend=backend
    )


def _on_rank(world: World, size: Size, traces: Path | None) -> Iterator[Record]:
    with world.watch.reporting():
        for recipe in size.recipes:
            yield from Comparison(world, size, recipe, traces).records()
            if is_accelerator(world.device):
                torch.accelerator.empty_cache()
        yield from digest_records(world, size.is_quick)


class Comparison:
    """Compares all schedules with one recipe."""

    def __init__(self, world: World, size: Size, recipe: Recipe, traces: Path | None) -> None:
        self.world, self.size, self._traces = world, size, traces
        # The store has all but one of the rank's cores, because kernel launches and exchanges need cores too.
        self.threads = max(1, usable_cores() // world.size - 1)
        torch.set_num_threads(1)
        self.features = make_features(recipe)
        self.pools = keys_by_owner(size.rows_a_rank, world.size)
        with world.busy():
            self.store = filled_store(self.features, self.pools[world.rank], self.threads)
        self.recipe = recipe
        self.batches: list[Batch] = []
        self.serial_ms = 0.0

    def records(self) -> Iterator[Record]:
        yield from self._calibrate()
        self.batches = make_batches(self.recipe, self.pools, self.world.rank)
        yield from self._compare()

    def _compare(self) -> Iterator[Record]:
        size, ways = self.size, self.size.ways
        trainers = {way: self._trainer(way, self.recipe) for way in ways}
        for trainer in trainers.values():
            self._stretch(trainer, self.batches, 1, left_out=2)  # touches all memory, compiles all kernels
        not_counted = size.left_out + size.left_out_last
        num_counted = counted_steps(size.round_seconds, not_counted, size.most_counted, self.serial_ms)
        stretches = {
            way: partial(self._stretch, trainer, self.batches, num_counted, size.left_out)
            for way, trainer in trainers.items()
        }
        rounds = alternate(stretches, size.num_rounds, warm_up_rounds=0)
        made = [self._record(way, num_counted, rounds) for way in ways]
        yield from made
        yield {**self._identity(), **best_of([record for record in made if record["cross_batch"]], self.recipe)}
        for way in ways:
            self._write_trace(trainers[way], way)

    def _record(self, way: Way, num_counted: int, rounds: Rounds) -> Record:
        counts = exchanged_keys(self.recipe, self.batches, way.num_micro_batches, self.world)
        shares = counts.boundary if way.cross_batch else counts.window
        fields = {**self._identity(), **self._of_way(way, num_counted)}
        fields |= figures(way, rounds, shares, self.recipe)
        return fields | (counts.overlap if way.cross_batch else {})

    def _write_trace(self, trainer: Trainer, way: Way) -> None:
        """Writes the spans of some more steps."""
        if self._traces is None or self.recipe.name != COVERED.name:
            return
        result, first = FitResult(spans=[]), trainer.num_steps + self.size.left_out
        result.traced_steps = range(first, first + TRACED_STEPS)
        trainer.fit(itertools.cycle(self.batches), self.size.left_out + TRACED_STEPS, result=result)
        kind = "-across" if way.cross_batch else ""
        name = f"h200-{self.recipe.name}-{way.schedule}-{way.num_micro_batches}{kind}.json"
        about = {HAS_ISSUER: int(self.world.issuer is not None)}
        assert result.spans is not None
        write_trace(result.spans, self.world, self._traces / name, result.traced_steps, about)

    def _calibrate(self) -> Iterator[Record]:
        """Determines the sizes that this machine needs, by steps of serial.

        The numbers are means over ranks, so all ranks choose the same sizes.
        """
        trainer = self._trainer(SERIAL, self.recipe)
        for number in range(self.size.num_calibrations + 1):
            recipe = self.recipe
            assert isinstance(trainer.model, Tower)
            trainer.model.repeats = recipe.repeats
            batches = make_batches(recipe, self.pools, self.world.rank)
            parts = self._stretch(trainer, batches, 1 if number == 0 else 4, left_out=1)
            if number == 0:
                continue  # a warm-up
            yield calibration(recipe, parts, number)
            self.serial_ms = parts["step_ms"]
            if is_close(recipe, parts):
                break
            self.recipe = adjusted(recipe, parts)

    def _trainer(self, way: Way, recipe: Recipe) -> Trainer:
        trainer = Trainer(
            Tower(recipe).to(self.world.device),
            self.features,
            dense_optimizer=lambda parameters: torch.optim.AdamW(parameters, 1e-4, fused=True),
            world=self.world,
            schedule=way.schedule,
            num_micro_batches=way.num_micro_batches,
            window=way.window,
            clustering=GIVEN_ORDER,
            num_threads=self.threads,
            check_split=False,
            cross_batch=way.cross_batch,
            resident_bytes="minimum",
        )
        trainer.store = self.store
        return trainer

    def _stretch(self, trainer: Trainer, batches: list[Batch], num_counted: int, left_out: int) -> dict[str, float]:
        """Trains, and returns the means over the counted steps."""
        result = FitResult()
        trainer.fit(itertools.cycle(batches), left_out + num_counted + self.size.left_out_last, result=result)
        return means(result.times[left_out : left_out + num_counted], self.world)

    def _of_way(self, way: Way, num_counted: int) -> Record:
        return {
            "schedule": way.schedule,
            "num_micro_batches": way.num_micro_batches,
            "window": way.window,
            "cross_batch": way.cross_batch,
            "method": GIVEN_ORDER.method,
            "num_steps": num_counted,
        }

    def _identity(self) -> Record:
        recipe = self.recipe
        return {
            "recipe": recipe.name,
            "backend": self.world.backend,
            "ranks": self.world.size,
            "threads": self.threads,
            "dim": recipe.dim,
            "row_optimizer": recipe.row_optimizer,
            "dense_dtype": "float32",
            "batch_size": recipe.batch_size,
            "length": recipe.length,
            "num_distinct": recipe.num_distinct,
            "overlap": recipe.overlap,
            "remote_share": recipe.remote_share,
            "hidden": recipe.hidden,
            "repeats": recipe.repeats,
            "rows_a_rank": self.size.rows_a_rank,
            "num_rounds": self.size.num_rounds,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "seed": SEED,
        }
