"""A run that goes on at another number of ranks: same rows, same losses, and each rank reads about its share."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nestpipe import World
from nestpipe.checkpoint import CheckpointError, Subject, load
from nestpipe.data.dataset import Batches
from nestpipe.data.synthetic.clicks import ClickData
from tests.exactness.cases import Case, global_batches, make_trainer, share_of
from tests.ranks import run_ranks

CASE = Case("adagrad", "shared", 1, steps=12)
"""float64 rows and dense model, as in E2."""
NESTED = Case("adam", "pooled_mean", 3, steps=12, schedule="nested")
SIZES = (4, 1, 3, 2)
STEPS_EACH = CASE.steps // len(SIZES)


class Shares:
    """This rank's part of global batches. Its state is the number of the next one."""

    def __init__(self, world: World) -> None:
        self.batches, self.position = share_of(global_batches(CASE.steps), world), 0

    def __iter__(self) -> "Shares":
        return self

    def __next__(self) -> Any:
        if self.position == len(self.batches):
            raise StopIteration
        self.position += 1
        return self.batches[self.position - 1]

    def state(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def train_a_part(world: World, case: Case, path: Path, number: int) -> tuple[list[float], str, str]:
    """Returns the losses of a quarter of the run, and the digests after its load and before its save."""
    trainer, data = make_trainer(world, case), Shares(world)
    if number > 0:
        trainer.load(path)
        data.load_state(trainer.data_state())
    loaded = trainer.digest()
    losses = trainer.fit(data, STEPS_EACH).losses
    trainer.save(path, complete_every=3)
    return losses, loaded, trainer.digest()


def train_whole(world: World, case: Case) -> list[float]:
    return make_trainer(world, case).fit(Shares(world)).losses


@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        (CASE, SIZES),
        pytest.param(NESTED, SIZES, marks=pytest.mark.slow),
        pytest.param(NESTED, (2, 3, 1, 4), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_four_one_three_two(case: Case, sizes: tuple[int, ...], tmp_path: Path) -> None:
    """Fails if RowReader keeps rows of other ranks, or does not read all shards that have rows of its own, or if the
    position of the data is that of another step."""
    losses: list[float] = []
    saved = ""
    for number, size in enumerate(sizes):
        results = run_ranks(size, train_a_part, case, tmp_path / "save", number)
        for _, loaded, _ in results:
            assert number == 0 or loaded == saved
        losses += results[0][0]
        saved = results[0][2]
    (whole,) = run_ranks(1, train_whole, case)
    assert len(losses) == case.steps
    assert losses == pytest.approx(whole, rel=1e-10)


def subject_of(trainer: Any) -> Subject:
    subject: Subject = trainer._subject()
    return subject


def load_a_share(world: World, path: Path) -> tuple[int, int]:
    """Returns the bytes of shards that this rank reads, and those of all shards."""
    trainer = make_trainer(world, CASE)
    loaded = load(subject_of(trainer), trainer.empty_store, path)
    return loaded.num_row_bytes, sum(shard.stat().st_size for shard in path.rglob("*.rows"))


def save_many_rows(world: World, path: Path) -> None:
    trainer = make_trainer(world, CASE)
    trainer.fit(share_of(global_batches(1), world))
    keys = torch.arange(1000, 9000)
    trainer.import_rows("item", keys, torch.rand(len(keys), 5))
    trainer.save(path)


@pytest.mark.parametrize(("num_saved", "size"), [(1, 4), (4, 2)])
def test_each_rank_reads_its_share(num_saved: int, size: int, tmp_path: Path) -> None:
    """Fails if RowReader.read reads shards without rows of its own."""
    run_ranks(num_saved, save_many_rows, tmp_path / "save")
    for num_read, num_bytes in run_ranks(size, load_a_share, tmp_path / "save"):
        assert 0 < num_read <= 1.1 * num_bytes / size


class OwnPosition:
    """Data whose state differs by rank."""

    def __init__(self, world: World) -> None:
        self.batches = iter(share_of(global_batches(4), world))
        self.rank = world.rank

    def __iter__(self) -> "OwnPosition":
        return self

    def __next__(self) -> Any:
        return next(self.batches)

    def state(self) -> dict[str, int]:
        return {"rank": self.rank}

    def load_state(self, state: dict[str, int]) -> None:
        raise AssertionError("not reached")


def save_own_positions(world: World, path: Path) -> None:
    trainer = make_trainer(world, CASE)
    trainer.fit(OwnPosition(world), 2)
    trainer.save(path)


def load_here(world: World, path: Path) -> tuple[str, Any]:
    """Returns the error of a load, and the data's state after one that is not strict."""
    trainer, message = make_trainer(world, CASE), ""
    try:
        trainer.load(path)
    except CheckpointError as error:
        message = str(error)
    trainer.load(path, strict=False)
    return message, trainer.data_state()


def test_positions_of_two_ranks_are_not_those_of_three(tmp_path: Path) -> None:
    """Fails if _read_own takes the position of rank 0 for all ranks."""
    run_ranks(2, save_own_positions, tmp_path / "save")
    for message, state in run_ranks(1, load_here, tmp_path / "save"):
        assert "saved by 2 ranks, each with a data position of its own" in message
        assert state is None


def test_the_data_goes_on_at_the_same_sample() -> None:
    """2 ranks of 8 samples and 4 ranks of 4 have the same global batch. Fails if a position counted steps."""
    data = ClickData(seed=1, scale=0.001)
    before = Batches(data, 8, 0, 2)
    next(before)
    after = [Batches(data, 4, rank, 4) for rank in range(4)]
    for batches in after:
        batches.load_state(before.state())
    expected = [next(batches) for batches in [before, _moved(Batches(data, 8, 1, 2), 16)]]
    name = data.feature_names[0]
    joined = torch.cat([next(batches).keys[name].values for batches in after])
    assert torch.equal(joined, torch.cat([batch.keys[name].values for batch in expected]))


def _moved(batches: Batches, position: int) -> Batches:
    batches.load_state({"position": position})
    return batches
