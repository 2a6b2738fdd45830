"""Commit, in loops that sum dense gradients by DDP or not at all: either all ranks raise and nothing has changed, or
none raises.

Fails, for example, if _HostAgreement.finish looks only at its own rank's flag (`self._ballot.non_finite`), if
Step.begin_commit leaves out `self._exchange.exceeds`, if update_rows does not commit, or if World.commit is
`self.dense`.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nestpipe import Batch, DenseReducer, World
from nestpipe.pipelining import Step
from nestpipe.pipelining.pipeline import Pipeline
from nestpipe.train.digest import digest
from tests.collectives import record_collectives
from tests.exactness.cases import Case, SmallModel, features_of, global_batches, make_pipeline, on_ranks, share_of
from tests.schedules import OUTER

CASE = Case("adagrad", "pooled_sum", 2)
STEPS, BAD_STEP = 4, 2
LARGEST = torch.finfo(torch.float64).max


class Loop:
    """A user's own loop. dense: "ddp" or "reducer" sums the dense gradients, or "none"; only "ddp" applies them."""

    def __init__(self, world: World, schedule: str, dense: str = "ddp", max_rows: int | None = None) -> None:
        self.world, self.schedule = world, schedule
        self.features = features_of(CASE)
        if max_rows is not None:
            item = replace(self.features["items"].table, max_rows=max_rows)
            self.features["items"] = replace(self.features["items"], table=item)
        self.plain = SmallModel({name: feature.table.dim for name, feature in self.features.items()})
        self.model: nn.Module = self.plain
        if dense == "ddp" and world.size > 1:
            self.model = DistributedDataParallel(self.plain)
            self.model.register_comm_hook(None, sum_gradients)
        self.reducer = DenseReducer(self.plain, world) if dense == "reducer" else None
        self.optimizer = torch.optim.SGD(self.plain.parameters(), 0.1) if dense == "ddp" else None
        self.factor = 1.0
        """Value of all row gradients in the bad step, unless it is 1."""
        self.losses: list[float] = []
        self.text = ""

    def run(self, batches: list[Batch], commits: bool = True) -> str:
        """Returns the digest of rows and dense parameters."""
        options = {"schedule": self.schedule, "num_micro_batches": CASE.num_micro_batches, "seed": 3}
        with Pipeline(self.features, batches, world=self.world, **options) as self.pipeline:
            try:
                for step in self.pipeline:
                    self.train(step, commits)
            except Exception as error:
                self.text = f"{type(error).__name__}: {error}"
                raise
        return self.digest(len(batches))

    def train(self, step: Step, commits: bool) -> None:
        total = torch.zeros((), dtype=torch.float64)
        self.plain.zero_grad()
        for micro_batch in step:
            is_summed = micro_batch.is_last or not isinstance(self.model, DistributedDataParallel)
            with nullcontext() if is_summed else self.model.no_sync():
                loss = self.model(micro_batch.embeddings, micro_batch.inputs) / step.weight
                loss.backward()
            if step.number == BAD_STEP and self.factor != 1.0:
                for rows in micro_batch.rows:
                    rows.grad.fill_(self.factor)
            total += loss.detach()
        if self.reducer is not None:
            self.reducer.finish(step, total)
        elif commits:
            step.commit(total)
        if self.optimizer is not None:
            self.optimizer.step()
        step.update_rows()
        self.losses.append(float(total))

    def digest(self, num_steps: int) -> str:
        tables = [feature.table for feature in self.features.values()]
        return digest(tables, self.pipeline.store, num_steps, self.world, self.plain)


