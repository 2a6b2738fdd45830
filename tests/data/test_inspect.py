"""`nestpipe data inspect`: counts are exact, and estimates are close.

Fails, for example, if keys that stand for others are counted once, or if overlap is divided by the previous batch.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from nestpipe.data.files.row_files import BadDataError
from nestpipe.data.inspect import estimate, inspect
from nestpipe.data.key_counts import KeyCounts
from tests.files import write_clicks, write_histories, write_numbers, write_parquet


def exact_shares(keys: np.ndarray, hottest: tuple[float, ...]) -> list[float]:
    counts = np.sort(np.unique(keys, return_counts=True)[1])[::-1]
    return [counts[: round(share * len(counts))].sum() / len(keys) for share in hottest]


def test_few_keys_are_counted_exactly() -> None:
    keys = np.random.default_rng(1).zipf(1.3, 20_000) % 5_000
    counts = KeyCounts(most_keys=5_000)
    for part in np.array_split(keys, 7):
        counts.add(part)
    assert counts.is_exact
    assert (counts.num_occurrences, counts.num_distinct) == (20_000, len(np.unique(keys)))
    assert counts.shares((0.1, 0.5, 1.0)) == pytest.approx([*exact_shares(keys, (0.1, 0.5)), 1.0], abs=0.002)


@pytest.mark.parametrize("skew", [1.1, 1.5])
def test_many_keys_are_estimated_in_bounded_memory(skew: float) -> None:
    draws = np.random.default_rng(2)
    keys = np.concatenate([draws.zipf(skew, 200_000) % 2**40, draws.integers(0, 2**60, 60_000)])
    draws.shuffle(keys)
    counts = KeyCounts(most_keys=4_096)
    for part in np.array_split(keys, 50):
        counts.add(part)
        assert len(counts._keys) <= 4_096
    assert not counts.is_exact
    assert counts.num_distinct == pytest.approx(len(np.unique(keys)), rel=0.1)
    assert counts.shares((0.001, 0.01, 0.1)) == pytest.approx(exact_shares(keys, (0.001, 0.01, 0.1)), abs=0.05)


def test_files(tmp_path: Path) -> None:
    """In column a half of the rows have 0, and the others are all different. Column b always has 5 and 6."""
    a = [0 if row % 2 else row + 10 for row in range(400)]
    columns = {"a": pa.array(a), "b": pa.array([[5, 6]] * 400), "text": pa.array(["x"] * 400)}
    path = write_parquet(tmp_path / "file.parquet", columns, 40)
    inspection = inspect([path])
    assert (inspection.num_rows, inspection.num_groups, inspection.keys) == (400, 10, [])
    assert inspection.columns == {"a": "int64", "b": "list<element: int64>", "text": "string"}
    stages = []
    inspection = inspect([path], ["a", "b"], batch_size=50, report=lambda stage, done: stages.append((stage, done)))
    first, second = inspection.keys
    assert (first.num_occurrences, first.num_distinct, second.num_occurrences) == (400, 201, 800)
    assert first.hottest[0.1] == pytest.approx((200 + 19.1) / 400)
    assert (second.num_per_batch, second.overlap) == (2, 1.0)
    assert first.overlap == pytest.approx(1 / first.num_per_batch, rel=0.1)  # only the 0 is shared
    assert stages[-1] == ("comparing batches", 1.0)
    whole = estimate(inspection.keys, record_bytes=64)
    assert whole.memory_bytes == 203 * (64 + 32)
    assert whole.retrieved_bytes == 64 * (first.num_per_batch + 2)
    assert whole.pipelined_bytes == pytest.approx(64 * first.num_per_batch * (1 - first.overlap))


def test_prepared_folders(tmp_path: Path) -> None:
    inspection = inspect([write_histories(tmp_path / "ml")], batch_size=20, max_length=10)
    assert (inspection.what, inspection.counts["users"], inspection.num_rows) == (
        "prepared histories of movielens-1m",
        60,
        60,
    )
    (items,) = inspection.keys
    assert (items.name, items.num_occurrences, items.num_distinct) == ("item", inspection.counts["events"], 50)
    assert 0 < items.overlap <= 1
    inspection = inspect([write_clicks(tmp_path / "criteo")])
    assert ([column.name for column in inspection.keys][:2], inspection.num_rows, inspection.num_files) == (
        ["key_0", "key_1"],
        400,
        1,
    )


def test_what_cannot_be_inspected(tmp_path: Path) -> None:
    paths = write_numbers(tmp_path, (20,))
    with pytest.raises(BadDataError, match="has no column 'user'"):
        inspect(paths, ["user"])
    paths[0].write_bytes(b"")
    with pytest.raises(BadDataError, match=r"is empty \(0 bytes\)"):
        inspect(paths)
