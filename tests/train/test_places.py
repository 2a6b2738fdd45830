"""Places that are "auto" are chosen from the first batch, by bytes; alike on all ranks; once, also after a resume.

Fails if the counts are not those of all ranks (without all_reduce_sum in _choose_pooling or _choose_table), if a
trainer forgets the choices of a checkpoint (without _set_places in Trainer.load), if it chooses in each fit (without
`self.features` in _set_places), if it takes more bytes (`sums > rows` in _choose_pooling), or if it replicates every
small table (`MOST_GROWTH = 9`).
"""

import contextlib
import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nestpipe import Batch, Jagged, Pooled, Sequence, Table, Trainer, World, optim
from nestpipe.data.dataset import BatchSource
from nestpipe.distributed import RankError
from nestpipe.embedding.table import Feature
from nestpipe.pipelining.options import PipelineOptions
from nestpipe.pipelining.pipeline import Pipeline
from nestpipe.prediction import choose, measure
from nestpipe.prediction.split_costs import SplitCosts
from nestpipe.train.places import _pooling_bytes, choose_places
from tests.exactness.cases import Momentum, on_ranks
from tests.ranks import run_ranks


class Squares(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, embeddings, inputs):
        values = [value if isinstance(value, torch.Tensor) else value.values for value in embeddings.values()]
        return sum((value.square().sum() for value in values), torch.zeros(())) * self.weight


def bags(rank: int, keys_per_bag: int, num_keys: int, num_bags: int = 8, seed: int = 0) -> Jagged:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    values = torch.randint(0, num_keys, (num_bags * keys_per_bag,), generator=generator)
    return Jagged(values, torch.arange(0, len(values) + 1, keys_per_bag))


def features_of(placement: str = "auto", where: str = "auto") -> dict[str, Feature]:
    adagrad = optim.Adagrad(0.1)
    hot = Table("hot", 32, optimizer=adagrad, num_keys=20, placement=placement)
    wide = Table("wide", 8, optimizer=adagrad)
    return {"hot": Pooled(hot), "many": Pooled(wide, where=where), "one": Pooled(wide, where=where)}


def batch_of(rank: int, seed: int = 0, is_turned: bool = False) -> Batch:
    """Returns a batch of which feature `many` has many keys a sample, and `one` has one; the other way round if it is
    turned. It uses all of table hot."""
    lengths = (1, 20) if is_turned else (20, 1)
    keys = {name: bags(rank, n, 10_000, seed=seed) for name, n in zip(("many", "one"), lengths, strict=True)}
    return Batch({"hot": bags(rank, 12, 20, seed=seed), **keys}, {"number": torch.arange(8)})


CHOSEN = {"placement": {"hot": "replicated"}, "where": {"many": "owner", "one": "requester"}}


def trainer_of(world: World, features: dict[str, Feature], **options: object) -> Trainer:
    torch.manual_seed(0)
    dense = {"dense_optimizer": lambda p: torch.optim.SGD(p, 1e-4), "check_split": False}
    return Trainer(Squares(), features, world=world, seed=3, **dense, **options)


def trained(world: World, folder: Path) -> tuple[dict, str, list[str]]:
    """Trains three batches with a save after the first one, then from there. Returns the choice, what was printed, and
    digests: of both, and with the choice given."""
    batches = [batch_of(world.rank, seed, is_turned=seed > 0) for seed in range(3)]
    printed, digests = io.StringIO(), []
    with contextlib.redirect_stdout(printed):
        trainer = trainer_of(world, features_of())
        trainer.fit(batches[:1])
        trainer.save(folder)
        trainer.fit(batches[1:])
        digests.append(trainer.digest())
        resumed = trainer_of(world, features_of())
        resumed.load(folder)
        resumed.fit(batches[1:])
        assert resumed.places == trainer.places
        digests.append(resumed.digest())
    given = features_of("replicated", "requester")
    given["many"] = Pooled(given["many"].table, where="owner")
    explicit = trainer_of(world, given)
    explicit.fit(batches)
    return trainer.places, printed.getvalue(), [*digests, explicit.digest()]


