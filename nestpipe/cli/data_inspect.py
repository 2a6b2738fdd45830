"""What `nestpipe data inspect` prints."""

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from nestpipe.data.inspect import NUM_BATCHES, OVERHEAD_BYTES, STATE_COLUMNS, Inspection, estimate

HOST_BYTES_PER_SECOND = 5e9
"""what the store of one rank is taken to read or write"""


def show_inspection(found: Inspection, dim: int, optimizer: str, console: Console) -> None:
    text = f"{found.what}: {found.num_files:,} files, {found.num_bytes:,} bytes"
    _line(console, f"{text}, {found.num_rows:,} rows in {found.num_groups:,} row groups")
    for name, count in found.counts.items():
        _line(console, f"{name.replace('_', ' ')}: {count:,}")
    columns = Table("column", "type")
    for column, kind in found.columns.items():
        columns.add_row(column, kind.replace("[", "\\["))
    console.print(columns)
    if not found.keys:
        _line(console, "--keys COLUMN,COLUMN... says which columns are keys: their skew, overlap, memory")
        return
    _show_keys(found, console)
    _show_estimate(found, dim, optimizer, console)


def as_json(found: Inspection, dim: int, optimizer: str) -> dict[str, Any]:
    result = asdict(found)
    for column in result["keys"]:
        column["hottest"] = {str(share): value for share, value in column["hottest"].items()}
    whole = asdict(estimate(found.keys, dim, optimizer)) if found.keys else {}
    return result | {"dim": dim, "optimizer": optimizer, **whole}


def _show_keys(found: Inspection, console: Console) -> None:
    shares = [f"hottest {share:.1%}" for share in found.keys[0].hottest]
    table = Table("keys", "total", "distinct", *shares, f"a batch of {found.batch_size:,}", "overlap")
    for column in found.keys:
        about = "" if column.is_exact else "about "
        hottest = [f"{share:.1%}" for share in column.hottest.values()]
        of_batch = f"{column.num_per_batch:,.0f}", f"{column.overlap:.1%}"
        table.add_row(
            column.name, f"{column.num_occurrences:,}", f"{about}{column.num_distinct:,}", *hottest, *of_batch
        )
    console.print(table)
    _line(console, "total: occurrences; hottest: the share of them that these most frequent keys have")
    batches = f"the first batches of training, at most {NUM_BATCHES}"
    _line(console, f"a batch: its distinct keys; overlap: those of them that the batch before had too; of {batches}")


def _show_estimate(found: Inspection, dim: int, optimizer: str, console: Console) -> None:
    whole = estimate(found.keys, dim, optimizer)
    record_bytes = 4 * (dim + STATE_COLUMNS[optimizer](dim))
    _line(console, "")
    _line(console, f"memory of the rows with dim {dim} and {optimizer}: about {whole.memory_bytes / 1e9:,.3f} GB")
    _line(
        console, f"  = distinct keys x ({record_bytes} bytes of row and state + at most {OVERHEAD_BYTES} of the store)"
    )
    _line(console, f"retrieved a batch, one after another: {whole.retrieved_bytes / 1e6:,.2f} MB")
    _line(console, f"  = distinct keys of a batch x {record_bytes} bytes; as much is written back")
    stays = 1 - whole.pipelined_bytes / whole.retrieved_bytes if whole.retrieved_bytes else 0.0
    _line(console, f"pipelined: {whole.pipelined_bytes / 1e6:,.2f} MB, since {stays:.1%} stay for the next batch")
    hidden_ms = 2 * whole.pipelined_bytes / HOST_BYTES_PER_SECOND * 1e3
    rate = f"{HOST_BYTES_PER_SECOND / 1e9:.0f} GB/s of a rank's store"
    _line(console, f"all of it can be hidden if the dense part of a step takes longer than about {hidden_ms:,.1f} ms")
    _line(console, f"  = retrieved and written back, pipelined, at {rate} (assumed); negatives are not counted")


def _line(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True, markup=False)
