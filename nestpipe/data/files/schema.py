"""Which columns of a file are keys, inputs, labels and weights; what is declared is checked when files are opened."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nestpipe.data.files.row_files import BadDataError

if TYPE_CHECKING:
    import pyarrow as pa

Names = Mapping[str, str] | Sequence[str]
"""name in the batch -> column; or names that are the columns' own"""

WEIGHT = "weight"
"""the input that has the weights of the samples"""


@dataclass(frozen=True)
class Schema:
    """What a batch is made of, by name in the batch and name of the column.

    keys: columns of integers, or lists of integers, which become jagged. A number is a list of one; null is no key.
    inputs: a column of numbers, [n], or of lists that all have the same length k, [n, k]; or a list of columns, which
    come side by side, [n, k]. An input is int64 if its columns are integers in all files, else float32; k is that of a
    type of fixed-size lists, else the most frequent length in the first row group. labels: numbers, as float32. weight:
    of each sample, a number of at least 0; it becomes the input `weight`, and the weight of a batch is their sum.
    num_keys: features whose keys must be 0 .. number - 1. In inputs, labels and weights, null, nan, infinity and
    unsigned integers above 2^63 - 1 are refused.
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
        """All that are read, each once."""
        several = [column for columns in self.input_columns.values() for column in columns]
        names = [*self.key_columns.values(), *several, *self.label_columns.values()]
        return list(dict.fromkeys(names if self.weight is None else [*names, self.weight]))

    def check(self, path: Path, found: "pa.Schema") -> None:
        """The file must have the columns, and they must have types that can be what they are declared to be."""
        missing = [column for column in self.columns if column not in found.names]
        if missing:
            raise BadDataError(
                f"{path} has no column {', '.join(map(repr, missing))}; its columns are {', '.join(found.names)}"
            )
        twice = [column for column in self.columns if found.names.count(column) > 1]
        if twice:
            raise BadDataError(f"{path} has two columns {twice[0]!r}; rename one of them")
        for name, column in self.key_columns.items():
            _check_keys(path, name, column, found.field(column).type)
        numbers = [column for columns in self.input_columns.values() for column in columns]
        for column in numbers:
            _check_numbers(path, "an input", column, found.field(column).type, lists=True)
        for column in self.label_columns.values():
            _check_numbers(path, "a label", column, found.field(column).type)
        if self.weight is not None:
            _check_numbers(path, "a weight", self.weight, found.field(self.weight).type)


def _by_name(names: Names) -> dict[str, str]:
    return dict(names) if isinstance(names, Mapping) else {name: name for name in names}


def _check_keys(path: Path, name: str, column: str, found: Any) -> None:
    import pyarrow.types as types

    if not types.is_integer(element(found)):
        raise BadDataError(
            f"{path}: column {column!r} is declared as keys of {name!r}, which must be integers or lists of integers, "
            f"but it has type {found}; hash or number the values when the file is written"
        )


def _check_numbers(path: Path, what: str, column: str, found: Any, lists: bool = False) -> None:
    import pyarrow.types as types

    kind = element(found) if lists else found
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        raise BadDataError(f"{path}: column {column!r} is declared as {what}, which must be numbers, but is {found}")


def is_list(found: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_list(found) or types.is_large_list(found) or types.is_fixed_size_list(found))


def element(found: Any) -> Any:
    """The type of a list's elements, or the type itself; dictionary-encoded values have their own."""
    import pyarrow.types as types

    found = found.value_type if is_list(found) else found
    return found.value_type if types.is_dictionary(found) else found
