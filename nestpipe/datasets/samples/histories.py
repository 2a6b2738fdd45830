"""Histories from events (user, item, time): filtered until stable, sorted, re-indexed, a row for each user."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nestpipe.datasets.engine import Engine, EngineError, Report
from nestpipe.datasets.samples.parquet_out import BatchStream, parquet_file, write_group
from nestpipe.datasets.work import Prepared, Stages, Work, WrittenFile, no_good_line, scan_report

TIME_SHARES = {"reading": 0.5, "filtering": 0.15, "sorting": 0.15, "writing": 0.2}
_INTEGERS = pa.list_(pa.field("element", pa.int64(), nullable=False))
SCHEMA = pa.schema(
    [
        pa.field("user", pa.int64(), nullable=False),
        pa.field("item", _INTEGERS, nullable=False),
        pa.field("time_seconds", _INTEGERS, nullable=False),
    ]
)
EVENTS_A_GROUP = 1 << 19
"""8 MB of items and times; a user with more events has a row group alone."""
GROUPS_A_FILE = 64
ROWS_OF_INDEX = 1 << 19
"""Rows of a row group of items.parquet or user_ids.parquet."""

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Events:
    """The columns that hold the events of a data set, and the filter that is usual for it."""

    user: str
    item: str
    time: str
    ticks_a_second: int
    least_per_item: int
    """Events that an item needs; rare items and rare users are left out repeatedly, until none is left."""
    least_per_user: int


def prepare_histories(work: Work, events: Events) -> Prepared:
    stages = Stages(work.progress, TIME_SHARES)
    num_bad = _read(work, events, stages.begin("reading"))
    before = _count(work.engine)
    _filter(work.engine, events, stages.begin("filtering"))
    lengths, index_files = _index(work)
    files = [*_sort_and_write(work, events, lengths, stages), *index_files]
    kept = {"users": len(lengths), "items": index_files[0].num_rows, "events": int(lengths.sum())}
    dropped = {f"dropped_{name}": before[name] - kept[name] for name in kept}
    return Prepared("histories", SCHEMA, kept | dropped | {"bad_lines": num_bad}, files)


def _read(work: Work, events: Events, report: Report) -> int:
    """Makes the table of events, in the order of the files; returns the number of lines that were left out."""
    work.engine.run('CREATE TABLE events ("user" BIGINT, item BIGINT, "time" BIGINT)')
    # A bad line is kept without its item, so that one pass both reads and finds it.
    selected = f'"{events.user}", CASE WHEN good THEN "{events.item}" END, "{events.time}"'
    num_bad = num_read = 0
    for number, file in enumerate(work.source.files):
        lines = work.source.text_format.lines(file, skip_bad=work.skip_bad)
        with work.reading(file):
            try:
                report_file = scan_report(work.source, number, report)
                work.engine.run(f"INSERT INTO events SELECT {selected} FROM ({lines})", report_file)
            except EngineError as error:
                raise work.failed_scan(file, error) from None
            num_bad_in_file = _count_bad(work, num_read, file)
        num_before, num_read = num_read, work.engine.number("SELECT count(*) FROM events")
        if num_read - num_before == num_bad_in_file:
            raise no_good_line(file)
        num_bad += num_bad_in_file
    if num_bad:
        work.engine.run("DELETE FROM events WHERE item IS NULL")
    return num_bad + work.num_rejected()


def _count_bad(work: Work, first: int, file: Path) -> int:
    """Returns the number of bad lines among the events from row `first` on; raises if bad lines are not skipped."""
    num_bad = work.engine.number(f"SELECT count(*) FROM events WHERE rowid >= {first} AND item IS NULL")
    if num_bad and not work.skip_bad:
        raise work.bad_line(file)
    return num_bad


def _count(engine: Engine) -> dict[str, int]:
    """Makes tables of all users and all items with their numbers of events; returns the sizes of all three tables."""
    for table, column in (("items", "item"), ("users", '"user"')):
        engine.run(f"CREATE TABLE {table} AS SELECT {column} AS original, count(*) AS n FROM events GROUP BY {column}")
    return {name: engine.number(f"SELECT count(*) FROM {name}") for name in ("users", "items", "events")}


def _filter(engine: Engine, events: Events, report: Report) -> None:
    """Leaves out rare items and users until none is left.

    The order makes no difference: the result is the largest set of events in which no user and no item is rare.
    """
    has_rare, left = True, 1.0
    while has_rare:
        has_rare = _leave_out(engine, "items", events.least_per_item, "users", '"user"')
        has_rare |= _leave_out(engine, "users", events.least_per_user, "items", "item")
        left /= 2
        report(1 - left)
    if engine.number("SELECT count(*) FROM users") == 0:
        raise ValueError(
            f"no event is left: items need {events.least_per_item} events and users {events.least_per_user}; "
            "prepare more of the data"
        )


def _leave_out(engine: Engine, table: str, least: int, other: str, column: str) -> bool:
    """Removes the rare rows of one table and counts the other one again; returns False if there were none."""
    if engine.number(f"SELECT count(*) FROM {table} WHERE n < {least}") == 0:
        return False
    engine.run(f"CREATE OR REPLACE TABLE {table} AS SELECT original, n FROM {table} WHERE n >= {least}")
    engine.run(
        f"CREATE OR REPLACE TABLE {other} AS SELECT {column} AS original, count(*) AS n FROM events "
        'SEMI JOIN items ON item = items.original SEMI JOIN users ON "user" = users.original '
        f"GROUP BY {column}"
    )
    return True


def _index(work: Work) -> tuple[Numbers, list[WrittenFile]]:
    """Numbers users and items in the order of their originals; returns the lengths of histories and the index files."""
    users = pa.Table.from_batches(work.engine.batches("SELECT original, n FROM users ORDER BY original"))
    work.engine.run(
        "CREATE TABLE item_index AS SELECT original, row_number() OVER (ORDER BY original) - 1 AS item FROM items"
    )
    items = pa.Table.from_batches(work.engine.batches("SELECT original FROM item_index ORDER BY original"))
    files = [
        write_index(work.folder, "items.parquet", "item", items["original"]),
        write_index(work.folder, "user_ids.parquet", "user", users["original"]),
    ]
    return users["n"].to_numpy().astype(np.int64), files


def _sort_and_write(work: Work, events: Events, lengths: Numbers, stages: Stages) -> list[WrittenFile]:
    """Writes the histories by user: the order of the originals is that of the numbers. Ties keep the files' order."""
    stages.begin("sorting")
    batches = work.engine.batches(
        f'SELECT item_index.item, "time" // {events.ticks_a_second} AS time_seconds '
        "FROM events JOIN item_index ON events.item = item_index.original "
        'SEMI JOIN users ON "user" = users.original ORDER BY "user", "time", events.rowid'
    )
    first = next(batches)  # arrives when everything is sorted
    return write_histories(work.folder, lengths, chain([first], batches), stages.begin("writing"))


