"""From events (user, item, time) to histories: filtered until stable, sorted, re-indexed."""

from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa

from nestpipe.datasets.engine import Engine, EngineError, Report
from nestpipe.datasets.history_files import SCHEMA, Numbers, write_histories, write_index
from nestpipe.datasets.work import Made, Prepared, Stages, Work, no_good_line, scan_report

SHARES = {"reading": 0.5, "filtering": 0.15, "sorting": 0.15, "writing": 0.2}


@dataclass(frozen=True)
class Events:
    """Which columns they are, and which of them are kept."""

    user: str
    item: str
    time: str
    ticks_a_second: int
    least_per_item: int
    """items with fewer events are left out, and users likewise, over and over until nobody is"""
    least_per_user: int


def prepare_histories(work: Work, events: Events) -> Prepared:
    stages = Stages(work.progress, SHARES)
    num_bad = _read(work, events, stages.begin("reading"))
    before = _count(work.engine)
    _filter(work.engine, events, stages.begin("filtering"))
    lengths, index_files = _index(work)
    files = [*_sort_and_write(work, events, lengths, stages), *index_files]
    kept = {"users": len(lengths), "items": index_files[0].num_rows, "events": int(lengths.sum())}
    dropped = {f"dropped_{name}": before[name] - kept[name] for name in kept}
    return Prepared("histories", SCHEMA, kept | dropped | {"bad_lines": num_bad}, files)


def _read(work: Work, events: Events, report: Report) -> int:
    """Makes the table of events, in the order of the files; gives the number of lines that were left out."""
    work.engine.run('CREATE TABLE events ("user" BIGINT, item BIGINT, "time" BIGINT)')
    # A bad line is kept without its item, so that one pass both reads and finds it.
    selected = f'"{events.user}", CASE WHEN good THEN "{events.item}" END, "{events.time}"'
    num_bad = num_read = 0
    for number, file in enumerate(work.source.files):
        lines = work.source.text_format.lines(file, skip_bad=work.skip_bad)
        with work.reading(file):
            try:
                of_file = scan_report(work.source, number, report)
                work.engine.run(f"INSERT INTO events SELECT {selected} FROM ({lines})", of_file)
            except EngineError as error:
                raise work.failed_scan(file, error) from None
            num_bad_here = _check_new(work, num_read, file)
        num_before, num_read = num_read, work.engine.number("SELECT count(*) FROM events")
        if num_read - num_before == num_bad_here:
            raise no_good_line(file)
        num_bad += num_bad_here
    if num_bad:
        work.engine.run("DELETE FROM events WHERE item IS NULL")
    return num_bad + work.num_rejected()


def _check_new(work: Work, first: int, file: Path) -> int:
    """The number of bad lines among the events from row `first` on; an error where there may be none."""
    num_bad = work.engine.number(f"SELECT count(*) FROM events WHERE rowid >= {first} AND item IS NULL")
    if num_bad and not work.skip_bad:
        raise work.bad_line(file)
    return num_bad


def _count(engine: Engine) -> dict[str, int]:
    """Makes the tables of all users and items with their numbers of events; how many there are."""
    for table, column in (("items", "item"), ("users", '"user"')):
        engine.run(f"CREATE TABLE {table} AS SELECT {column} AS original, count(*) AS n FROM events GROUP BY {column}")
    return {name: engine.number(f"SELECT count(*) FROM {name}") for name in ("users", "items", "events")}


def _filter(engine: Engine, events: Events, report: Report) -> None:
    """Leaves out the rare until nobody is. The order makes no difference: what remains is the largest set of events in
    which no user and no item is rare."""
    is_rare, left = True, 1.0
    while is_rare:
        is_rare = _leave_out(engine, "items", events.least_per_item, "users", '"user"')
        is_rare |= _leave_out(engine, "users", events.least_per_user, "items", "item")
        left /= 2
        report(1 - left)
    if engine.number("SELECT count(*) FROM users") == 0:
        raise ValueError(
            f"no event is left: items need {events.least_per_item} events and users {events.least_per_user}; "
            "with so little data nobody has them"
        )


def _leave_out(engine: Engine, table: str, least: int, other: str, column: str) -> bool:
    """The rare ones of a table; then the other one is counted again. False if there are none."""
    if engine.number(f"SELECT count(*) FROM {table} WHERE n < {least}") == 0:
        return False
    engine.run(f"CREATE OR REPLACE TABLE {table} AS SELECT original, n FROM {table} WHERE n >= {least}")
    engine.run(
        f"CREATE OR REPLACE TABLE {other} AS SELECT {column} AS original, count(*) AS n FROM events "
        'SEMI JOIN items ON item = items.original SEMI JOIN users ON "user" = users.original '
        f"GROUP BY {column}"
    )
    return True


def _index(work: Work) -> tuple[Numbers, list[Made]]:
    """Numbers users and items by their sorted originals; the lengths of the histories, and the files."""
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


def _sort_and_write(work: Work, events: Events, lengths: Numbers, stages: Stages) -> list[Made]:
    """Users stand in the order of their originals, which is that of their numbers; rowid is the order in the files."""
    stages.begin("sorting")
    batches = work.engine.batches(
        f'SELECT item_index.item, "time" // {events.ticks_a_second} AS time_seconds '
        "FROM events JOIN item_index ON events.item = item_index.original "
        'SEMI JOIN users ON "user" = users.original ORDER BY "user", "time", events.rowid'
    )
    first = next(batches)  # comes when all is sorted
    return write_histories(work.folder, lengths, chain([first], batches), stages.begin("writing"))
