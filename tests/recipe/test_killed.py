"""A run that is killed at any moment and started again ends as if nothing had happened.

Fails, for example, if _resume does not load the state of the data, or if remove_older is called before publish.
"""

import os
import shutil
import signal
from pathlib import Path

import pytest

from nestpipe import World
from nestpipe.checkpoint import folder, saver
from nestpipe.checkpoint.row_reader import RowReader
from nestpipe.checkpoint.shards import ShardFile
from nestpipe.pipelining.schedule import SCHEDULES
from nestpipe.recipe.run import run
from nestpipe.recipe.text import load_config
from nestpipe.train.fit_result import FitResult
from tests import ranks
from tests.recipe.test_checkpoint_keys import QUICK

STEPS = 9
MOMENTS = {
    "append to a shard": (ShardFile, "_append"),
    "finish a shard": (ShardFile, "finish"),
    "publish": (folder, "publish"),
    "remove an older one": (folder, "_remove"),
    "begin": (folder, "begin"),
    "end of a save": (saver.Saver, "finish"),
    "read rows": (RowReader, "read"),
}
"""Functions at whose n-th call a rank is killed."""


def settings(path: Path, schedule: str) -> tuple[str, ...]:
    saves = f"checkpoint.dir={path}", "checkpoint.every=2", "checkpoint.complete_every=3"
    return *QUICK, *saves, f"train.steps={STEPS}", f"pipeline.schedule={schedule}", "pipeline.num_micro_batches=2"


def train(world: World, path: Path, schedule: str, recipe: Path | None = None) -> tuple[str, int]:
    summary = run(load_config(recipe, settings(path, schedule)).resolved(1, 1), world)
    return summary["digest"], summary["resumed_from_step"]


def places(world: World, path: Path, recipe: Path) -> dict[str, dict[str, str]]:
    """Returns the places of a complete run."""
    return run(load_config(recipe, settings(path, "nested")).resolved(1, 1), world)["places"]


def train_until_killed(
    world: World,
    path: Path,
    schedule: str,
    moment: str,
    number: int,
    killed_rank: int,
    recipe: Path | None = None,
) -> None:
    """Kills this process at a call of the function of a moment, or after a step."""
    left = number

    def count() -> None:
        nonlocal left
        left -= 1
        if left == 0 and world.rank == killed_rank:
            os.kill(os.getpid(), signal.SIGKILL)

    def after_step(result: FitResult) -> None:
        if moment == "a step":
            count()

    if moment in MOMENTS:
        owner, name = MOMENTS[moment]
        original = getattr(owner, name)

        def counting(*arguments: object, **options: object) -> object:
            count()
            return original(*arguments, **options)

        setattr(owner, name, counting)
    run(load_config(recipe, settings(path, schedule)).resolved(1, 1), world, after_step)


def start_and_wait(size: int, *arguments: object, **options: object) -> bool:
    """Runs ranks of which one may be killed. Returns whether one was. options: those of World.from_environment."""
    processes, _ = ranks._start(size, train_until_killed, arguments, {"device": "cpu", **options})
    try:
        for process in processes:
            process.join(timeout=ranks.limit_seconds)
        return any(process.exitcode == -signal.SIGKILL for process in processes)
    finally:
        for process in processes:
            process.kill()


def newest(path: Path) -> int:
    complete = folder.checkpoints(path)
    return int(complete[-1].name[5:13]) if complete else 0


def check(size: int, schedule: str, moment: str, number: int, killed_rank: int, tmp_path: Path) -> None:
    path = tmp_path / "out"
    was_killed = start_and_wait(size, path, schedule, moment, number, killed_rank)
    assert was_killed
    step = newest(path)
    digests = {train_ends[0] for train_ends in ranks.run_ranks(size, train, tmp_path / "whole", schedule)}
    resumed = ranks.run_ranks(size, train, path, schedule)
    assert {digest for digest, _ in resumed} == digests
    assert {resumed_from for _, resumed_from in resumed} == {step}


@pytest.mark.parametrize(
    ("size", "moment", "number", "killed_rank"),
    [
        pytest.param(1, "publish", 2, 0, marks=pytest.mark.slow),
        pytest.param(1, "remove an older one", 1, 0, marks=pytest.mark.slow),
        (2, "append to a shard", 30, 1),
        pytest.param(2, "a step", 5, 0, marks=pytest.mark.slow),
    ],
)
def test_started_again(size: int, moment: str, number: int, killed_rank: int, tmp_path: Path) -> None:
    """The newest complete checkpoint is the one that the run goes on from: no step before it is lost."""
    check(size, "nested", moment, number, killed_rank, tmp_path)


@pytest.mark.parametrize(
    ("schedule", "placement"),
    [
        ("nested", "sharded"),
        pytest.param("nested", "replicated", marks=pytest.mark.slow),
        pytest.param("serial", "sharded", marks=pytest.mark.slow),
    ],
)
def test_started_again_with_another_placement(schedule: str, placement: str, tmp_path: Path) -> None:
    """A run with replicated tables and rounded messages is killed. Fails if "tables.placement" is missing in
    _FREE_KEYS, or if a resumed run does not pass its row_dtype to the exchange."""
    first, second = (tmp_path / name for name in ("first.toml", "second.toml"))
    for recipe, place in ((first, "replicated"), (second, placement)):
        tables = (f'[[tables]]\nname = "{name}"\nplacement = "{place}"\n' for name in ("c10", "c21"))
        exchange = '[exchange]\nrow_dtype = "bfloat16"\ngradient_dtype = "int8"\n'
        recipe.write_text(exchange + "".join(tables))
    path = tmp_path / "out"
    assert start_and_wait(2, path, schedule, "a step", 5, 1, first)
    step = newest(path)
    assert step > 0
    digests = {digest for digest, _ in ranks.run_ranks(2, train, tmp_path / "whole", schedule, second)}
    resumed = ranks.run_ranks(2, train, path, schedule, second)
    assert {digest for digest, _ in resumed} == digests
    assert {resumed_from for _, resumed_from in resumed} == {step}


