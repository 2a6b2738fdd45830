"""What does not combine with replicated tables is refused by name; loops of the user's own may have such tables.

Fails if Table._check_placement is not called, if _has_replicas returns at once, or if Pipeline passes the store of the
run to its stages instead of with_replicas.
"""

from pathlib import Path

import pytest
import torch

from nestpipe import Batch, Jagged, Pooled, Table, World, optim
from nestpipe.pipelining.pipeline import Pipeline
from nestpipe.train.digest import digest
from tests.exactness.cases import Momentum, on_ranks

TABLE = Table("country", 4, optimizer=optim.Adagrad(0.1), placement="replicated")


class Declared(Momentum):
    can_update_in_parts = True


def test_tables_that_are_refused() -> None:
    with pytest.raises(ValueError, match="table 'a': placement is 'copied', must be one of 'sharded', 'replicated'"):
        Table("a", 4, placement="copied")
    with pytest.raises(ValueError, match="if Momentum does, set can_update_in_parts = True in its class"):
        Table("a", 4, optimizer=Momentum(0.1), placement="replicated")
    Table("a", 4, optimizer=Declared(0.1), placement="replicated")
    Table("a", 4, optimizer=Momentum(0.1), placement="replicated", frozen=True)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"device_budget_bytes": 10**9}, r"memory.device_budget_bytes does not count .* \(country\); leave it unset"),
        ({"stale": True, "schedule": "inter"}, r"pipeline.stale does not combine with replicated tables \(country\)"),
    ],
)
def test_options_that_are_refused(options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Pipeline({"country": Pooled(TABLE)}, [], world=World(), **options)


def own_loop(world: World, folder: Path, placement: str) -> list[str]:
    """Returns digests before and after a second loop, which goes on from a checkpoint of the first one."""
    table = Table("country", 4, optimizer=optim.Adagrad(0.1), placement=placement)
    keys = [torch.arange(n, n + 8)[world.rank :: world.size] for n in range(4)]
    batches = [Batch({"country": Jagged.one_each(some)}, weight=float(len(some))) for some in keys]
    digests = []
    for number in (0, 1):
        loop = Pipeline({"country": Pooled(table)}, batches[2 * number :][:2], world=world)
        if number == 1:
            loop.load(folder / placement)
        with loop:
            for step in loop:
                for part in step:
                    part.embeddings["country"].square().sum().backward()
                step.update_rows()
        if number == 0:
            loop.save(folder / placement)
        digests.append(digest([table], loop.store, 2 * (number + 1), world))
    return digests


def test_a_loop_of_the_users_own(tmp_path: Path) -> None:
    sharded, replicated = (on_ranks(2, own_loop, tmp_path, placement) for placement in ("sharded", "replicated"))
    assert sharded == replicated
    assert len(set(sharded[0])) == 2
