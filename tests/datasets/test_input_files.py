"""Input that is damaged, empty, or changes while it is read is an error that names the file, with --skip-bad too."""

import gzip
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from nestpipe.datasets.criteo import DAYS
from nestpipe.datasets.kuairand import standard_logs
from nestpipe.datasets.prepare import prepare
from tests.datasets.samples.test_clicks import line

RATINGS = b"".join(b"%d::%d::5::%d\n" % (n * n % 97, n * 7 % 13, n) for n in range(3000))
PACKED = gzip.compress(RATINGS, mtime=0)
LOG_HEADER = b"user_id,video_id,time_ms\n"


def changed(content: bytes, place: int, to: bytes) -> bytes:
    return content[:place] + to + content[place + len(to) :]


def flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 1]) + content[place:][1:]


STORED = gzip.compress(RATINGS, 0, mtime=0)
DAMAGED = {
    "digit": changed(STORED, STORED.index(b"::5::7\n") + 2, b"4"),
    "sum": flipped(PACKED, len(PACKED) - 6),
    "size": flipped(PACKED, len(PACKED) - 2),
    "sum of the first part": flipped(PACKED, len(PACKED) - 6) + PACKED,
    "size of the last part": PACKED + flipped(PACKED, len(PACKED) - 2),
}


@pytest.mark.parametrize("skip_bad", [False, True])
@pytest.mark.parametrize("what", DAMAGED)
def test_a_gzip_file_whose_sum_or_size_is_wrong(what: str, skip_bad: bool, tmp_path: Path) -> None:
    """All lines are good. Fails if `gzip_problem` returns None."""
    file = tmp_path / "ratings.dat.gz"
    file.write_bytes(DAMAGED[what])
    text = rf"{file}: the gzip file is damaged: .*incorrect (data|length) check; get the file again"
    with pytest.raises(ValueError, match=text):
        prepare("movielens", tmp_path, tmp_path / "dst", skip_bad=skip_bad)
    assert not (tmp_path / "dst").exists()


def test_damaged_clicks_and_logs(tmp_path: Path) -> None:
    clicks = gzip.compress((line() + "\n").encode() * 50)
    (tmp_path / "train.txt.gz").write_bytes(flipped(clicks, len(clicks) - 6))
    with pytest.raises(ValueError, match=r"train\.txt\.gz: the gzip file is damaged"):
        prepare("criteo", tmp_path, tmp_path / "dst")
    first, second = (gzip.compress(LOG_HEADER + b"1,2,3\n" * 400, mtime=0) for _ in range(2))
    (tmp_path / f"{standard_logs('pure')[0]}.gz").write_bytes(first)
    (tmp_path / f"{standard_logs('pure')[1]}.gz").write_bytes(flipped(second, len(second) - 6))
    with pytest.raises(ValueError, match=rf"{standard_logs('pure')[1]}\.gz: the gzip file is damaged"):
        prepare("kuairand", tmp_path, tmp_path / "dst")


def test_a_gzip_file_of_parts_and_of_many_equal_bytes(tmp_path: Path) -> None:
    """The unpacked bytes do not fit into one block."""
    many = b"1::2::" + b"5" * 1_900_000 + b"::4\n"
    (tmp_path / "ratings.dat.gz").write_bytes(
        PACKED + gzip.compress(many * 3, mtime=0) + gzip.compress(b"", mtime=0) + PACKED
    )
    assert prepare("movielens", tmp_path, tmp_path / "dst").counts["events"] == 6003


ONLY_A_HEADER = {"kuairand": LOG_HEADER, "movielens": b"userId,movieId,rating,timestamp\n"}


def files_of(data_format: str, one: bytes) -> dict[str, bytes]:
    """Returns the files of a format, one of which has these bytes."""
    if data_format == "kuairand":
        return dict(zip(standard_logs("pure"), (one, LOG_HEADER + b"1,2,3\n" * 400), strict=True))
    if data_format == "movielens":
        return {"ratings.csv" if one.startswith(b"userId") else "ratings.dat": one}
    return {day: one if day == "day_1" else (line() + "\n").encode() * 4 for day in DAYS}


@pytest.mark.parametrize("skip_bad", [False, True])
@pytest.mark.parametrize(
    ("data_format", "one"),
    [
        ("movielens", gzip.compress(b"", mtime=0)),
        ("movielens", b"\n\n"),
        ("movielens", ONLY_A_HEADER["movielens"]),
        ("kuairand", ONLY_A_HEADER["kuairand"]),
        ("kuairand", gzip.compress(ONLY_A_HEADER["kuairand"] + b"\n", mtime=0)),
        ("criteo", gzip.compress(b"", mtime=0)),
        ("criteo", b"\n"),
    ],
    ids=range(7),
)
def test_files_without_lines(data_format: str, one: bytes, skip_bad: bool, tmp_path: Path) -> None:
    """Fails if it is enough that one of several files has lines."""
    for name, content in files_of(data_format, one).items():
        path = tmp_path / (f"{name}.gz" if content[:2] == b"\x1f\x8b" else name)
        path.write_bytes(content)
        if content == one:
            empty = path
    with pytest.raises(ValueError, match=re.escape(f"{empty}: no good line in it; get the file again")):
        prepare(data_format, tmp_path, tmp_path / "dst", skip_bad=skip_bad)
    assert not (tmp_path / "dst").exists()


def cut(file: Path) -> None:
    os.truncate(file, len(RATINGS) // 2)


def replace(file: Path) -> None:
    """Replaces a file by a copy with the same size and time."""
    shutil.copy2(file, file.with_name("other"))
    file.with_name("other").replace(file)


def append(file: Path) -> None:
    file.write_bytes(RATINGS + b"1::2::3::4\n")


@pytest.mark.parametrize("skip_bad", [False, True])
@pytest.mark.parametrize("change", [cut, replace, append, Path.touch])
def test_input_that_changes_while_it_is_read(change: Callable[[Path], None], skip_bad: bool, tmp_path: Path) -> None:
    """Fails if `check_unchanged` does nothing."""
    file = tmp_path / "ratings.dat"
    file.write_bytes(RATINGS)
    os.utime(file, (1, 1))
    changes = [change]

    def progress(stage: str, done: float) -> None:
        if changes:
            changes.pop()(file)

    with pytest.raises(ValueError, match=re.escape(f"{file} has changed or gone since it was found")):
        prepare("movielens", tmp_path, tmp_path / "dst", skip_bad=skip_bad, progress=progress)
    assert not (tmp_path / "dst").exists()


def test_what_happens_to_input_after_it_was_read_makes_no_difference(tmp_path: Path) -> None:
    file = tmp_path / "ratings.dat"
    file.write_bytes(RATINGS)

    def progress(stage: str, done: float) -> None:
        if stage == "sorting":
            cut(file)

    manifest = prepare("movielens", tmp_path, tmp_path / "dst", progress=progress)
    assert (dict(manifest.inputs), manifest.counts["events"]) == ({"ratings.dat": len(RATINGS)}, 3000)
