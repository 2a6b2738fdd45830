"""Bad input: the error names file and line; --skip-bad leaves out what can be left out, and counts it.

Fails if `_SAME` in text_files.py is `true` (1.5 would be taken as 2), or if `problem` and the engine disagree.
"""

import gzip
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from nestpipe.datasets.kuairand import standard_logs
from nestpipe.datasets.prepare import prepare
from tests.datasets.plain import read_clicks, read_histories
from tests.datasets.samples.test_clicks import line

BIG = "9" * 20
BAD_RATINGS = {
    "9::8::3": "has 3 fields, must have 4",
    "9::8::3::7::1": "has 5 fields, must have 4",
    "x::8::3::7": "userId is 'x', must be a whole number, 0 or more",
    "9::1.5::3::7": "movieId is '1.5'",
    "9::8::3::1e3": "timestamp is '1e3'",
    "9::8::3::-7": "timestamp is '-7'",
    "-0::8::3::7": "userId is '-0'",
    "+9::8::3::7": "userId is",
    "09::8::3::7": "userId is '09'",
    " 9::8::3::7": "userId is ' 9'",
    "9_0::8::3::7": "userId is '9_0'",
    "::8::3::7": "userId is ''",
    '"9"::8::3::7': "userId is '\"9\"'",
    f"9::{BIG}::3::7": f"movieId is '{BIG}'",
    "9::9223372036854775808::3::7": "movieId is '9223372036854775808'",
    "9::0x1F::3::7": "movieId is '0x1F'",
    "9::true::3::7": "movieId is 'true'",
    "9::NULL::3::7": "movieId is 'NULL'",
    "9::nan::3::7": "movieId is 'nan'",
    "9::\xff::3::7": "movieId is not UTF-8",
    f"9::8::{'3' * 2_000_001}::7": "is longer than 2,000,000 bytes",
}


@pytest.mark.parametrize("bad", BAD_RATINGS, ids=range(len(BAD_RATINGS)))
def test_bad_ratings(bad: str, tmp_path: Path) -> None:
    file = tmp_path / "ratings.dat"
    file.write_bytes("\n".join(["1::2::3::4", "", "5::6::7::8", bad, "1::6::5::4", ""]).encode("latin-1"))
    with pytest.raises(ValueError, match=re.escape(f"{file} line 4: {BAD_RATINGS[bad]}") + ".*--skip-bad"):
        prepare("movielens", tmp_path, tmp_path / "dst")
    assert not (tmp_path / "dst").exists()
    manifest = prepare("movielens", tmp_path, tmp_path / "dst", skip_bad=True)
    assert (manifest.counts["bad_lines"], manifest.counts["events"]) == (1, 3)
    assert read_histories(tmp_path / "dst", manifest).histories == [[(0, 4), (1, 4)], [(1, 8)]]
    assert manifest.command[-1] == "--skip-bad"


def test_all_kinds_of_bad_lines_are_counted_together(tmp_path: Path) -> None:
    bad = [text for text in BAD_RATINGS if len(text) < 1000]
    lines = [text for pair in zip(bad, ["1::2::3::4"] * len(bad), strict=True) for text in pair]
    (tmp_path / "ratings.dat").write_bytes("\n".join(lines).encode("latin-1"))
    manifest = prepare("movielens", tmp_path, tmp_path / "dst", skip_bad=True)
    assert (manifest.counts["bad_lines"], manifest.counts["events"]) == (len(bad), len(bad))


BAD_CLICKS = {
    line(2): "label is '2', must be 0 or 1",
    line(0, dense=("1.0", *("",) * 12)): "dense_0 is '1.0', must be an integer, or nothing",
    line(0, dense=("", "x", *("",) * 11)): "dense_1 is 'x'",
    line(0, dense=(BIG, *("",) * 12)): "dense_0 is",
    line(0, keys=("12345", *("",) * 25)): "key_0 is '12345', must be 8 hexadecimal digits, or nothing",
    line(0, keys=("", "1234567g", *("",) * 24)): "key_1 is '1234567g'",
    line(0, keys=("1234_678", *("",) * 25)): "key_0 is '1234_678'",
    line(0, keys=("123456789", *("",) * 25)): "key_0 is '123456789'",
    line()[1:]: "label is ''",
    line()[:-1]: "has 39 fields, must have 40",
    line() + "\t\t1": "has 42 fields, must have 40",
    line() + "\t1": "has 41 fields, must have 40",
}


@pytest.mark.parametrize("bad", BAD_CLICKS, ids=range(len(BAD_CLICKS)))
def test_bad_clicks(bad: str, tmp_path: Path) -> None:
    file = tmp_path / "train.txt"
    file.write_text("\n".join([line()] * 20 + [bad] + [line(1)] * 10))
    with pytest.raises(ValueError, match=re.escape(f"{file} line 21: {BAD_CLICKS[bad]}")):
        prepare("criteo", tmp_path, tmp_path / "dst")
    assert not (tmp_path / "dst").exists()
    manifest = prepare("criteo", tmp_path, tmp_path / "dst", skip_bad=True)
    assert (manifest.counts["bad_lines"], manifest.counts["rows"]) == (1, 30)
    labels = [
        row["label"]
        for split in ("train", "validation", "test")
        for row in read_clicks(tmp_path / "dst", manifest, split)
    ]
    assert labels == [0] * 20 + [1] * 10