@dataclass(frozen=True)
class RowGroup:
    """Consecutive users, and the number of their events."""

    first_user: int
    end_user: int
    num_events: int


def plan_groups(lengths: Numbers) -> Iterator[RowGroup]:
    """Yields row groups of as many users as fit. They depend on the lengths alone, and so do the bytes of the files."""
    ends = np.cumsum(lengths)
    first = 0
    while first < len(lengths):
        before = int(ends[first - 1]) if first else 0
        end = max(first + 1, int(np.searchsorted(ends, before + EVENTS_A_GROUP, side="right")))
        yield RowGroup(first, end, int(ends[end - 1]) - before)
        first = end


def write_histories(
    folder: Path, lengths: Numbers, events: Iterator[pa.RecordBatch], report: Report
) -> list[WrittenFile]:
    """Writes events, given as items and seconds by user and time, to rows of these lengths."""
    groups, stream = list(plan_groups(lengths)), BatchStream(events)
    num_done, num_events = 0, max(1, int(lengths.sum()))
    files = []
    for number, first in enumerate(range(0, len(groups), GROUPS_A_FILE)):
        name, file_groups = f"users-{number:05}.parquet", groups[first : first + GROUPS_A_FILE]
        with parquet_file(folder / name, SCHEMA) as file:
            for group in file_groups:
                group_events = pa.Table.from_batches(stream.take(group.num_events)).combine_chunks()
                write_group(file, _histories(group, lengths, group_events))
                num_done += group.num_events
                report(num_done / num_events)
        files.append(WrittenFile(name, "all", file_groups[-1].end_user - file_groups[0].first_user))
    return files


def write_index(folder: Path, name: str, column: str, originals: pa.ChunkedArray) -> WrittenFile:
    """Writes the original number of each user or item. Its row is its new number."""
    schema = pa.schema([pa.field(field, pa.int64(), nullable=False) for field in (column, "original")])
    table = pa.Table.from_arrays([pa.array(np.arange(len(originals))), originals.combine_chunks()], schema=schema)
    with parquet_file(folder / name, schema) as file:
        for first in range(0, len(table), ROWS_OF_INDEX):
            write_group(file, table.slice(first, ROWS_OF_INDEX))
    return WrittenFile(name, "index", len(originals))


def _histories(group: RowGroup, lengths: Numbers, events: pa.Table) -> pa.Table:
    offsets = np.zeros(group.end_user - group.first_user + 1, dtype=np.int32)
    np.cumsum(lengths[group.first_user : group.end_user], out=offsets[1:])
    lists = [pa.ListArray.from_arrays(pa.array(offsets), column.chunk(0), type=_INTEGERS) for column in events.columns]
    return pa.Table.from_arrays([pa.array(np.arange(group.first_user, group.end_user)), *lists], schema=SCHEMA)