def test_chosen_once_and_kept(tmp_path: Path) -> None:
    """Later batches alone would give another choice."""
    (first, text, digests), (second, nothing, _) = on_ranks(2, trained, tmp_path / "run")
    assert first == second == CHOSEN
    assert len(set(digests)) == 1
    assert nothing == ""
    lines = text.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith('nestpipe: placement = "auto": table hot is replicated: ')
    assert lines[1].startswith('nestpipe: where = "auto": feature many is pooled at the owner: ')
    assert lines[2].startswith('nestpipe: where = "auto": feature one is pooled at the requester: ')


def choice_of(world: World, batches: list[Batch | None], placement: str, **options: object) -> dict:
    """Returns the choice for the given batch of each rank, None for no data."""
    mine = batches[world.rank]
    source = BatchSource(iter([] if mine is None else [mine]))
    return choose_places(features_of(placement), source, world, PipelineOptions(**options))


def test_all_ranks_choose_alike() -> None:
    """Rank 1 alone would choose otherwise, or has no batch, or no rank has one."""
    small = batch_of(1, is_turned=True)[torch.arange(1)]
    cases = ([batch_of(0), small], [batch_of(0), None], [None, None])
    for number, batches in enumerate(cases):
        first, second = on_ranks(2, choice_of, batches, "auto")
        assert first == second
        assert first["where"]["many"] == ("requester" if number == 2 else "owner")


def test_options_that_do_not_combine_are_not_chosen() -> None:
    for options in ({"device_budget_bytes": 10**9}, {"stale": True}):
        for choice in on_ranks(2, choice_with, options):
            assert set(choice["where"].values()) == {"requester"}
            assert set(choice["placement"].values()) == {"sharded"}


def test_worlds_that_do_not_combine_choose_nothing() -> None:
    """Fails if _objection_to_owners or _objection does not look at the world."""
    for choice in run_ranks(4, choice_with, {}, hosts=2):
        assert set(choice["where"].values()) == {"requester"}
        assert set(choice["placement"].values()) == {"sharded"}
    for choice in run_ranks(2, choice_with, {}, replicas=2):
        assert set(choice["where"].values()) == {"requester"}


def steps_on_a_list(world: World, where: str) -> tuple[int, list[float]]:
    trainer = trainer_of(world, features_of("sharded", where))
    result = trainer.fit([batch_of(world.rank, seed) for seed in range(3)])
    return trainer.num_steps, result.losses


def test_choosing_takes_no_batch_of_a_list() -> None:
    """Fails if fit gives choose_places another source than its own."""
    assert {num_steps for num_steps, _ in on_ranks(2, steps_on_a_list, "auto")} == {3}


def choice_with(world: World, options: dict[str, object]) -> dict:
    return choice_of(world, [batch_of(rank) for rank in range(world.size)], "auto", **options)


def bytes_of(world: World, feature: str, where: str) -> list[int]:
    """Returns the bytes that a step sends, and those that choosing takes for rows and for sums."""
    pooled = features_of("sharded", where)[feature]
    batch = batch_of(world.rank)
    alone = Batch({feature: batch.keys[feature]})
    trainer = trainer_of(world, {feature: pooled})
    (times,) = trainer.fit([alone]).times
    sizes = [times.sizes[f"exchanged_{kind}_bytes_per_step"] for kind in ("row", "gradient", "key")]
    assert isinstance(pooled, Pooled)
    return [int(sum(sizes)), *_pooling_bytes(feature, pooled, alone, world, trainer.options).tolist()]


@pytest.mark.parametrize("feature", ["many", "one"])
def test_the_bytes_are_those_of_a_step(feature: str) -> None:
    """Up to the counts that ranks send each other with the keys of bags: 4 numbers to each."""
    rows, sums = (torch.tensor(on_ranks(2, bytes_of, feature, where)).sum(0) for where in ("requester", "owner"))
    assert rows[0] == rows[1] == sums[1]
    assert sums[0] == sums[2] + 2 * 4 * 4


