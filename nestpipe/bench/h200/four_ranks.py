"""Part four-ranks of `bench h200`: four ranks on one accelerator, joined by gloo, every schedule against serial.

Short runs of serial determine the sizes of a recipe. Then the schedules take turns, a stretch of steps each, on one set
of ranks. They share one store; each has its own model.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

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
from nestpipe.bench.h200.four_ranks_figures import SERIAL, calibration, counted_steps, figures
from nestpipe.bench.h200.four_ranks_recipe import AS_PUBLISHED, COVERED, Recipe, adjusted, is_close, tiny
from nestpipe.bench.harness.pairs import alternate
from nestpipe.bench.harness.ranks import records_of_ranks
from nestpipe.bench.harness.report import Record
from nestpipe.bench.harness.ways import Shares, Way, means, shares_of
from nestpipe.data.batch import Batch
from nestpipe.device.streams import is_accelerator
from nestpipe.distributed import World
from nestpipe.embedding.cluster import GIVEN_ORDER
from nestpipe.store.cores import usable_cores
from nestpipe.train.fit_result import FitResult
from nestpipe.train.trainer import Trainer

TIMEOUT_SECONDS = 90.0
"""Long, because ranks compile kernels and pin memory in their first steps, and on one device one after the other."""


@dataclass(frozen=True)
class Size:
    num_ranks: int = 4
    recipes: tuple[Recipe, ...] = (COVERED, AS_PUBLISHED)
    rows_a_rank: int = 500_000
    num_micro_batches: int = 8
    num_rounds: int = 5
    left_out: int = 5
    """Steps left out at the beginning of a stretch, while the pipeline fills."""
    left_out_last: int = 2
    """Steps at its end that do not count, because nothing is prefetched any more."""
    most_counted: int = 5
    round_seconds: float = 15.0
    num_calibrations: int = 4
    is_quick: bool = False

    @property
    def ways(self) -> list[Way]:
        many = self.num_micro_batches
        return [SERIAL, Way("serial", many), Way("inter", 1), Way("intra", many), Way("nested", many)]


QUICK = Size(
    num_ranks=2,
    recipes=(tiny(COVERED), tiny(AS_PUBLISHED)),
    rows_a_rank=2_000,
    num_micro_batches=4,
    num_rounds=2,
    left_out=1,
    left_out_last=1,
    most_counted=2,
    num_calibrations=2,
    is_quick=True,
)


def records(device: str, quick: bool) -> Iterator[Record]:
    size = QUICK if quick else Size()
    return records_of_ranks(size.num_ranks, _on_rank, size, device=device, timeout_seconds=TIMEOUT_SECONDS)


def _on_rank(world: World, size: Size) -> Iterator[Record]:
    with world.watch.reporting():
        for recipe in size.recipes:
            yield from Comparison(world, size, recipe).records()
            if is_accelerator(world.device):
                torch.accelerator.empty_cache()
        yield from digest_records(world, size.is_quick)


class Comparison:
    """Compares all schedules with one recipe."""

    def __init__(self, world: World, size: Size, recipe: Recipe) -> None:
        self.world, self.size = world, size
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
        shares = self._shares()
        for way in ways:
            yield {**self._identity(way, num_counted), **figures(way, rounds, shares, self.recipe)}

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
            resident_bytes="minimum",
        )
        trainer.store = self.store
        return trainer

    def _stretch(self, trainer: Trainer, batches: list[Batch], num_counted: int, left_out: int) -> dict[str, float]:
        """Trains, and returns the means over the counted steps."""
        result = FitResult()
        trainer.fit(itertools.cycle(batches), left_out + num_counted + self.size.left_out_last, result=result)
        return means(result.times[left_out : left_out + num_counted], self.world)

    def _shares(self) -> Shares:
        mine = exchanged_keys(self.recipe, self.batches, self.size.num_micro_batches, self.world.size)
        totals = torch.tensor(mine)
        self.world.control.all_reduce_sum(totals)
        return shares_of(totals.tolist())

    def _identity(self, way: Way, num_counted: int) -> dict[str, int | float | str | bool]:
        recipe = self.recipe
        return {
            "recipe": recipe.name,
            "schedule": way.schedule,
            "num_micro_batches": way.num_micro_batches,
            "window": way.window,
            "method": GIVEN_ORDER.method,
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
            "num_steps": num_counted,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "seed": SEED,
        }