def write_logs(folder: Path, second: bytes, name: str = "") -> Path:
    """Writes two logs, the second one with these bytes."""
    first_name, second_name = standard_logs("pure")
    (folder / first_name).write_text("user_id,video_id,time_ms\n" + "1,2,3\n" * 400)
    path = folder / (name or second_name)
    path.write_bytes(second)
    return path


PACKED = gzip.compress(b"user_id,video_id,time_ms\n" + b"".join(b"%d,2,3\n" % (n * n) for n in range(9000)), mtime=0)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "line 1: the file is empty"),
        (b"\n", "line 1: must be a header with one column 'user_id', but the line is ''"),
        (b"user_id,video_id\n1,2\n", "line 1: must be a header with one column 'time_ms'"),
        (b"1,2,3\n", "line 1: must be a header with one column 'user_id', but the line is '1,2,3'"),
        (b"user_id,time_ms,video_id\n1,2,3\n", "line 1: has other columns than"),
        (b"user_id,video_id,time_ms,user_id\n1,2,3,4\n", "line 1: must be a header with one column 'user_id'"),
        (b"user_id,video_id,time_ms\n1,2,3\n4,5,\n", "line 3: time_ms is '', must be a whole number"),
        (PACKED[: len(PACKED) // 2], "the gzip file ends in the middle, it is incomplete; get the file again"),
        (PACKED[:-4], "line 9002: the gzip file ends in the middle"),
        (PACKED[:12], "line 1: "),
        (PACKED[:9000] + b"\xff" * 99 + PACKED[9099:], "the file is damaged: "),
    ],
)
def test_bad_logs(content: bytes, text: str, tmp_path: Path) -> None:
    file = write_logs(tmp_path, content)
    with pytest.raises(ValueError, match=re.escape(f"{file} line ") + ".*" + re.escape(text.removeprefix("line "))):
        prepare("kuairand", tmp_path, tmp_path / "dst")
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize("cut", [4, 500])
def test_a_truncated_gzip_cannot_be_skipped(cut: int, tmp_path: Path) -> None:
    """A bad line before the end must not hide that the file is truncated."""
    lines = b"1::2::3::x\n" + b"1::2::3::4\n" * 90_000
    (tmp_path / "ratings.dat.gz").write_bytes(gzip.compress(lines, mtime=0)[:-cut])
    with pytest.raises(ValueError, match=r"ratings\.dat\.gz line \d+: the gzip file ends in the middle"):
        prepare("movielens", tmp_path, tmp_path / "dst", skip_bad=True)


@pytest.mark.parametrize("skip_bad", [False, True])
@pytest.mark.parametrize("num_lines", [50, 20_000])
def test_truncated_clicks(num_lines: int, skip_bad: bool, tmp_path: Path) -> None:
    lines = "".join(line(keys=(f"{number:08x}", *("",) * 25)) + "\n" for number in range(num_lines))
    (tmp_path / "train.txt.gz").write_bytes(gzip.compress(lines.encode(), mtime=0)[:-20])
    with pytest.raises(ValueError, match=r"train\.txt\.gz line \d+: the gzip file ends in the middle"):
        prepare("criteo", tmp_path, tmp_path / "dst", skip_bad=skip_bad)
    assert not (tmp_path / "dst").exists()


def only(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).write_text("x")


@pytest.mark.parametrize(
    ("data_format", "make", "text"),
    [
        ("kuairand", lambda f: only(f), "has none of the published files, plain or gzip. Looked for: log_standard"),
        ("kuairand", lambda f: only(f, standard_logs("1k")[0]), f"lacks {standard_logs('1k')[1]}, which 1k has too"),
        ("kuairand", lambda f: only(f, *standard_logs("1k"), *standard_logs("pure")), "has files of 1k and of pure"),
        ("movielens", lambda f: only(f, "ratings.csv", "ratings.csv.gz"), "has both ratings.csv and ratings.csv.gz"),
        ("movielens", lambda f: only(f, "ratings.dat", "ratings.csv"), "has files of 1m and of 20m"),
        ("criteo", lambda f: only(f, "day_0", "day_2"), "lacks day_1, day_3, day_4, day_5, ... (22 files)"),
        ("criteo", lambda f: f.rmdir(), "is not a folder"),
        ("news", lambda f: only(f), "there is no format 'news'"),
    ],
)
def test_missing_files(data_format: str, make: Callable[[Path], None], text: str, tmp_path: Path) -> None:
    source = tmp_path / "src"
    source.mkdir()
    make(source)
    with pytest.raises(ValueError, match=re.escape(text)):
        prepare(data_format, source, tmp_path / "dst")
    assert not (tmp_path / "dst").exists()


