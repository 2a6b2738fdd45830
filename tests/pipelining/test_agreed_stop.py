"""A rank that asks to stop ends the loop on all ranks, before the same batch, in every schedule.

Fails, for example, if Pipeline.__iter__ looks at its own rank's notice instead of the route, if it skips a batch of
weight 0 before it looks for a stop, or if it returns without `_end`.
"""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from nestpipe import Batch, DenseReducer, World
from nestpipe.embedding.table import make_store, tables_of
from nestpipe.pipelining.pipeline import Pipeline
from nestpipe.pipelining.schedule import OVERLAPPING, SCHEDULES
from nestpipe.train.digest import digest
from tests.exactness.cases import Case, SmallModel, features_of, global_batches, on_ranks, share_of

CASE = Case("adam", "shared", 2)
NUM_BATCHES = 9
ASK_AT = 3
"""Step in which a rank asks to stop."""
LANES = {f"nestpipe-{lane}" for lane in ("input", "upload", "host", "rows", "gradients")}


class Loop:
    """A user's own loop, which can be continued with the batches that a stop left untrained."""

    def __init__(self, world: World, schedule: str, batches: list[Batch]) -> None:
        self.world = world
        self.schedule = schedule
        self.batches: Iterator[Batch] = iter(batches)
        self.features = features_of(CASE)
        self.model = SmallModel({name: feature.table.dim for name, feature in self.features.items()})
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.01)
        self.reducer = DenseReducer(self.model, world)
        self.store = make_store(tables_of(self.features), 3, 1)
        self.untrained: list[Batch] = []
        self.lanes: set[str] = set()
        self.steps: list[int] = []
        self.num_saves: list[int] = []

    def run(self, asking_rank: int | None = None, ask_at: int = ASK_AT) -> Pipeline:
        options = {"schedule": self.schedule, "num_micro_batches": CASE.num_micro_batches, "seed": 3}
        batches = [*self.untrained, *self.batches] if self.untrained else self.batches
        common = {"world": self.world, "store": self.store, "first_step": len(self.steps)}
        with Pipeline(self.features, batches, **common, **options) as pipeline:
            assert (pipeline.is_stop_agreed, pipeline.num_saves_written) == (False, 0)
            for step in pipeline:
                self.num_saves.append(pipeline.num_saves_written)
                self.optimizer.zero_grad()
                for micro_batch in step:
                    (self.model(micro_batch.embeddings, micro_batch.inputs) / step.weight).backward()
                self.reducer.finish(step)
                self.optimizer.step()
                step.update_rows()
                self.steps.append(step.number)
                if self.world.rank == asking_rank and step.number == ask_at:
                    self.world.notice.is_stop_requested = True
                self.world.notice.num_saves_written = step.number + 1 + self.world.rank
            # The loop itself has ended everything, before its context does.
            self.lanes = LANES & {thread.name for thread in threading.enumerate()}
            self.store.open_writer().close()  # raises if the pipeline has left its own open
            self.untrained = [batch for batch in pipeline.untrained if isinstance(batch, Batch)]
        return pipeline

    def digest(self) -> str:
        tables = tables_of(self.features)
        return digest(tables, self.store, len(self.steps), self.world, self.model, self.optimizer)


@dataclass
class Outcome:
    steps: list[int]
    is_stop_agreed: bool
    num_pulled: int
    """Batches trained and batches that the stop left untrained."""
    lanes: set[str]
    """Threads that are left after the stop."""
    num_saves: list[int]
    is_second_stop_agreed: bool
    digest: str
    undisturbed: str


def batches_of(world: World, without_data: int | None) -> list[Batch]:
    return [] if world.rank == without_data else share_of(global_batches(NUM_BATCHES), world)


