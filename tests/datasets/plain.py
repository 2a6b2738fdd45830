"""The plain preparation, with lists and dictionaries, one line at a time: what the others must equal."""

import gzip
import math
import struct
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq

from nestpipe.data.files.manifest import Manifest


class Event(NamedTuple):
    user: int
    item: int
    time: int


class Histories(NamedTuple):
    items: list[int]
    """original ids by new number"""
    users: list[int]
    histories: list[list[tuple[int, int]]]
    """(item, seconds) by new numbers"""


def lines_of(files: Iterable[Path]) -> list[str]:
    texts = [gzip.decompress(f.read_bytes()) if f.suffix == ".gz" else f.read_bytes() for f in files]
    return [line for text in texts for line in text.decode().splitlines()]


def plain_histories(events: list[Event], ticks_a_second: int, least_per_item: int, least_per_user: int) -> Histories:
    while True:
        items, users = Counter(e.item for e in events), Counter(e.user for e in events)
        kept = [e for e in events if items[e.item] >= least_per_item and users[e.user] >= least_per_user]
        if len(kept) == len(events):
            break
        events = kept
    all_items, all_users = sorted({e.item for e in events}), sorted({e.user for e in events})
    number = {original: n for n, original in enumerate(all_items)}
    histories = []
    for user in all_users:
        own = sorted(
            (e for e in events if e.user == user), key=lambda e: e.time
        )  # stable: ties keep the order of the files
        histories.append([(number[e.item], e.time // ticks_a_second) for e in own])
    return Histories(all_items, all_users, histories)


def read_histories(folder: Path, manifest: Manifest) -> Histories:
    """Reads a prepared folder."""
    tables = [pq.read_table(folder / f.name) for f in manifest.files if f.split == "all"]
    rows = [row for table in tables for row in table.to_pylist()]
    assert [row["user"] for row in rows] == list(range(len(rows)))
    items, users = (pq.read_table(folder / name).to_pylist() for name in ("items.parquet", "user_ids.parquet"))
    assert [row["item"] for row in items] == list(range(len(items)))
    assert [row["user"] for row in users] == list(range(len(users)))
    histories = [list(zip(row["item"], row["time_seconds"], strict=True)) for row in rows]
    return Histories([row["original"] for row in items], [row["original"] for row in users], histories)


def plain_click(line: str) -> dict[str, int | float | None]:
    label, *rest = line.split("\t")
    row: dict[str, int | float | None] = {"label": int(label)}
    for number, text in enumerate(rest[:13]):
        value = math.log(1 + max(int(text or 0), 0))
        row[f"dense_{number}"] = struct.unpack("f", struct.pack("f", value))[0]
    for number, text in enumerate(rest[13:]):
        row[f"key_{number}"] = int(text, 16) if text else None
    return row


def read_clicks(folder: Path, manifest: Manifest, split: str) -> list[dict[str, int | float | None]]:
    files = [f for f in manifest.files if f.split == split]
    assert [f.name for f in files] == [f"{split}-{number:05}.parquet" for number in range(len(files))]
    return [row for f in files for row in pq.read_table(folder / f.name).to_pylist()]
