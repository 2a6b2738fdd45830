"""Files as data: the contents of a batch, the rows of each rank, continuing, and the row groups that are read.

Fails, for example, if the order depends on the batch size, if samples uses the window of its first sample for all of
them, or if the window after this one is read ahead instead of the next one that the rank needs.
"""

import json
import shutil
import weakref
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from nestpipe.data import ParquetData, Schema
from nestpipe.data.batch import Batch
from nestpipe.data.dataset import Batches, FirstSamples
from tests.files import write_arrow, write_numbers, write_parquet

SCHEMA = Schema(keys=["number", "tags"], inputs={"x": "x"}, labels=["y"])
NUM_ROWS = 135


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_numbers(tmp_path_factory.mktemp("numbers"))


def numbers(batch: Batch) -> list[int]:
    return batch.keys["number"].values.tolist()


def rank_batches(paths: list[Path], batch_size: int, world_size: int, **options: object) -> list[Batches]:
    datasets = [ParquetData(paths, SCHEMA, seed=3, window=3, **options) for _ in range(world_size)]
    return [Batches(dataset, batch_size, rank, world_size) for rank, dataset in enumerate(datasets)]


def test_a_state_of_another_order_is_refused(paths: list[Path], tmp_path: Path) -> None:
    """Fails if fingerprint leaves out one of these. A state with the position alone is accepted."""
    state = json.loads(json.dumps(Batches(FirstSamples(ParquetData(paths, SCHEMA, seed=3, window=3), 90), 7).state()))
    moved = [Path(shutil.copy(path, tmp_path)) for path in paths]
    goes_on = Batches(ParquetData(moved, SCHEMA, seed=3, window=3, num_threads=2, num_epochs=9), 5, 1, 2)
    goes_on.load_state({**state, "position": 11})
    assert goes_on.position == 11
    others = write_numbers(tmp_path, (95, 41))
    for data, text in (
        (ParquetData(paths, SCHEMA, seed=4, window=3), "seed was 3, is 4"),
        (ParquetData(paths, SCHEMA, seed=3, window=4), "window was 3, is 4"),
        (ParquetData(paths, SCHEMA, shuffle=False), "shuffle was True, is False"),
        (ParquetData(paths[::-1], SCHEMA, seed=3, window=3), "files was .* row groups was "),
        (ParquetData(others, SCHEMA, seed=3, window=3), "files was "),
    ):
        batches = Batches(data, 7)
        with pytest.raises(ValueError, match=f"of another order of samples: .*{text}.*set back what differs"):
            batches.load_state(state)
        batches.load_state({"position": 5})
        assert batches.position == 5


def test_a_row_is_a_sample(paths: list[Path]) -> None:
    batch = ParquetData(paths, SCHEMA).samples(0, 50)
    for sample, number in enumerate(numbers(batch)):
        one = batch[sample : sample + 1]
        assert one.keys["tags"].values.tolist() == [number * 10 + i for i in range(number % 3)]
        assert (float(one.inputs["x"]), float(one.inputs["y"])) == (number / 2, number % 2)
    assert (batch.inputs["x"].dtype, batch.inputs["y"].dtype) == (torch.float32, torch.float32)
    assert batch.weight is None


@pytest.mark.parametrize(("batch_size", "world_size"), [(1, 1), (7, 1), (4, 2), (10, 3), (13, 4), (135, 2), (200, 1)])
def test_the_order_does_not_depend_on_ranks_or_batch_size(paths: list[Path], batch_size: int, world_size: int) -> None:
    """Every sample comes once in an epoch, and the last global batch has the remaining ones."""
    alone = numbers(ParquetData(paths, SCHEMA, seed=3, window=3).samples(0, 2 * NUM_ROWS))
    ranks = rank_batches(paths, batch_size, world_size, num_epochs=2)
    together = [numbers(batch) for step in zip(*ranks, strict=True) for batch in step]
    assert list(chain(*together)) == alone
    assert sorted(alone[:NUM_ROWS]) == sorted(alone[NUM_ROWS:]) == list(range(NUM_ROWS))
    assert alone[:NUM_ROWS] != alone[NUM_ROWS:]


@pytest.mark.parametrize("position", [0, 1, 29, 30, 134, 135, 200, 270])
def test_goes_on_at_any_step(paths: list[Path], position: int) -> None:
    """The number of ranks and the batch size may differ."""
    whole = numbers(ParquetData(paths, SCHEMA, seed=3, window=3).samples(0, 2 * NUM_ROWS))
    ranks = rank_batches(paths, 11, 2, num_epochs=2)
    for batches in ranks:
        batches.load_state({"position": position})
    rest = [numbers(batch) for step in zip(*ranks, strict=True) for batch in step]
    assert list(chain(*rest)) == whole[position:]


def test_endless_without_epochs(paths: list[Path]) -> None:
    data = ParquetData(paths, SCHEMA, seed=3, window=3)
    assert data.num_samples is None
    far = 1000 * NUM_ROWS
    assert sorted(numbers(data.samples(far, NUM_ROWS))) == list(range(NUM_ROWS))


def test_a_rank_reads_the_row_groups_of_its_samples_only(paths: list[Path]) -> None:
    """There are 14 row groups, in windows of one. Rank 1 has every second batch."""
    sizes = [len(file.group_rows) for file in ParquetData(paths, SCHEMA).files]
    assert sizes == [10, 4]
    data = ParquetData(paths, SCHEMA, window=1, num_epochs=1, shuffle=False)
    needed = [
        data.order.window_at(p).groups for first in range(10, 135, 20) for p in range(first, min(first + 10, 135))
    ]
    reads = []
    read = data._ahead._read
    data._ahead._read = lambda group: (reads.append(group), read(group))[1]
    for _ in Batches(data, 10, 1, 2):
        if data._ahead._pending is not None:
            data._ahead._pending.joined.result()  # waits for all reads, needed or not
    assert sorted(reads) == sorted({group for groups in needed for group in groups})
    assert data.num_group_reads == len(reads)


