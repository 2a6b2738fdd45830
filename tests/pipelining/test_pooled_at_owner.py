"""What does not combine with features that are pooled at the owner is refused by name; loops of the user's own may have
such features.

Fails if check_combinable returns at once, or if Pipeline groups features without pools_at_owner.
"""

from pathlib import Path

import pytest
import torch

from nestpipe import Batch, Jagged, Pooled, Table, World, optim
from nestpipe.pipelining.pipeline import Pipeline
from nestpipe.train.digest import digest
from tests.exactness.cases import on_ranks

TABLE = Table("tag", 4, optimizer=optim.Adagrad(0.1))


def test_features_that_are_refused() -> None:
    with pytest.raises(ValueError, match="'tag' has where = 'here', must be one of 'requester', 'owner', 'auto'"):
        Pooled(TABLE, where="here")
    with pytest.raises(ValueError, match="no row of a replicated table travels; leave out `where`, or set placement"):
        Pooled(Table("day", 4, placement="replicated"), where="owner")


REFUSED = [
    ({"device_budget_bytes": 10**9}, r"memory.device_budget_bytes does not count .* \(tags\); leave it unset"),
    ({"stale": True, "schedule": "inter"}, r"pipeline.stale does not combine with .* \(tags\); set where"),
]


def refused(world: World) -> None:
    for options, text in REFUSED:
        with pytest.raises(ValueError, match=text):
            Pipeline({"tags": Pooled(TABLE, where="owner")}, [], world=world, **options)


def test_options_that_are_refused() -> None:
    """In a world of one they combine: nothing travels."""
    on_ranks(2, refused)
    for options, _ in REFUSED:
        Pipeline({"tags": Pooled(TABLE, where="owner")}, [], world=World(), **options)


def own_loop(world: World, folder: Path, schedule: str) -> tuple[list[str], list[int]]:
    """Returns digests before and after a second loop, which goes on from a checkpoint of the first one, and the numbers
    of partial sums that micro-batches have seen."""
    features = {"tags": Pooled(TABLE, "mean", where="owner")}
    keys = [torch.arange(n, n + 24)[world.rank :: world.size] for n in range(4)]
    offsets = torch.tensor([0, 5, 5, 12])
    batches = [Batch({"tags": Jagged(some, offsets)}, weight=float(len(some))) for some in keys]
    digests, num_sums = [], []
    for number in (0, 1):
        own = batches[2 * number :][:2]
        loop = Pipeline(features, own, world=world, schedule=schedule, num_micro_batches=2)
        if number == 1:
            loop.load(folder / schedule)
        with loop:
            for step in loop:
                for part in step:
                    part.embeddings["tags"].square().sum().backward()
                    num_sums += [len(rows) for rows in part.rows]
                step.update_rows()
        if number == 0:
            loop.save(folder / schedule)
        digests.append(digest([TABLE], loop.store, 2 * (number + 1), world))
    return digests, num_sums


def test_a_loop_of_the_users_own(tmp_path: Path) -> None:
    serial, nested = (on_ranks(2, own_loop, tmp_path, schedule) for schedule in ("serial", "nested"))
    assert serial == nested
    for digests, num_sums in serial:
        assert len(set(digests)) == 2
        assert set(num_sums[::2]) == {0}  # no rows
        assert set(num_sums[1::2]) <= {1, 2, 3, 4}  # two ranks' sums of at most two bags