@pytest.mark.slow
def test_started_again_with_other_groups(tmp_path: Path) -> None:
    """A run of two groups of two ranks is killed, and goes on as it began; another goes on with one group. Fails if
    "exchange.replicas" is missing in _FREE_KEYS."""
    groups, flat = (tmp_path / name for name in ("groups.toml", "flat.toml"))
    groups.write_text("[exchange]\nreplicas = 2\ncheck_replicas = 2\n")
    flat.write_text("")
    path = tmp_path / "out"
    assert start_and_wait(4, path, "nested", "a step", 5, 1, groups, replicas=2)
    copied, step = tmp_path / "copied", newest(path)
    assert step > 0
    shutil.copytree(path, copied)
    whole = ranks.run_ranks(4, train, tmp_path / "whole", "nested", groups, replicas=2)
    resumed = ranks.run_ranks(4, train, path, "nested", groups, replicas=2)
    assert {digest for digest, _ in resumed} == {digest for digest, _ in whole}
    assert {resumed_from for _, resumed_from in resumed} == {step}
    with_one_group = ranks.run_ranks(4, train, copied, "nested", flat)
    assert {resumed_from for _, resumed_from in with_one_group} == {step}
    with pytest.raises(ranks.RankFailedError, match=r"exchange.replicas = 1, but the world was made with replicas = 2"):
        ranks.run_ranks(4, train, tmp_path / "other", "nested", flat, replicas=2)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_started_again_in_two_hops(schedule: str, tmp_path: Path) -> None:
    recipe, path = tmp_path / "hops.toml", tmp_path / "out"
    recipe.write_text("[exchange]\nhosts = 2\n")
    assert start_and_wait(4, path, schedule, "a step", 5, 2, recipe, hosts=2)
    step = newest(path)
    assert step > 0
    digests = {digest for digest, _ in ranks.run_ranks(4, train, tmp_path / "whole", schedule, recipe, hosts=2)}
    resumed = ranks.run_ranks(4, train, path, schedule, recipe, hosts=2)
    assert len(digests) == 1
    assert set(resumed) == {(*digests, step)}


@pytest.mark.timeout(170)
def test_started_again_with_chosen_places(tmp_path: Path) -> None:
    """A run that is killed goes on with the places that it has chosen, or was given. Fails if Trainer.load forgets
    them, and then chooses by another batch, or if a recipe's `where` does not reach the features."""
    recipe, other, path = tmp_path / "recipe.toml", tmp_path / "other.toml", tmp_path / "out"
    place = '[[tables]]\nname = "c10"\nwhere = "{}"\n[[tables]]\nname = "c21"\nplacement = "auto"\nwhere = "auto"\n'
    recipe.write_text(place.format("owner"))
    other.write_text(place.format("requester"))
    assert start_and_wait(2, path, "nested", "a step", 5, 1, recipe)
    step = newest(path)
    assert step > 0
    digests = {digest for digest, _ in ranks.run_ranks(2, train, tmp_path / "whole", "nested", recipe)}
    with pytest.raises(ranks.RankFailedError, match=r"tables\.c10\.where was"):
        ranks.run_ranks(2, train, path, "nested", other)
    resumed = ranks.run_ranks(2, train, path, "nested", recipe)
    assert {digest for digest, _ in resumed} == digests
    assert {resumed_from for _, resumed_from in resumed} == {step}
    assert digests != {digest for digest, _ in ranks.run_ranks(2, train, tmp_path / "other", "nested", other)}
    chosen = [ranks.run_ranks(2, places, folder, recipe) for folder in (path, tmp_path / "whole")]
    assert chosen[0] == chosen[1]
    assert [choice.keys() for choice in chosen[0][0].values()] == [{"c21"}, {"c21"}]


def everywhere() -> list[tuple[int, str, str, int]]:
    """Returns every moment with every schedule, at 1 to 3 ranks, at the first to third call."""
    moments = [name for name in MOMENTS if name != "read rows"]
    return [
        (1 + (m + s) % 3, schedule, moment, 1 + (m + 2 * s) % 3)
        for m, moment in enumerate(moments)
        for s, schedule in enumerate(SCHEDULES)
    ]


@pytest.mark.slow
@pytest.mark.timeout(170)
@pytest.mark.parametrize(("size", "schedule", "moment", "number"), everywhere())
def test_started_again_everywhere(size: int, schedule: str, moment: str, number: int, tmp_path: Path) -> None:
    check(size, schedule, moment, number, 0, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(170)
def test_killed_while_it_loads(tmp_path: Path) -> None:
    """Twice, then it loads."""
    path = tmp_path / "out"
    assert start_and_wait(2, path, "nested", "a step", 7, 1)
    for _ in range(2):
        assert start_and_wait(2, path, "nested", "read rows", 1, 1)
    digests = {digest for digest, _ in ranks.run_ranks(2, train, tmp_path / "whole", "nested")}
    assert {digest for digest, _ in ranks.run_ranks(2, train, path, "nested")} == digests