def stop_and_go_on(world: World, asking_rank: int, without_data: int | None) -> dict[str, Outcome]:
    undisturbed, outcomes = Loop(world, "serial", batches_of(world, without_data)), {}
    undisturbed.run()
    expected = undisturbed.digest()
    for schedule in SCHEDULES:
        world.notice.num_saves_written = 0
        loop = Loop(world, schedule, batches_of(world, without_data))
        stopped = loop.run(asking_rank)
        steps, num_pulled, lanes = list(loop.steps), len(loop.steps) + len(loop.untrained), loop.lanes
        world.notice.is_stop_requested = False
        is_second_stop_agreed = loop.run().is_stop_agreed
        outcomes[schedule] = Outcome(
            steps,
            stopped.is_stop_agreed,
            num_pulled,
            lanes,
            loop.num_saves,
            is_second_stop_agreed,
            loop.digest(),
            expected,
        )
        assert loop.steps == list(range(NUM_BATCHES))
    return outcomes


@pytest.mark.parametrize(
    ("size", "asking_rank", "without_data"),
    [(1, 0, None), (2, 1, None), (2, 1, 1), pytest.param(2, 0, 1, marks=pytest.mark.slow)],
)
def test_every_rank_stops_at_the_same_batch(size: int, asking_rank: int, without_data: int | None) -> None:
    """Also continues afterwards: nothing is lost or trained twice. The rank that asks may have no data at all."""
    results = on_ranks(size, stop_and_go_on, asking_rank, without_data)
    for schedule in SCHEDULES:
        outcomes = [result[schedule] for result in results]
        first = outcomes[0]
        assert all(outcome.steps == first.steps for outcome in outcomes)
        # Batches are routed up to two ahead of the one in training.
        most_ahead = 3 if schedule in OVERLAPPING else 1
        assert ASK_AT + 1 <= len(first.steps) <= ASK_AT + most_ahead
        for rank, outcome in enumerate(outcomes):
            assert outcome.is_stop_agreed
            assert not outcome.is_second_stop_agreed
            assert outcome.lanes == set()
            assert outcome.digest == outcome.undisturbed
            if rank == without_data:
                assert outcome.num_pulled == len(first.steps)
            else:
                assert len(first.steps) + 1 <= outcome.num_pulled <= len(first.steps) + most_ahead
        check_saves(schedule, [outcome.num_saves for outcome in outcomes])


def check_saves(schedule: str, num_saves: list[list[int]]) -> None:
    """Each step knows the saves of rank 0, which has the fewest, from before its batch was routed."""
    assert all(numbers == num_saves[0] for numbers in num_saves)
    for step, number in enumerate(num_saves[0]):
        assert max(0, step - 2) <= number <= step if schedule in OVERLAPPING else number == step


def stop_before_a_batch_of_weight_0(world: World) -> dict[str, tuple[int, bool, int, int]]:
    """Asks to stop before the first batch, which has weight 0."""
    first, *rest = share_of(global_batches(4), world)
    world.notice.is_stop_requested = world.rank == 0
    results = {}
    for schedule in SCHEDULES:
        loop = Loop(world, schedule, [replace(first, weight=0.0), *rest])
        pipeline = loop.run()
        results[schedule] = len(loop.steps), pipeline.is_stop_agreed, pipeline.num_skipped, len(loop.untrained)
    return results


@pytest.mark.parametrize("size", [1, 2])
def test_a_batch_of_weight_0_is_not_skipped(size: int) -> None:
    """It is trained, or skipped, by the next pipeline."""
    for result in on_ranks(size, stop_before_a_batch_of_weight_0):
        for num_steps, is_stop_agreed, num_skipped, num_untrained in result.values():
            assert (num_steps, is_stop_agreed, num_skipped) == (0, True, 0)
            assert num_untrained >= 1


def ask_at_the_end(world: World) -> dict[str, tuple[int, bool, int]]:
    """Asks to stop in the last step."""
    results = {}
    for schedule in SCHEDULES:
        loop = Loop(world, schedule, share_of(global_batches(4), world))
        pipeline = loop.run(asking_rank=world.size - 1, ask_at=3)
        results[schedule] = len(loop.steps), pipeline.is_stop_agreed, len(loop.untrained)
        world.notice.is_stop_requested = False
    return results


@pytest.mark.parametrize("size", [1, 2])
def test_a_request_at_the_end_of_the_data(size: int) -> None:
    """Changes nothing. Fails if Pipeline.is_stop_agreed is set from the notice when the loop ends."""
    for result in on_ranks(size, ask_at_the_end):
        assert set(result.values()) == {(4, False, 0)}
