"""KuaiRand and MovieLens: prepare makes the same histories as the plain preparation.

Fails if `events.rowid` is left out of the ORDER BY in histories.py, if `_filter` makes one pass only, or if
`least_per_item` is compared with `<=`.
"""

import gzip
import random
import shutil
from itertools import pairwise
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from nestpipe.data.files.manifest import Manifest, read_manifest
from nestpipe.datasets import engine, kuairand
from nestpipe.datasets.generate import generate
from nestpipe.datasets.prepare import prepare
from nestpipe.datasets.samples import histories as history_files
from tests.datasets.plain import Event, Histories, lines_of, plain_histories, read_histories


def kuairand_events(source: Path) -> list[Event]:
    files = sorted(source.rglob("log_standard*"))
    rows = [line.split(",") for line in lines_of(files) if not line.startswith("user_id")]
    return [Event(int(row[0]), int(row[1]), int(row[4])) for row in rows]


def movielens_events(file: Path) -> list[Event]:
    separator = "::" if ".dat" in file.name else ","
    rows = [line.split(separator) for line in lines_of([file]) if not line.startswith("userId")]
    return [Event(int(row[0]), int(row[1]), int(row[3])) for row in rows]


def prepared(data_format: str, source: Path, target: Path) -> tuple[Manifest, Histories]:
    manifest = prepare(data_format, source, target)
    assert read_manifest(target) == manifest
    return manifest, read_histories(target, manifest)


def write_log(folder: Path, events: list[Event], variant: str = "pure") -> Path:
    """Writes two logs that have the columns that are read, and one more."""
    folder.mkdir(parents=True)
    for number, name in enumerate(kuairand.standard_logs(variant)):
        half = events[number * len(events) // 2 : (number + 1) * len(events) // 2]
        lines = ["time_ms,tab,user_id,video_id", *(f"{e.time},x,{e.user},{e.item}" for e in half)]
        (folder / name).write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize("variant", ["27k", "1k", "pure"])
def test_generated_kuairand(variant: str, tmp_path: Path) -> None:
    generate("kuairand", tmp_path / "src", 20_000, seed=3, variant=variant)
    manifest, histories = prepared("kuairand", tmp_path / "src", tmp_path / "dst")
    events = kuairand_events(tmp_path / "src")
    expected = plain_histories(events, 1000, 350, 20)
    assert histories == expected
    num_kept = sum(map(len, expected.histories))
    assert len(events) == 20_000
    assert 2_000 < num_kept < 20_000
    assert manifest.source == f"kuairand-{variant}"
    assert manifest.counts == {
        "users": len(expected.users),
        "items": len(expected.items),
        "events": num_kept,
        "dropped_users": len({e.user for e in events}) - len(expected.users),
        "dropped_items": len({e.item for e in events}) - len(expected.items),
        "dropped_events": 20_000 - num_kept,
        "bad_lines": 0,
    }


@pytest.mark.parametrize("variant", ["1m", "20m"])
@pytest.mark.parametrize("packed", [False, True])
def test_generated_movielens(variant: str, packed: bool, tmp_path: Path) -> None:
    (file,) = generate("movielens", tmp_path / "src", 5_000, variant=variant)
    if packed:
        file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes(), mtime=0))
        file.unlink()
    manifest, histories = prepared("movielens", file.parent if packed else tmp_path / "src", tmp_path / "dst")
    (file,) = file.parent.glob("ratings*")
    assert histories == plain_histories(movielens_events(file), 1, 1, 1)
    assert (manifest.source, manifest.counts["events"]) == (f"movielens-{variant}", 5_000)


