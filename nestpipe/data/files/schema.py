"""The columns of files that are keys, inputs, labels and weights: declared, and checked when files are opened."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nestpipe.data.files.row_files import BadDataError, RowFile, UnreadableError, read_group

if TYPE_CHECKING:
    import pyarrow as pa

Names = Mapping[str, str] | Sequence[str]
"""Name in the batch -> column; or a list, if the names are those of the columns."""

Opened = Sequence[tuple[RowFile, "pa.Schema"]]

WEIGHT = "weight"
"""The input that has the weights of the samples."""


@dataclass(frozen=True)
class Schema:
    """Declares the content of a batch: names in the batch, and the columns that they come from.

    keys: columns of integers or of lists of integers. A number is a list of one key; null is no key.
    inputs: a column of numbers, [n]; a column of lists of equal length k, [n, k]; or several columns side by side,
    [n, k]. An input is int64 if its columns are integers in all files, else float32. k is the size of fixed-size lists,
    else the most frequent length in the first row group.
    labels: columns of numbers, converted to float32.
    weight: a column with the weight of each sample, at least 0. It becomes the input `weight`, and the weight of a
    batch is the sum.
    num_keys: number of keys by feature; keys must be 0 .. number - 1.
    In inputs, labels and weights, null, nan, infinity and unsigned integers above 2^63 - 1 are refused.
    """

    keys: Names
    inputs: Mapping[str, str | Sequence[str]] = field(default_factory=dict)
    labels: Names = ()
    weight: str | None = None
    num_keys: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.key_columns:
            raise ValueError("a schema needs at least one column of keys; inputs alone need no tables")
        names = [*self.key_columns, *self.input_columns, *self.label_columns]
        if self.weight is not None:
            names.append(WEIGHT)
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"a schema has two things of the name {', '.join(twice)}; rename one: {{name: column}}")
        unknown = sorted(self.num_keys.keys() - self.key_columns.keys())
        if unknown:
            raise ValueError(f"num_keys names {', '.join(unknown)}, but the keys are {', '.join(self.key_columns)}")
        if any(not columns for columns in self.input_columns.values()):
            raise ValueError("each input needs at least one column")

    @property
    def key_columns(self) -> dict[str, str]:
        return _by_name(self.keys)

    @property
    def input_columns(self) -> dict[str, tuple[str, ...]]:
        return {name: (c,) if isinstance(c, str) else tuple(c) for name, c in self.inputs.items()}

    @property
    def label_columns(self) -> dict[str, str]:
        return _by_name(self.labels)

    @property
    def columns(self) -> list[str]:
        """All columns that are read, each once."""
        input_columns = [column for columns in self.input_columns.values() for column in columns]
        names = [*self.key_columns.values(), *input_columns, *self.label_columns.values()]
        return list(dict.fromkeys(names if self.weight is None else [*names, self.weight]))

    def check(self, path: Path, file_schema: "pa.Schema") -> None:
        """Raises if a file lacks a column, or if the type of a column does not fit its declaration."""
        missing = [column for column in self.columns if column not in file_schema.names]
        if missing:
            raise BadDataError(
                f"{path} has no column {', '.join(map(repr, missing))}; its columns are {', '.join(file_schema.names)}"
            )
        twice = [column for column in self.columns if file_schema.names.count(column) > 1]
        if twice:
            raise BadDataError(f"{path} has two columns {twice[0]!r}; rename one of them")
        for name, column in self.key_columns.items():
            _check_keys(path, name, column, file_schema.field(column).type)
        numbers = [column for columns in self.input_columns.values() for column in columns]
        for column in numbers:
            _check_numbers(path, "an input", column, file_schema.field(column).type, lists=True)
        for column in self.label_columns.values():
            _check_numbers(path, "a label", column, file_schema.field(column).type)
        if self.weight is not None:
            _check_numbers(path, "a weight", self.weight, file_schema.field(self.weight).type)


def _by_name(names: Names) -> dict[str, str]:
    return dict(names) if isinstance(names, Mapping) else {name: name for name in names}


def _check_keys(path: Path, name: str, column: str, kind: Any) -> None:
    import pyarrow.types as types

    if not types.is_integer(element(kind)):
        raise BadDataError(
            f"{path}: column {column!r} is declared as keys of {name!r}, which must be integers or lists of integers, "
            f"but it has type {kind}; hash or number the values when the file is written"
        )


def _check_numbers(path: Path, what: str, column: str, kind: Any, lists: bool = False) -> None:
    import pyarrow.types as types

    number = element(kind) if lists else kind
    if not (types.is_integer(number) or types.is_floating(number) or types.is_boolean(number)):
        raise BadDataError(f"{path}: column {column!r} is declared as {what}, which must be numbers, but is {kind}")


def is_list(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def element(kind: Any) -> Any:
    """Returns the type of a list's elements, or the type itself; for dictionaries, the type of their values."""
    import pyarrow.types as types

    kind = kind.value_type if is_list(kind) else kind
    return kind.value_type if types.is_dictionary(kind) else kind


@dataclass(frozen=True)
class InputForms:
    """The dtype of each input and the width of its lists, over all files."""

    dtypes: Mapping[str, type[Any]] = field(default_factory=dict)
    """Dtype of each input: int64 if its columns are integers in all files, else float32."""
    widths: Mapping[str, int] = field(default_factory=dict)
    """Length that each list of a column must have."""

    def width(self, columns: Sequence[str]) -> int:
        """Returns the width of several columns side by side."""
        return sum(self.widths.get(column, 1) for column in columns)


def find_forms(opened: Opened, schema: Schema, skip_bad: bool = False) -> InputForms:
    """Reads only types, and one row group of an input whose lists have no fixed size."""
    columns = dict.fromkeys(column for several in schema.input_columns.values() for column in several)
    lists = [column for column in columns if _is_list_everywhere(opened, column)]
    return InputForms(
        {name: _dtype(opened, several) for name, several in schema.input_columns.items()},
        {column: _width(opened, column, skip_bad) for column in lists},
    )


def _dtype(opened: Opened, columns: Sequence[str]) -> type[Any]:
    import pyarrow.types as types

    kinds = [element(file_schema.field(column).type) for _, file_schema in opened for column in columns]
    return np.int64 if kinds and all(map(types.is_integer, kinds)) else np.float32


def _is_list_everywhere(opened: Opened, column: str) -> bool:
    path_by_kind = {is_list(file_schema.field(column).type): file.path for file, file_schema in opened}
    if len(path_by_kind) > 1:
        raise BadDataError(
            f"column {column!r} is declared as an input, but has lists in {path_by_kind[True]} and numbers in "
            f"{path_by_kind[False]}; it must have the same in all files"
        )
    return True in path_by_kind


def _width(opened: Opened, column: str, skip_bad: bool) -> int:
    """Returns the size of fixed-size lists, else the most frequent length in the first row group that has lists."""
    import pyarrow.types as types

    for _, file_schema in opened:
        kind = file_schema.field(column).type
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
