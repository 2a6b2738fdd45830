"""The type of each input and the width of its lists: of all files together, known once they are opened."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from nestpipe.data.files.row_files import BadDataError, RowFile, UnreadableError, read_group
from nestpipe.data.files.schema import Schema, element, is_list

if TYPE_CHECKING:
    import pyarrow as pa

Opened = Sequence[tuple[RowFile, "pa.Schema"]]


@dataclass(frozen=True)
class Forms:
    dtypes: Mapping[str, type[Any]] = field(default_factory=dict)
    """of inputs: int64 if its columns are integers in all files, else float32"""
    widths: Mapping[str, int] = field(default_factory=dict)
    """of columns of lists: how long each list must be"""

    def width(self, columns: Sequence[str]) -> int:
        """Of columns side by side."""
        return sum(self.widths.get(column, 1) for column in columns)


def find_forms(opened: Opened, schema: Schema, skip_bad: bool = False) -> Forms:
    """Reads nothing but types, unless lists of an input may be of any length: then those of one row group."""
    columns = dict.fromkeys(column for of_input in schema.input_columns.values() for column in of_input)
    lists = [column for column in columns if _is_list_everywhere(opened, column)]
    return Forms(
        {name: _dtype(opened, of_input) for name, of_input in schema.input_columns.items()},
        {column: _width(opened, column, skip_bad) for column in lists},
    )


def _dtype(opened: Opened, columns: Sequence[str]) -> type[Any]:
    import pyarrow.types as types

    kinds = [element(found.field(column).type) for _, found in opened for column in columns]
    return np.int64 if kinds and all(map(types.is_integer, kinds)) else np.float32


def _is_list_everywhere(opened: Opened, column: str) -> bool:
    by_kind = {is_list(found.field(column).type): file.path for file, found in opened}
    if len(by_kind) > 1:
        raise BadDataError(
            f"column {column!r} is declared as an input, but has lists in {by_kind[True]} and numbers in "
            f"{by_kind[False]}; it must have the same in all files"
        )
    return True in by_kind


def _width(opened: Opened, column: str, skip_bad: bool) -> int:
    """As the type says; else the most frequent length in the first row group that has any."""
    import pyarrow.types as types

    for _, found in opened:
        kind = found.field(column).type
        if types.is_fixed_size_list(kind):
            return int(kind.list_size)
    for lengths in _lengths(opened, column, skip_bad):
        if len(lengths) > 0:
            return int(np.bincount(lengths).argmax())
    return 0


def _lengths(opened: Opened, column: str, skip_bad: bool) -> Iterator[np.ndarray[Any, Any]]:
    import pyarrow.compute as pc

    for file, _ in opened:
        for group in range(len(file.group_rows)):
            try:
                lists = read_group(file, group, [column]).column(column)
            except UnreadableError:
                if skip_bad:
                    continue
                raise
            yield pc.list_value_length(lists).drop_null().to_numpy()
