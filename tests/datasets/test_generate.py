"""Generated files have the published formats, are unsorted and skewed, and the same for the same seed.

Fails if a block is drawn from its own number instead of the numbers of its rows.
"""

import hashlib
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from nestpipe.datasets.generate import generate
from nestpipe.datasets.kuairand import COLUMNS, standard_logs

VARIANTS = [
    ("kuairand", "27k"),
    ("kuairand", "1k"),
    ("kuairand", "pure"),
    ("movielens", "1m"),
    ("movielens", "20m"),
    ("criteo", "kaggle"),
    ("criteo", "terabyte"),
]


def bytes_of(files: list[Path]) -> list[bytes]:
    return [file.read_bytes() for file in files]


@pytest.mark.parametrize(("data_format", "variant"), VARIANTS)
def test_bytes_follow_from_the_seed(
    data_format: str, variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not depend on the size of the blocks."""
    files = {seed: generate(data_format, tmp_path / f"{seed}", 700, seed=seed, variant=variant) for seed in (1, 2)}
    monkeypatch.setattr("nestpipe.datasets.generate.ROWS_A_BLOCK", 37)
    again = generate(data_format, tmp_path / "again", 700, seed=1, variant=variant)
    assert bytes_of(again) == bytes_of(files[1])
    assert bytes_of(files[2]) != bytes_of(files[1])


@pytest.mark.parametrize(
    ("data_format", "variant", "digest"),
    [
        ("kuairand", "27k", "4483030f6bee6ed7"),
        ("movielens", "1m", "2d263c9df6f0e76d"),
        ("movielens", "20m", "10c084d351e1f687"),
        ("criteo", "kaggle", "efbe71cc10ba8d7f"),
    ],
)
def test_golden_bytes(data_format: str, variant: str, digest: str, tmp_path: Path) -> None:
    """Benchmarks that run on different days must use the same data."""
    content = b"".join(bytes_of(generate(data_format, tmp_path, 300, variant=variant)))
    assert hashlib.sha256(content).hexdigest()[:16] == digest


def test_kuairand(tmp_path: Path) -> None:
    files = generate("kuairand", tmp_path, 20_000)
    assert [file.relative_to(tmp_path).as_posix() for file in files] == [
        *(f"KuaiRand-27K/data/{name}" for name in standard_logs("27k")),
        "KuaiRand-27K/data/log_random_4_22_to_5_08_27k.csv",
    ]
    lines = [file.read_text().splitlines() for file in files]
    assert {log[0] for log in lines} == {",".join(COLUMNS)}
    rows = [dict(zip(COLUMNS, map(int, line.split(",")), strict=True)) for log in lines[:4] for line in log[1:]]
    assert len(rows) == 20_000
    assert {row["is_rand"] for row in rows} == {0}
    assert all(line.split(",")[17] == "1" for line in lines[4][1:])
    assert {20220408, 20220421, 20220422, 20220508} <= {row["date"] for row in rows}
    assert all(20220408 <= row["date"] <= 20220430 or 20220501 <= row["date"] <= 20220508 for row in rows)
    assert any(one["time_ms"] > two["time_ms"] for one, two in pairwise(rows))
    hottest = [number for _, number in Counter(row["video_id"] for row in rows).most_common(3)]
    assert hottest[0] > 1.5 * hottest[1] > 1.5 * hottest[2]


def test_movielens(tmp_path: Path) -> None:
    (old,) = generate("movielens", tmp_path / "1m", 500, variant="1m")
    assert all(re.fullmatch(r"\d+::\d+::[1-5]::\d+", line) for line in old.read_text().splitlines())
    (new,) = generate("movielens", tmp_path / "20m", 500, variant="20m")
    header, *lines = new.read_text().splitlines()
    assert (header, len(lines)) == ("userId,movieId,rating,timestamp", 500)
    assert all(re.fullmatch(r"\d+,\d+,[0-5]\.[05],\d+", line) for line in lines)
    users = [int(line.split(",")[0]) for line in lines]
    assert users == sorted(users)
    assert min(Counter(users[: -users.count(users[-1])]).values()) >= 20


def test_criteo(tmp_path: Path) -> None:
    (file,) = generate("criteo", tmp_path / "kaggle", 300)
    rows = [line.split("\t") for line in file.read_text().splitlines()]
    assert {len(row) for row in rows} == {40}
    assert {row[0] for row in rows} == {"0", "1"}
    assert all(re.fullmatch(r"-?\d+|", text) for row in rows for text in row[1:14])
    assert all(re.fullmatch(r"[0-9a-f]{8}|", text) for row in rows for text in row[14:])
    assert any(text == "" for row in rows for text in row[14:])
    days = generate("criteo", tmp_path / "days", 50, variant="terabyte")
    assert [day.name for day in days] == [f"day_{day}" for day in range(24)]
    assert sum(len(day.read_text().splitlines()) for day in days) == 50


@pytest.mark.parametrize(
    ("data_format", "num_rows", "variant", "text"),
    [
        ("news", 1, None, "there is no format 'news'; formats are criteo, kuairand, movielens"),
        ("criteo", 1, "27k", "criteo has no variant '27k'; variants are kaggle, terabyte"),
        ("criteo", 0, None, "must be at least 1"),
        ("criteo", 23, "terabyte", "give every day one at least"),
    ],
)
def test_refused(data_format: str, num_rows: int, variant: str | None, text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=text):
        generate(data_format, tmp_path / "dst", num_rows, variant=variant)


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("mine")
    for folder in (tmp_path, tmp_path / "x"):
        with pytest.raises(ValueError, match="is not an empty folder"):
            generate("criteo", folder, 10)