def test_tables_that_stay_sharded() -> None:
    """A table is replicated only if that is possible, and if the batch uses most of it."""
    tables = {
        "unknown": Table("unknown", 32),
        "large": Table("large", 32, num_keys=2**22),
        "sparse": Table("sparse", 32, num_keys=5_000),
        "own": Table("own", 32, num_keys=20, optimizer=Momentum(0.1)),
        "at_owner": Table("at_owner", 32, num_keys=20),
        "hot": Table("hot", 32, num_keys=20),
        "frozen": Table("frozen", 32, num_keys=20, frozen=True),
        "listed": Table("listed", 32, num_keys=20),
    }
    for placements in on_ranks(2, placements_of, tables):
        expected = {name: "replicated" if name in ("hot", "frozen", "listed") else "sharded" for name in tables}
        assert placements == expected


def placements_of(world: World, tables: dict[str, Table]) -> dict[str, str]:
    auto = {name: replace(table, placement="auto") for name, table in tables.items()}
    kinds = {"at_owner": {"where": "owner"}}
    features = {name: Pooled(table, **kinds.get(name, {})) for name, table in auto.items() if name != "listed"}
    features["listed"] = Sequence(auto["listed"])
    keys = {name: bags(world.rank, 12, 5_000 if name == "sparse" else 20) for name in features}
    batch = Batch(keys)
    return choose_places(features, BatchSource(iter([batch])), world, PipelineOptions())["placement"]


def with_wrong_key(world: World) -> str:
    batch = batch_of(world.rank)
    if world.rank == 1:
        batch.keys["hot"].values[3] = 20
    with pytest.raises((ValueError, RankError), match=r"key 20 is outside 0 \.\. 19") as caught:
        trainer_of(world, features_of()).fit([batch])
    return type(caught.value).__name__


def test_a_wrong_key_of_one_rank_is_an_error_on_all() -> None:
    assert on_ranks(2, with_wrong_key) == ["RankError", "ValueError"]


def own_loop(world: World) -> None:
    with pytest.raises(ValueError, match="feature 'hot': only a Trainer chooses `where` and placement"):
        Pipeline(features_of(), [], world=world)


def test_a_loop_of_the_users_own_has_to_say() -> None:
    on_ranks(2, own_loop)


def test_a_world_of_one_has_nothing_to_choose() -> None:
    trainer = trainer_of(World(), features_of())
    trainer.fit([batch_of(0)])
    assert trainer.places == {}
    explicit = trainer_of(World(), features_of("sharded", "requester"))
    explicit.fit([batch_of(0)])
    assert trainer.digest() == explicit.digest()


def traffic_of(world: World, where: str) -> float:
    """Returns the bytes of rows that trial steps have found. A choice of micro-batches comes after that of places."""
    measure.WARM_UP_STEPS = measure.COUNTED_STEPS = 1
    measure.FILLING_STEPS = measure.FULL_STEPS = measure.DRAINING_STEPS = 1
    found: list[float] = []

    def choice_by(costs: SplitCosts, candidates: list[int]) -> choose.Choice:
        found.append(costs.traffic[1].all_rows)
        return choose.Choice(1, "", {})

    choose.choice_by = choice_by
    trainer = trainer_of(world, {"many": features_of("sharded", where)["many"]})
    batches = [Batch({"many": batch_of(world.rank, seed).keys["many"]}) for seed in (0, 1)]
    choose.choose_num_micro_batches(trainer, iter(batches))
    return found[0]


def test_trial_steps_have_the_chosen_places() -> None:
    """Fails if the keys of _Keys are grouped without pools_at_owner, or if choose_num_micro_batches chooses none."""
    (rows, *_), (sums, *_), (chosen, *_) = (on_ranks(2, traffic_of, where) for where in ("requester", "owner", "auto"))
    assert chosen == sums
    assert sums < rows / 2