def test_a_window_is_read_once_and_the_next_one_ahead(paths: list[Path]) -> None:
    data = ParquetData(paths, SCHEMA, window=3)
    data.samples(0, 5)
    data.samples(5, 5)  # now the distance between batches is known
    assert data._ahead._pending is not None
    assert data._ahead._pending.window == data.order.window_at(data.order.window_at(0).end)
    data._ahead._pending.joined.result()
    assert data.num_group_reads == 6
    for first in range(10, 30, 5):
        data.samples(first, 5)
    assert data.num_group_reads == 6


@pytest.mark.parametrize("window", [1, 3])
def test_few_decoded_row_groups_are_kept(paths: list[Path], window: int) -> None:
    """Fails if ReadAhead keeps its windows: all 14 row groups would stay in memory."""
    data = ParquetData(paths, SCHEMA, window=window, num_epochs=2)
    read, decoded, most = data._ahead._read, [], 0

    def watched(group: int) -> object:
        rows = read(group)
        decoded.append(weakref.ref(rows))
        return rows

    data._ahead._read = watched
    for first in range(0, 270, 9):
        data.samples(first, 9)
        if data._ahead._pending is not None:
            data._ahead._pending.joined.result()
        most = max(most, sum(rows() is not None for rows in decoded))
    assert len(decoded) == 28
    assert most <= window + 1


def test_threads_do_not_change_the_samples(paths: list[Path]) -> None:
    one, three = (ParquetData(paths, SCHEMA, window=4, num_threads=n) for n in (1, 3))
    for first in range(0, 270, 27):
        assert numbers(one.samples(first, 27)) == numbers(three.samples(first, 27))


def test_no_samples_are_a_batch_too(paths: list[Path]) -> None:
    schema = Schema(keys=["number"], inputs={"both": ["x", "y"], "x": "x"}, labels={"label": "y"}, weight="x")
    batch = ParquetData(paths, schema).samples(0, 0)
    assert len(batch) == 0
    assert {name: tuple(values.shape) for name, values in batch.inputs.items()} == {
        "both": (0, 2),
        "x": (0,),
        "label": (0,),
        "weight": (0,),
    }
    assert batch.weight == 0


@pytest.mark.parametrize("writer", [write_parquet, write_arrow])
def test_what_columns_become(writer: object, tmp_path: Path) -> None:
    columns = {
        "key": pa.array([5, None, -(2**63)], pa.int64()),
        "wide": pa.array([2**64 - 1, 0, 1], pa.uint64()),
        "list": pa.array([[1, None, 2], None, []], pa.list_(pa.int16())),
        "large": pa.array([[], [3], [4, 4]], pa.large_list(pa.uint8())),
        "fixed": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int64(), 2)),
        "coded": pa.array([7, 7, 8]).dictionary_encode(),
        "x": pa.array([1.5, 2.5, 3.5], pa.float64()),
        "i": pa.array([1, 2, 3], pa.int32()),
        "b": pa.array([True, False, True]),
        "v": pa.array([[0.5, 1.0], [1.5, 2.0], [2.5, 3.0]], pa.list_(pa.float32())),
    }
    path = writer(tmp_path / "file", columns, 2)
    schema = Schema(
        keys=["key", "wide", "list", "large", "fixed", "coded"],
        inputs={"x": "x", "i": "i", "v": "v", "all": ["x", "i", "v", "b"]},
        labels={"label": "b"},
        weight="x",
    )
    batch = ParquetData(path, schema, shuffle=False).samples(0, 3)
    lists = {n: [part.values.tolist() for part in jagged.split([1, 1, 1])] for n, jagged in batch.keys.items()}
    assert lists == {
        "key": [[5], [], [-(2**63)]],
        "wide": [[-1], [0], [1]],
        "list": [[1, 2], [], []],
        "large": [[], [3], [4, 4]],
        "fixed": [[1, 2], [3, 4], [5, 6]],
        "coded": [[7], [7], [8]],
    }
    assert batch.inputs["i"].dtype == torch.int64
    assert batch.inputs["v"].tolist() == [[0.5, 1.0], [1.5, 2.0], [2.5, 3.0]]
    assert batch.inputs["all"].tolist() == [[1.5, 1, 0.5, 1, 1], [2.5, 2, 1.5, 2, 0], [3.5, 3, 2.5, 3, 1]]
    assert batch.inputs["label"].tolist() == [1, 0, 1]
    assert batch.weight == 7.5


def test_folders_and_patterns(paths: list[Path]) -> None:
    folder = paths[0].parent
    expected = numbers(ParquetData(paths, SCHEMA).samples(0, NUM_ROWS))
    assert numbers(ParquetData(folder, SCHEMA).samples(0, NUM_ROWS)) == sorted(expected, key=expected.index)
    assert ParquetData(f"{folder}/*.parquet", SCHEMA).num_rows == 95
    assert ParquetData([paths[1], f"{folder}/part-0*"], SCHEMA).num_rows == NUM_ROWS


@pytest.mark.parametrize(("first", "count"), [(-1, 2), (0, -1), (130, 6)])
def test_refuses_positions_that_do_not_exist(paths: list[Path], first: int, count: int) -> None:
    with pytest.raises(ValueError, match=r"positions are 0 \.\. 134"):
        ParquetData(paths, SCHEMA, num_epochs=1).samples(first, count)