def sum_gradients(group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def failing_loops(world: World, schedule: str, dense: str, commits: bool) -> dict[str, tuple[str, bool]]:
    """Returns, by kind of fault on the last rank in step 2, the error and whether all is as after two steps."""
    is_bad = world.rank == world.size - 1
    batches = share_of(global_batches(STEPS), world)
    expected = Loop(world, schedule, dense).run(batches[:BAD_STEP], commits)
    spoiled = [*batches]
    if is_bad:
        spoiled[BAD_STEP] = replace(batches[BAD_STEP], inputs={"label": batches[BAD_STEP].inputs["label"] * torch.nan})
    loops = {
        "loss": (Loop(world, schedule, dense), spoiled, 1.0),
        "gradient": (Loop(world, schedule, dense), batches, torch.nan),
        "large gradient": (Loop(world, schedule, dense), batches, 1.01 * LARGEST / (2 * world.size)),
        "room": (Loop(world, schedule, dense, room(world, batches, is_bad)), batches, 1.0),
    }
    results = {}
    for kind, (loop, loop_batches, factor) in loops.items():
        loop.factor = factor if is_bad else 1.0
        with pytest.raises(Exception):  # noqa: B017, PT011 (its text is what is returned)
            loop.run(loop_batches, commits)
        results[kind] = (loop.text, loop.digest(BAD_STEP) == expected)
    return results


def room(world: World, batches: list[Batch], is_bad: bool) -> int | None:
    """Returns the number of rows that the first two steps create on this rank; None on a good rank."""
    loop = Loop(world, "serial", "none")
    loop.run(batches[:BAD_STEP])
    return loop.pipeline.store.size("item") if is_bad else None


@pytest.mark.parametrize("schedule", OUTER)
@pytest.mark.parametrize(("dense", "commits"), [("ddp", True), ("none", False)])
@pytest.mark.parametrize("size", [1, 2])
def test_every_rank_raises_and_nothing_has_changed(schedule: str, dense: str, commits: bool, size: int) -> None:
    """If the loop does not call commit, update_rows does."""
    for rank, results in enumerate(on_ranks(size, failing_loops, schedule, dense, commits)):
        for kind in ("loss", "gradient", "large gradient"):
            assert results[kind][0].startswith(
                f"NonFiniteError: step {BAD_STEP}: a loss or a gradient is not finite"
            ), kind
        text = results["room"][0]
        assert text.startswith("ValueError" if rank == size - 1 else "RankError: rank 1 failed: ValueError")
        assert "table 'item' would have" in text
        assert [unchanged for _, unchanged in results.values()] == [True] * 4


def large_but_allowed(world: World) -> bool:
    """Trains with the largest sums that a rank may have. Returns whether the sums over all ranks are finite."""
    loop = Loop(world, "serial", "none")
    loop.factor = 0.99 * LARGEST / (2 * world.size) / CASE.num_micro_batches
    sums: list[Tensor] = []
    update_rows = Step.update_rows

    def observe(step: Step) -> None:
        sums.extend(step.gradients() if step.number == BAD_STEP else [])
        update_rows(step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Step, "update_rows", observe)
        loop.run(share_of(global_batches(STEPS), world))
    return any(float(group.max()) > LARGEST / 5 for group in sums) and all(map(is_finite, sums))


def is_finite(values: Tensor) -> bool:
    return bool(values.isfinite().all())


@pytest.mark.parametrize("size", [1, 2])
def test_the_largest_gradients_that_are_allowed(size: int) -> None:
    """Fails if sum_limit is half as large."""
    assert on_ranks(size, large_but_allowed) == [True] * size


def without_reducer(world: World) -> tuple[list[str], list[float], list[float], dict[str, int]]:
    """Returns digests with a reducer and twice without, losses of both, and the collectives without."""
    batches = share_of(global_batches(STEPS), world)
    first = Loop(world, "nested", "reducer")
    digests = [first.run(batches)]
    begun: dict[str, int] = {}

    def count(channel: str, kind: str) -> None:
        begun[channel] = begun.get(channel, 0) + 1

    record_collectives(world, count)
    second = Loop(world, "nested", "none")
    digests.append(second.run(batches))
    digests.append(Loop(world, "nested", "none").run(batches, commits=False))
    return digests, first.losses, second.losses, begun


def test_no_reducer_at_all() -> None:
    """Commit has its own channel: nothing is summed on that of dense gradients."""
    first, second = on_ranks(2, without_reducer)
    assert len({*first[0], *second[0]}) == 1
    assert first[1] == second[1] == first[2] == second[2]
    ((_, alone, _, _),) = on_ranks(1, without_reducer)
    assert first[1] == pytest.approx(alone, rel=1e-10)
    assert first[3]["commit"] == 2 * STEPS
    assert "dense reduction" not in first[3]


def steps_of(schedule: str) -> Iterator[Step]:
    with make_pipeline(World(), replace(CASE, schedule=schedule), global_batches(1)) as pipeline:
        yield from pipeline


@pytest.mark.parametrize("schedule", OUTER)
def test_one_commit_after_the_last_micro_batch(schedule: str) -> None:
    model = SmallModel({name: feature.table.dim for name, feature in features_of(CASE).items()})
    for step in steps_of(schedule):
        for micro_batch in step:
            with pytest.raises(RuntimeError, match="of 2 micro-batches were gone through"):
                step.commit()
            (model(micro_batch.embeddings, micro_batch.inputs) / step.weight).backward()
        with pytest.raises(RuntimeError, match="step 0: call commit before gradients"):
            step.gradients()
        step.commit()
        with pytest.raises(RuntimeError, match="step 0: commit was called twice"):
            step.commit()
        first, second = step.gradients(), step.gradients()
        assert all(one is other for one, other in zip(first, second, strict=True))
        norm = sum(float(gradient.square().sum()) for gradient in first)
        assert float(step.squared_gradient_norm()) == pytest.approx(norm)
        step.update_rows()
        with pytest.raises(RuntimeError, match="step 0: update_rows was called twice"):
            step.update_rows()
