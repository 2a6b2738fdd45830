"""Prints the result of `nestpipe data inspect`."""

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from nestpipe.data.inspect import NUM_BATCHES, OVERHEAD_BYTES, Inspection, estimate
from nestpipe.registry import optimizers

HOST_BYTES_PER_SECOND = 5e9
"""Assumed speed of the store of one rank."""


def bytes_of_record(dim: int, optimizer: str) -> int:
    """Returns the size of a float32 row and its state. Raises RegistryError for an unknown row optimizer."""
    row_optimizer = optimizers.find(optimizer).value(lr=1.0)
    return 4 * (dim + int(row_optimizer.state_width(dim)))


def show_inspection(inspection: Inspection, dim: int, optimizer: str, console: Console) -> None:
    text = f"{inspection.what}: {inspection.num_files:,} files, {inspection.num_bytes:,} bytes"
    _line(console, f"{text}, {inspection.num_rows:,} rows in {inspection.num_groups:,} row groups")
    for name, count in inspection.counts.items():
        _line(console, f"{name.replace('_', ' ')}: {count:,}")
    columns = Table("column", "type")
    for column, kind in inspection.columns.items():
        columns.add_row(column, kind.replace("[", "\\["))
    console.print(columns)
    if not inspection.keys:
        _line(console, "--keys COLUMN,COLUMN... says which columns are keys, and shows their skew, overlap and memory")
        return
    _show_keys(inspection, console)
    _show_estimate(inspection, dim, optimizer, console)


def as_json(inspection: Inspection, dim: int, optimizer: str) -> dict[str, Any]:
    result = asdict(inspection)
    for column in result["keys"]:
        column["hottest"] = {str(share): value for share, value in column["hottest"].items()}
    estimated = asdict(estimate(inspection.keys, bytes_of_record(dim, optimizer))) if inspection.keys else {}
    return result | {"dim": dim, "optimizer": optimizer, **estimated}


def _show_keys(inspection: Inspection, console: Console) -> None:
    shares = [f"hottest {share:.1%}" for share in inspection.keys[0].hottest]
    table = Table("keys", "total", "distinct", *shares, f"a batch of {inspection.batch_size:,}", "overlap")
    for column in inspection.keys:
        about = "" if column.is_exact else "about "
        hottest = [f"{share:.1%}" for share in column.hottest.values()]
        batch_figures = f"{column.num_per_batch:,.0f}", f"{column.overlap:.1%}"
        table.add_row(
            column.name, f"{column.num_occurrences:,}", f"{about}{column.num_distinct:,}", *hottest, *batch_figures
        )
    console.print(table)
    _line(console, "total: occurrences; hottest: share of the occurrences that the most frequent keys have")
    batches = f"means of the first batches of training, at most {NUM_BATCHES}"
    _line(console, f"a batch: its distinct keys; overlap: share of them that the previous batch had, too; {batches}")


def _show_estimate(inspection: Inspection, dim: int, optimizer: str, console: Console) -> None:
    record_bytes = bytes_of_record(dim, optimizer)
    estimated = estimate(inspection.keys, record_bytes)
    _line(console, "")
    _line(console, f"memory of the rows with dim {dim} and {optimizer}: about {estimated.memory_bytes / 1e9:,.3f} GB")
    _line(
        console, f"  = distinct keys x ({record_bytes} bytes of row and state + at most {OVERHEAD_BYTES} of the store)"
    )
    _line(console, f"retrieved for each batch, without pipelining: {estimated.retrieved_bytes / 1e6:,.2f} MB")
    _line(console, f"  = distinct keys of a batch x {record_bytes} bytes; the same amount is written back")
    kept_share = 1 - estimated.pipelined_bytes / estimated.retrieved_bytes if estimated.retrieved_bytes else 0.0
    pipelined_mb = estimated.pipelined_bytes / 1e6
    _line(console, f"pipelined: {pipelined_mb:,.2f} MB, because {kept_share:.1%} of the rows stay for the next batch")
    hidden_ms = 2 * estimated.pipelined_bytes / HOST_BYTES_PER_SECOND * 1e3
    rate = f"{HOST_BYTES_PER_SECOND / 1e9:.0f} GB/s of a rank's store"
    _line(console, f"all traffic can be hidden if the dense part of a step takes longer than about {hidden_ms:,.1f} ms")
    _line(console, f"  = bytes retrieved and written back, pipelined, at {rate} (assumed), without negatives")


def _line(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True, markup=False)