@pytest.mark.parametrize("seed", range(6))
def test_filter_goes_on_until_stable(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few users and items and small limits, leaving out one often makes another one rare; many events tie."""
    monkeypatch.setattr(kuairand, "LEAST_PER_VIDEO", 3)
    monkeypatch.setattr(kuairand, "LEAST_PER_USER", 3)
    draw = random.Random(seed)
    events = [Event(draw.randrange(60), draw.randrange(60) ** 2, 5000 + draw.randrange(900)) for _ in range(225)]
    _, histories = prepared("kuairand", write_log(tmp_path / "src", events), tmp_path / "dst")
    assert histories == plain_histories(events, 1000, 3, 3)
    assert 0 < sum(map(len, histories.histories)) < len(events)


def test_a_chain_is_left_out_link_by_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """User k has items k and k + 1, and item 0 is rare: all are left out, one after another, except the last two."""
    monkeypatch.setattr(kuairand, "LEAST_PER_VIDEO", 2)
    monkeypatch.setattr(kuairand, "LEAST_PER_USER", 2)
    chain = [Event(k, item, 1) for k in range(12) for item in (k, k + 1)]
    pair = [Event(user, item, 1) for user in (70, 80) for item in (90, 91)]
    _, histories = prepared("kuairand", write_log(tmp_path / "src", chain + pair), tmp_path / "dst")
    assert histories == Histories([90, 91], [70, 80], [[(0, 0), (1, 0)]] * 2)


def test_hand_written_ratings(tmp_path: Path) -> None:
    """Unsorted lines, ties, large numbers, CRLF, a blank line, and no end of the last line."""
    source = tmp_path / "sr[c]*'s"
    source.mkdir()
    lines = [
        "9::9223372036854775807::5::30",
        "2::10::1::7",
        "9::10::3::30",
        "",
        "9::3::3::4",
        "2::10::1::7",
        "2::3::5::0",
    ]
    (source / "ratings.dat").write_bytes("\r\n".join(lines).encode())
    manifest, histories = prepared("movielens", source, tmp_path / "dst")
    assert histories == Histories(
        items=[3, 10, 9223372036854775807],
        users=[2, 9],
        histories=[[(0, 0), (1, 7), (1, 7)], [(0, 4), (2, 30), (1, 30)]],
    )
    names = ["users-00000.parquet", "items.parquet", "user_ids.parquet"]
    assert [(f.name, f.split, f.num_rows) for f in manifest.files] == list(
        zip(names, ["all", "index", "index"], [2, 3, 2], strict=True)
    )
    assert manifest.schema == {
        "user": "int64",
        "item": "list<element: int64 not null>",
        "time_seconds": "list<element: int64 not null>",
    }
    assert manifest.command == ["nestpipe", "data", "prepare", "movielens"]
    assert manifest.inputs == {"ratings.dat": (source / "ratings.dat").stat().st_size}


def test_row_groups_are_bounded_and_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_files, "EVENTS_A_GROUP", 300)
    monkeypatch.setattr(history_files, "GROUPS_A_FILE", 2)
    (file,) = generate("movielens", tmp_path / "src", 3_000)
    manifest, histories = prepared("movielens", tmp_path / "src", tmp_path / "dst")
    assert histories == plain_histories(movielens_events(file), 1, 1, 1)
    groups = []
    for users_file in manifest.files[:-2]:
        parquet = pq.ParquetFile(tmp_path / "dst" / users_file.name)
        assert parquet.num_row_groups <= 2
        groups += [parquet.read_row_group(number)["item"].to_pylist() for number in range(parquet.num_row_groups)]
    lengths = [[len(history) for history in group] for group in groups]
    assert any(len(group) == 1 and group[0] > 300 for group in lengths)
    for group, after in pairwise(lengths):
        assert sum(group) <= 300 or len(group) == 1
        assert sum(group) + after[0] > 300


def test_bytes_depend_on_the_input_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not depend on threads, batches, or where the folders are."""
    generate("kuairand", tmp_path / "src", 30_000)
    first = prepare("kuairand", tmp_path / "src", tmp_path / "one")
    shutil.move(tmp_path / "src" / "KuaiRand-27K" / "data", tmp_path / "moved")
    for threads, rows in ((1, 2048), (4, 5000)):
        monkeypatch.setattr(engine, "num_threads", lambda threads=threads: threads)
        monkeypatch.setattr(engine, "ROWS_A_BATCH", rows)
        assert prepare("kuairand", tmp_path / "moved", tmp_path / "two", force=True).checksum() == first.checksum()


def test_nothing_left_is_an_error(tmp_path: Path) -> None:
    source = write_log(tmp_path / "src", [Event(1, 2, 3)] * 30)
    with pytest.raises(ValueError, match="no event is left: items need 350 events and users 20"):
        prepare("kuairand", source, tmp_path / "dst")
    assert not (tmp_path / "dst").exists()