def test_no_good_line(tmp_path: Path) -> None:
    (tmp_path / "ratings.dat").write_text("a::b::c::d\n")
    with pytest.raises(ValueError, match=r"ratings\.dat: no good line in it"):
        prepare("movielens", tmp_path, tmp_path / "dst", skip_bad=True)


def test_delimiters_at_the_end_are_overlooked(tmp_path: Path) -> None:
    """The engine ignores them, so the search for the bad line must ignore them, too."""
    (tmp_path / "train.txt").write_text("\n".join([*(line() + "\t" * (n % 3) for n in range(20)), "x"]))
    with pytest.raises(ValueError, match="line 21: has 1 fields, must have 40"):
        prepare("criteo", tmp_path, tmp_path / "dst")
    assert prepare("criteo", tmp_path, tmp_path / "dst", skip_bad=True).counts["rows"] == 20


def test_bytes_of_columns_that_are_not_read(tmp_path: Path) -> None:
    """They may hold any bytes; the error names another line, which is bad."""
    good = b"1::2::\xe9::4\n1::3::\xff\xfe::5\n"
    (tmp_path / "ratings.dat").write_bytes(good)
    manifest = prepare("movielens", tmp_path, tmp_path / "dst")
    assert (manifest.counts["events"], manifest.counts["bad_lines"]) == (2, 0)
    (tmp_path / "ratings.dat").write_bytes(good * 6 + b"-1::9::3::5\n")
    with pytest.raises(ValueError, match=r"ratings\.dat line 13: userId is '-1'"):
        prepare("movielens", tmp_path, tmp_path / "other")


LINES = b"1::2::3::4\n" * 9
LONG = b"1::2::" + b"3" * 4_500_000 + b"::4\n"


@pytest.mark.parametrize("skip_bad", [False, True])
@pytest.mark.parametrize(
    ("content", "text"),
    [
        (LINES + LINES.replace(b"\n", b"\r\n"), r"line 10: ends with \r\n, the lines before it with \n"),
        (LINES.replace(b"\n", b"\r\n") + LINES, r"line 10: ends with \n, the lines before it with \r\n"),
        (LINES + b"\r\n" + LINES, r"line 10: ends with \r\n, the lines before it with \n"),
        (LINES + LINES.replace(b"\n", b"\r", 2), r"line 10: has a carriage return (\r) without a line feed"),
        (LINES[:-1] + b"\r", r"line 9: has a carriage return (\r) without a line feed"),
    ],
    ids=range(5),
)
def test_mixed_line_ends(content: bytes, text: str, skip_bad: bool, tmp_path: Path) -> None:
    (tmp_path / "ratings.dat").write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / 'ratings.dat'} {text}") + ".*; .*`tr "):
        prepare("movielens", tmp_path, tmp_path / "dst", skip_bad=skip_bad)
    assert not (tmp_path / "dst").exists()
    corrected = content.replace(b"\r", b"\n")  # as the error advises
    (tmp_path / "ratings.dat").write_bytes(corrected)
    manifest = prepare("movielens", tmp_path, tmp_path / "dst", skip_bad=skip_bad)
    assert (manifest.counts["events"], manifest.counts["bad_lines"]) == (content.count(b"::") // 3, 0)


def test_a_carriage_return_within_a_field(tmp_path: Path) -> None:
    """For the engine the line ends there, so two lines are bad."""
    (tmp_path / "ratings.dat").write_bytes(LINES + b"1::2::\r3::4\n" + LINES)
    with pytest.raises(ValueError, match="line 10: has a carriage return"):
        prepare("movielens", tmp_path, tmp_path / "dst")
    manifest = prepare("movielens", tmp_path, tmp_path / "dst", skip_bad=True)
    assert (manifest.counts["events"], manifest.counts["bad_lines"]) == (18, 2)


def test_mixed_line_ends_after_a_line_that_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "ratings.dat").write_bytes(b"1::2::3::4\n" + LONG + LINES + b"1::2::3::4\r\n")
    with pytest.raises(ValueError, match=r"ratings\.dat line 12: ends with"):
        prepare("movielens", tmp_path, tmp_path / "dst", skip_bad=True)


@pytest.mark.parametrize("end", [b"\r\n", b"\r"])
def test_other_line_ends(end: bytes, tmp_path: Path) -> None:
    (tmp_path / "ratings.dat").write_bytes(LINES.replace(b"\n", end))
    assert prepare("movielens", tmp_path, tmp_path / "dst").counts["events"] == 9


@pytest.mark.parametrize("skip_bad", [False, True])
@pytest.mark.parametrize("after", [b"\0" * 100, b"other bytes"])
def test_bytes_after_gzip_data(after: bytes, skip_bad: bool, tmp_path: Path) -> None:
    (tmp_path / "ratings.dat.gz").write_bytes(gzip.compress(LINES, mtime=0) + after)
    with pytest.raises(
        ValueError, match=r"ratings\.dat\.gz.*: .*(no gzip data follow|Not a gzipped file).*; get the file"
    ):
        prepare("movielens", tmp_path, tmp_path / "dst", skip_bad=skip_bad)
