"""Histories in Parquet: a row for each user, in row groups whose size is bounded."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nestpipe.datasets.engine import Report
from nestpipe.datasets.parquet_out import BatchStream, parquet_file, write_group
from nestpipe.datasets.work import Made

_INTEGERS = pa.list_(pa.field("element", pa.int64(), nullable=False))
SCHEMA = pa.schema(
    [
        pa.field("user", pa.int64(), nullable=False),
        pa.field("item", _INTEGERS, nullable=False),
        pa.field("time_seconds", _INTEGERS, nullable=False),
    ]
)
EVENTS_A_GROUP = 1 << 19
"""8 MB of items and times; a user with more has a row group alone"""
GROUPS_A_FILE = 64
ROWS_OF_INDEX = 1 << 19

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Group:
    """Users that follow each other, and so many events."""

    first_user: int
    end_user: int
    num_events: int


def plan_groups(lengths: Numbers) -> Iterator[Group]:
    """As many users as fit, group after group. It follows from the lengths alone, so the files do too."""
    ends = np.cumsum(lengths)
    first = 0
    while first < len(lengths):
        before = int(ends[first - 1]) if first else 0
        end = max(first + 1, int(np.searchsorted(ends, before + EVENTS_A_GROUP, side="right")))
        yield Group(first, end, int(ends[end - 1]) - before)
        first = end


def write_histories(folder: Path, lengths: Numbers, events: Iterator[pa.RecordBatch], report: Report) -> list[Made]:
    """`events`: items and seconds in the order of users and times; `lengths`: how many are whose."""
    groups, stream = list(plan_groups(lengths)), BatchStream(events)
    num_done, num_events = 0, max(1, int(lengths.sum()))
    files = []
    for number, first in enumerate(range(0, len(groups), GROUPS_A_FILE)):
        name, of_file = f"users-{number:05}.parquet", groups[first : first + GROUPS_A_FILE]
        with parquet_file(folder / name, SCHEMA) as file:
            for group in of_file:
                taken = pa.Table.from_batches(stream.take(group.num_events)).combine_chunks()
                write_group(file, _histories(group, lengths, taken))
                num_done += group.num_events
                report(num_done / num_events)
        files.append(Made(name, "all", of_file[-1].end_user - of_file[0].first_user))
    return files


def write_index(folder: Path, name: str, column: str, originals: pa.ChunkedArray) -> Made:
    """The original number of each user or item; its place is its new number."""
    schema = pa.schema([pa.field(field, pa.int64(), nullable=False) for field in (column, "original")])
    table = pa.Table.from_arrays([pa.array(np.arange(len(originals))), originals.combine_chunks()], schema=schema)
    with parquet_file(folder / name, schema) as file:
        for first in range(0, len(table), ROWS_OF_INDEX):
            write_group(file, table.slice(first, ROWS_OF_INDEX))
    return Made(name, "index", len(originals))


def _histories(group: Group, lengths: Numbers, events: pa.Table) -> pa.Table:
    offsets = np.zeros(group.end_user - group.first_user + 1, dtype=np.int32)
    np.cumsum(lengths[group.first_user : group.end_user], out=offsets[1:])
    lists = [pa.ListArray.from_arrays(pa.array(offsets), column.chunk(0), type=_INTEGERS) for column in events.columns]
    return pa.Table.from_arrays([pa.array(np.arange(group.first_user, group.end_user)), *lists], schema=SCHEMA)
