"""Histories of users as samples: held-out items, crops of long histories, and the batch that models need.

Fails, for example, if HELD_OUT_ITEMS of train is 1, if a random crop may reach the held-out items, or if negatives are
drawn by a sample's index in the batch.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from nestpipe.data.batch import Batch
from nestpipe.data.dataset import Batches
from nestpipe.data.files.parquet import ParquetData
from nestpipe.data.files.prepared import Prepared, read_prepared
from nestpipe.data.files.row_files import BadDataError
from nestpipe.data.files.schema import Schema
from nestpipe.data.files.user_histories import UserHistories
from nestpipe.data.negatives import Negatives
from tests.files import write_clicks, write_histories, write_parquet

LENGTHS = [8, 3, 2, 1, 4, 30]
SCHEMA = Schema(keys=["item", "time_seconds"])


@pytest.fixture
def rows(tmp_path: Path) -> ParquetData:
    """User u has the items 100 * u + i, at 1000 * u + 7 * i."""
    lists = pa.list_(pa.int64())
    items = pa.array([[100 * u + i for i in range(n)] for u, n in enumerate(LENGTHS)], lists)
    times = pa.array([[1000 * u + 7 * i for i in range(n)] for u, n in enumerate(LENGTHS)], lists)
    path = write_parquet(tmp_path / "users.parquet", {"item": items, "time_seconds": times}, 2)
    return ParquetData(path, SCHEMA, shuffle=False)


def histories(batch: Batch) -> list[list[int]]:
    return [part.values.tolist() for part in batch.keys["history"].split([1] * len(batch))]


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ("test", {0: (3, 7), 1: (0, 2), 2: (0, 1), 4: (0, 3), 5: (25, 29)}),
        ("validation", {0: (2, 6), 1: (0, 1), 4: (0, 2), 5: (24, 28)}),
        ("train", {0: (1, 5), 4: (0, 1), 5: (23, 27)}),
    ],
)
def test_the_last_items_are_held_out(rows: ParquetData, part: str, expected: dict[int, tuple[int, int]]) -> None:
    """expected: user -> first item and target. Histories have at most 4 items, and at least one."""
    batch = UserHistories(rows, 4, part).samples(0, len(LENGTHS))
    assert histories(batch) == [list(range(100 * u + a, 100 * u + b)) for u, (a, b) in expected.items()]
    assert batch.keys["target"].values.tolist() == [100 * u + b for u, (_, b) in expected.items()]
    times = [[1000 * u + 7 * i for i in range(a, b + 1)] for u, (a, b) in expected.items()]
    assert batch.inputs["times"].tolist() == [user_times + [0] * (5 - len(user_times)) for user_times in times]
    assert batch.weight == sum(b - a for a, b in expected.values())


def test_random_crops_of_long_histories(rows: ParquetData) -> None:
    """User 5 gets any 5 consecutive ones of 28 items, independent of the batches; the other users are as before."""
    data = UserHistories(rows, 4, "train", "random", seed=3)
    plain = UserHistories(rows, 4, "train")
    firsts = []
    for epoch in range(60):
        batch = data.samples(6 * epoch, 6)
        assert histories(batch)[1] == histories(plain.samples(6 * epoch, 6))[1]
        history, target = histories(batch)[2], int(batch.keys["target"].values[2])
        assert [*history, target] == list(range(history[0], history[0] + 5))
        assert histories(data.samples(6 * epoch + 5, 1)) == [history]
        firsts.append(history[0] - 500)
    assert len(set(firsts)) > 12
    assert (min(firsts), max(firsts)) == (0, 23)
    assert not torch.equal(
        UserHistories(rows, 4, "test", "random").samples(5, 1).keys["target"].values,
        UserHistories(rows, 4, "train").samples(5, 1).keys["target"].values,
    )


def test_negatives_go_by_the_position(rows: ParquetData) -> None:
    """They do not depend on the users that are left out of the batch."""
    data = UserHistories(rows, 4, "train", negatives=Negatives(10**9, 5, seed=1))
    batch = data.samples(0, 6)
    assert batch.keys["negatives"].lengths.tolist() == [20, 5, 20]
    alone = [data.samples(position, 1).keys["negatives"].values for position in (0, 4, 5)]
    assert torch.equal(batch.keys["negatives"].values, torch.cat(alone))


def test_batches_without_users(rows: ParquetData) -> None:
    data = UserHistories(rows, 4, negatives=Negatives(10, 5))
    for batch in (data.samples(2, 2), data.samples(0, 0)):
        assert (len(batch), batch.weight, batch.inputs["times"].shape) == (0, 0.0, (0, 5))
        assert batch.keys.keys() == {"history", "target", "negatives"}


def test_a_state_of_other_samples_is_refused(rows: ParquetData) -> None:
    state = Batches(UserHistories(rows, 4, crop="random", seed=1), 2).state()
    Batches(UserHistories(rows, 4, crop="random", seed=1, negatives=Negatives(9)), 3, 1, 2).load_state(state)
    for data, text in (
        (UserHistories(rows, 5, crop="random", seed=1), "max_length was 4, is 5"),
        (UserHistories(rows, 4, crop="random", seed=2), "seed of the crop was 1, is 2"),
        (UserHistories(rows, 4, seed=1), "random crop was True, is False"),
        (UserHistories(rows, 4, "test"), "part was train, is test"),
    ):
        with pytest.raises(ValueError, match=f"of another order of samples: .*{text}"):
            Batches(data, 2).load_state(state)


def test_each_item_needs_its_time(tmp_path: Path) -> None:
    columns = {"item": pa.array([[1, 2], [3, 4, 5]]), "time_seconds": pa.array([[1, 2], [3]])}
    data = ParquetData(write_parquet(tmp_path / "x.parquet", columns), SCHEMA, shuffle=False)
    with pytest.raises(ValueError, match="the sample at position 1 has 3 items, but 1 times"):
        UserHistories(data, 4).samples(0, 2)


def test_a_prepared_folder(tmp_path: Path) -> None:
    prepared = read_prepared(write_histories(tmp_path / "ml"))
    data = prepared.histories("test", 10, num_epochs=1)
    batches = list(Batches(data, 16))
    assert sum(map(len, batches)) == prepared.manifest.counts["users"] == 60
    assert max(batch.keys["history"].lengths.max() for batch in batches) == 10
    clicks = read_prepared(write_clicks(tmp_path / "criteo"))
    batch = clicks.clicks("train").samples(0, 100)
    assert (batch.inputs["dense"].shape, batch.inputs["dense"].dtype) == ((100, 13), torch.float32)
    assert set(batch.inputs["click"].tolist()) == {0.0, 1.0}
    assert len(batch.keys) == 26
    assert 0 < int((batch.keys["key_3"].lengths == 0).sum()) < 30  # null: no key
    assert [clicks.clicks(split, num_epochs=1).num_samples for split in ("train", "validation", "test")] == [
        400,
        50,
        50,
    ]


def test_folders_that_are_not_prepared(tmp_path: Path) -> None:
    folder = write_histories(tmp_path / "ml")
    with pytest.raises(BadDataError, match=r"there is no folder .*nowhere"):
        read_prepared(tmp_path / "nowhere")
    with pytest.raises(BadDataError, match="has no files of the split 'train'; it has all"):
        read_prepared(folder).clicks("train")
    file = folder / "users-00001.parquet"
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(BadDataError, match=r"users-00001.parquet is \d+ bytes long, its manifest says"):
        read_prepared(folder)
    file.unlink()
    with pytest.raises(BadDataError, match=r"users-00001.parquet is missing, its manifest says"):
        read_prepared(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"has no manifest.json"):
        read_prepared(folder)


def test_items_outside_the_corpus_are_refused(tmp_path: Path) -> None:
    prepared = read_prepared(write_histories(tmp_path / "ml", num_items=50))
    counts = {**prepared.manifest.counts, "items": 49}
    smaller = Prepared(prepared.folder, type(prepared.manifest)(**{**vars(prepared.manifest), "counts": counts}))
    with pytest.raises(
        BadDataError, match=r"users-00000.parquet, row group 0, row \d+: column 'item' has a key outside"
    ):
        smaller.users(window=1, shuffle=False).samples(0, 10)
    data = smaller.users(skip_bad=True, num_epochs=1)
    kept = np.concatenate([batch.keys["item"].values.numpy() for batch in Batches(data, 16)])
    assert kept.max() == 48
    assert data.skipped.num_rows + data.num_rows == 60


@pytest.mark.parametrize("num_epochs", [None, 2])
def test_no_user_with_enough_items(num_epochs: int | None, tmp_path: Path) -> None:
    """Fails, by training for ever, without _find_sample; and if it asks for one item too many or too few."""
    lists = [[7, 8, 9]] * 50
    path = write_parquet(tmp_path / "x.parquet", {"item": pa.array(lists), "time_seconds": pa.array(lists)})
    rows = ParquetData(path, SCHEMA, num_epochs=num_epochs, window=1)
    batches = Batches(UserHistories(rows, 4), 4, rank=1, world_size=2)
    with pytest.raises(BadDataError, match="none of the 50 users has the 4 items that part 'train' needs: the last 2"):
        next(batches)
    assert len(UserHistories(rows, 4, "validation").samples(0, 4)) == 4


def test_one_user_with_enough_items(tmp_path: Path) -> None:
    """Batches before and after that user are empty, which is no error."""
    lists = [[7, 8, 9]] * 50 + [[1, 2, 3, 4]] + [[1]] * 9
    path = write_parquet(tmp_path / "x.parquet", {"item": pa.array(lists), "time_seconds": pa.array(lists)})
    for position in (0, 44, 55):
        data = UserHistories(ParquetData(path, SCHEMA, num_epochs=1, shuffle=False, window=1), 4)
        assert len(data.samples(position, 4)) == 0
    assert sum(map(len, Batches(data, 7))) == 1
