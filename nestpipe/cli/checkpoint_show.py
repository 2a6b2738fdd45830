"""Prints the results of `nestpipe checkpoint`."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from nestpipe.checkpoint.tools.diff import CheckpointDifference, Difference
from nestpipe.checkpoint.tools.inspect import CheckpointInfo, DenseInfo, FolderInfo
from nestpipe.checkpoint.tools.verify import Verification


def show_checkpoint(info: CheckpointInfo, console: Console) -> None:
    _line(console, f"{info.path}, format {info.format}, written {info.written}")
    for name, text in _facts(info).items():
        _line(console, f"  {name + ':':<16}{text}")
    rows = "rows" if not info.bases else "rows changed"
    table = _table("table", rows, "erased", "dim", "state", "dtype", "optimizer", "MB")
    for one in info.tables:
        num_rows = "?" if one.num_rows is None else f"{one.num_rows:,}"
        size = "?" if one.num_bytes is None else _mb(one.num_bytes)
        widths = f"{one.dim}", f"{one.state_width}", one.dtype
        table.add_row(_plain(one.name), num_rows, f"{one.num_erased:,}", *widths, one.optimizer or "frozen", size)
    console.print(table)
    if info.problem is not None:
        _line(console, f"damaged: {info.problem}")


def _facts(info: CheckpointInfo) -> dict[str, str]:
    skipped = f", and {info.num_skipped} batches without weight" if info.num_skipped else ""
    size = f"{_count(info.num_files, 'file')}, {_mb(info.num_bytes)} MB"
    if info.bases:
        content = f"changes since {info.bases[-1]}; all rows are in {info.bases[0]}"
        size += f"; {_mb(info.num_chain_bytes)} MB with {_count(len(info.bases), 'base')}"
    else:
        content = "complete"
    facts = {
        "step": f"{info.num_steps}{skipped}",
        "content": content,
        "size": size,
        "ranks": str(info.num_ranks),
        "micro-batches": "?" if info.num_micro_batches is None else str(info.num_micro_batches),
        "seed": str(info.seed),
    }
    facts |= {} if info.dense is None else _dense_facts(info.dense)
    return facts | {
        "data": _position(info),
        "recipe": "none" if info.recipe is None else f"saved, {len(info.recipe.splitlines())} lines",
    }


def _dense_facts(dense: DenseInfo) -> dict[str, str]:
    size = f"{dense.num_values:,} values, {_mb(dense.num_bytes)} MB"
    schedule = f", with {dense.lr_schedule}" if dense.lr_schedule else ""
    return {
        "dense part": f"{dense.num_entries} parameters and buffers, {size}",
        "optimizer": f"{dense.optimizer}{schedule}, {_mb(dense.optimizer_bytes)} MB" if dense.optimizer else "none",
        "extra": ", ".join(dense.extra) or "none",
    }


def _position(info: CheckpointInfo) -> str:
    if info.data is None:
        return "no position was saved"
    position = ", ".join(f"{name} {value}" for name, value in info.data.items())
    return position if info.data_is_equal else f"on rank 0: {position}; other ranks have other positions"


def show_folder(info: FolderInfo, console: Console) -> None:
    table = _table("checkpoint", "ranks", "rows", "MB", "written", "changes since", "")
    for one in info.checkpoints:
        mark = "newest good" if one.is_newest_good else "damaged" if one.problem is not None else ""
        counts = ("?" if count is None else f"{count:,}" for count in (one.num_ranks, one.num_rows))
        size = "?" if one.num_bytes is None else _mb(one.num_bytes)
        base = "?" if one.num_steps is None else one.base or "complete"
        table.add_row(_plain(one.name), *counts, size, one.written or "?", base, mark)
    _line(console, info.path)
    console.print(table)
    for one in info.checkpoints:
        if one.problem is not None:
            _line(console, f"damaged: {one.problem}")
    for name in info.unfinished:
        _line(console, f"{name}: {_UNFINISHED[name.split('.')[1].split('-')[0].rstrip('0123456789')]}")


_UNFINISHED = {
    "partial": "is being written, or was left by a run that was killed; the next save removes it",
    "removed": "was being removed; the next save removes the rest",
    "damaged": "was passed over when a run resumed; nothing needs it",
}


def show_verification(result: Verification, console: Console) -> None:
    for problem in result.problems:
        _line(console, str(problem))
    what = f"{_count(len(result.checkpoints), 'checkpoint')}, {_count(result.num_files, 'file')}"
    verdict = f"wrong: {_count(len(result.problems), 'file')}" if result.problems else "everything is right"
    _line(console, f"{what}, {_mb(result.num_bytes)} MB read; {verdict}")


def show_difference(result: CheckpointDifference, console: Console) -> None:
    _line(console, f"A: {result.first}")
    _line(console, f"B: {result.second}")
    for name in result.tables_removed:
        _line(console, f"only A has table {name}")
    for name in result.tables_added:
        _line(console, f"only B has table {name}")
    _show_values("setting", result.settings, console)
    _show_rows(result, console)
    _show_values("dense part", result.dense, console)
    _show_values("recipe", result.recipe, console)
    _line(console, "the content differs" if not result.is_equal else "the content is equal")


def _show_values(title: str, differences: list[Difference], console: Console) -> None:
    """Prints values that differ. Columns that would be empty are left out."""
    if not differences:
        return
    with_largest = any(one.largest is not None for one in differences)
    with_note = any(not one.is_content for one in differences)
    table = _table(title, "A", "B", *(["largest"] if with_largest else []), *([""] if with_note else []))
    for one in differences:
        cells = [_plain(text) for text in (one.what, one.first, one.second)]
        if with_largest:
            cells.append("" if one.largest is None else f"{one.largest:.3g}")
        if with_note:
            cells.append("" if one.is_content else "does not count")
        table.add_row(*cells)
    console.print(table)


def _show_rows(result: CheckpointDifference, console: Console) -> None:
    """Prints the tables whose rows differ, and how many others there are."""
    different = [table for table in result.tables if not table.is_equal]
    if different:
        table = _table("rows of table", "A", "B", "added", "removed", "changed", "state only", "largest")
        for one in different:
            counts = (*one.num_rows, one.num_added, one.num_removed, one.num_changed, one.num_state_changed)
            largest = "other columns" if one.largest is None else f"{one.largest:.3g}"
            table.add_row(_plain(one.name), *(f"{count:,}" for count in counts), largest)
        console.print(table)
    if num_equal := len(result.tables) - len(different):
        _line(console, f"equal rows: {_count(num_equal, 'table')}")


def show_export(checkpoint: Path, out: Path, settings: dict[str, Any], console: Console) -> None:
    for name, table in settings["tables"].items():
        _line(console, f"{name}: {table['rows']:,} rows of {table['dim']} in {_count(len(table['files']), 'file')}")
    if settings["left_out_of_dense"]:
        _line(console, f"left out of the dense part, no tensors: {', '.join(settings['left_out_of_dense'])}")
    num_bytes = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    _line(console, f"{checkpoint} was exported to {out}, {_mb(num_bytes)} MB")


def _table(*columns: str) -> Table:
    table = Table()
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    return table


def _plain(text: str) -> str:
    return text.replace("[", "\\[")


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.2f}"


def _line(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True, markup=False)
