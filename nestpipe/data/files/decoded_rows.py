"""Decoded rows of files: columns as arrays, which are joined to windows, and of which some rows make a batch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from nestpipe.data.batch import Batch, Jagged
from nestpipe.data.files.schema import WEIGHT, InputForms, Schema, is_list

if TYPE_CHECKING:
    import pyarrow as pa

Array = NDArray[Any]


@dataclass(frozen=True)
class Lists:
    """Keys of rows: lists if there are offsets, else at most one key for each row."""

    values: Array
    offsets: Array | None = None
    has_key: Array | None = None
    """Without offsets: whether a row has a key; None if all have one."""

    def take(self, rows: Array) -> "Lists":
        """Returns the keys of these rows, in this order."""
        if self.offsets is not None:
            lengths = (self.offsets[1:] - self.offsets[:-1])[rows]
            offsets = _offsets_of(lengths)
            where = np.arange(offsets[-1]) + np.repeat(self.offsets[:-1][rows] - offsets[:-1], lengths)
            return Lists(self.values.take(where), offsets)
        return Lists(self.values.take(rows), None, None if self.has_key is None else self.has_key.take(rows))

    def jagged(self) -> Jagged:
        if self.offsets is not None:
            return Jagged(torch.from_numpy(self.values), torch.from_numpy(self.offsets))
        if self.has_key is None:
            return Jagged.one_each(torch.from_numpy(self.values))
        offsets = _offsets_of(self.has_key)
        return Jagged(torch.from_numpy(self.values[self.has_key]), torch.from_numpy(offsets))

    @property
    def lengths(self) -> Array:
        if self.offsets is not None:
            return np.diff(self.offsets)
        return np.ones(len(self.values), np.int64) if self.has_key is None else self.has_key.astype(np.int64)

    @property
    def only_keys(self) -> Array:
        return self.values if self.has_key is None else self.values[self.has_key]


@dataclass
class Rows:
    num_rows: int
    keys: dict[str, Lists] = field(default_factory=dict)
    inputs: dict[str, Array] = field(default_factory=dict)
    bad: dict[int, str] = field(default_factory=dict)
    """First problem of each bad row, by its number."""

    def take(self, rows: Array) -> "Rows":
        """Returns these rows, in this order. It uses numpy alone, which works in this thread."""
        keys = {name: lists.take(rows) for name, lists in self.keys.items()}
        return Rows(len(rows), keys, {name: values.take(rows, axis=0) for name, values in self.inputs.items()})


def decode(table: "pa.Table", schema: Schema, forms: InputForms) -> Rows:
    """Decodes the columns of a row group that the schema declares."""
    rows = Rows(table.num_rows)
    for name, column in schema.key_columns.items():
        rows.keys[name] = _keys(rows, column, _array(table, column), schema.num_keys.get(name))
    for name, columns in schema.input_columns.items():
        parts = [_numbers(rows, column, _array(table, column), forms.widths.get(column)) for column in columns]
        values = parts[0] if isinstance(schema.inputs[name], str) else _side_by_side(parts)
        rows.inputs[name] = values.astype(forms.dtypes[name], copy=False)
    for name, column in schema.label_columns.items():
        rows.inputs[name] = _numbers(rows, column, _array(table, column)).astype(np.float32, copy=False)
    if schema.weight is not None:
        weights = _numbers(rows, schema.weight, _array(table, schema.weight)).astype(np.float32, copy=False)
        _note(rows, weights < 0, schema.weight, "is below 0, which no weight may be")
        rows.inputs[WEIGHT] = weights
    return rows


def join(parts: Sequence[Rows]) -> Rows:
    """Concatenates rows."""
    if len(parts) == 1:
        return parts[0]
    keys = {name: _joined([part.keys[name] for part in parts]) for name in parts[0].keys}
    inputs = {name: np.concatenate([part.inputs[name] for part in parts]) for name in parts[0].inputs}
    return Rows(sum(part.num_rows for part in parts), keys, inputs)


def to_batch(rows: Rows) -> Batch:
    """Makes a batch that shares the memory of the rows."""
    inputs = {name: torch.from_numpy(values) for name, values in rows.inputs.items()}
    weight = float(rows.inputs[WEIGHT].sum(dtype=np.float64)) if WEIGHT in inputs else None
    return Batch({name: lists.jagged() for name, lists in rows.keys.items()}, inputs, weight)


def empty(schema: Schema, forms: InputForms) -> Rows:
    """Returns no rows, with the dtypes and widths of others."""
    keys = {name: Lists(np.empty(0, np.int64)) for name in schema.key_columns}
    inputs: dict[str, Array] = {}
    for name, columns in schema.input_columns.items():
        is_flat = isinstance(schema.inputs[name], str) and columns[0] not in forms.widths
        inputs[name] = np.empty(0 if is_flat else (0, forms.width(columns)), forms.dtypes[name])
    numbers = [*schema.label_columns, *([] if schema.weight is None else [WEIGHT])]
    return Rows(0, keys, inputs | {name: np.empty(0, np.float32) for name in numbers})


def _joined(parts: Sequence[Lists]) -> Lists:
    if any(part.offsets is not None for part in parts):
        lengths = np.concatenate([part.lengths for part in parts])
        return Lists(np.concatenate([part.only_keys for part in parts]), _offsets_of(lengths))
    values = np.concatenate([part.values for part in parts])
    if all(part.has_key is None for part in parts):
        return Lists(values)
    return Lists(values, None, np.concatenate([part.lengths for part in parts]).astype(np.bool_))


def _offsets_of(lengths: Array) -> Array:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _side_by_side(parts: Sequence[Array]) -> Array:
    """Concatenates columns; integers next to floats become floats."""
    if any(part.dtype != parts[0].dtype for part in parts):
        parts = [part.astype(np.float32, copy=False) for part in parts]
    return np.concatenate([part if part.ndim > 1 else part[:, None] for part in parts], axis=1)


def _array(table: "pa.Table", column: str) -> Any:
    import pyarrow as pa

    whole = table.column(column).combine_chunks()
    whole = whole.combine_chunks() if isinstance(whole, pa.ChunkedArray) else whole
    return whole.dictionary_decode() if pa.types.is_dictionary(whole.type) else whole


def _keys(rows: Rows, column: str, array: Any, num_keys: int | None) -> Lists:
    import pyarrow as pa

    offsets: Array | None = None
    values = array
    if is_list(array.type):
        values = array.flatten()
        values = values.dictionary_decode() if pa.types.is_dictionary(values.type) else values
        offsets = _offsets(array)
    has_key: Array | None = None
    if values.null_count:
        is_key = values.is_valid().to_numpy(zero_copy_only=False)
        if offsets is None:
            has_key, values = is_key, values.fill_null(0)
        else:
            offsets, values = _offsets_of(is_key)[offsets], values.drop_null()
    keys = _integers(values)
    if num_keys is not None:
        is_bad = (keys < 0) | (keys >= num_keys)
        is_bad = is_bad if has_key is None else is_bad & has_key
        _note_lists(rows, is_bad, offsets, column, f"has a key outside 0 .. {num_keys - 1}")
    return Lists(keys, offsets, has_key)


def _offsets(array: Any) -> Array:
    import pyarrow.compute as pc

    lengths = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
    return _offsets_of(lengths)


def _integers(values: Any) -> Array:
    import pyarrow as pa

    if values.type == pa.uint64():
        return np.asarray(values.view(pa.int64()))  # reinterprets the bits: every int64 is a key
    return np.asarray(values.cast(pa.int64()))


def _numbers(rows: Rows, column: str, array: Any, width: int | None = None) -> Array:
    """Returns numbers [n], or [n, width] for a column of lists, as int64 or float32."""
    import pyarrow as pa

    shape: tuple[int, ...] = (rows.num_rows,)
    if width is not None:
        array, shape = _even_lists(rows, column, array, width), (rows.num_rows, width)
    if array.null_count:
        is_null = array.is_null().to_numpy(zero_copy_only=False)
        _note(rows, is_null.reshape(shape), column, "is null, but only keys may be")
        array = array.fill_null(False if pa.types.is_boolean(array.type) else 0)
    if pa.types.is_integer(array.type):
        integers = _integers(array).reshape(shape)
        if array.type == pa.uint64():
            _note(rows, integers < 0, column, "is above 2^63 - 1, which only keys may be")
        return integers
    values: Array = array.to_numpy(zero_copy_only=False).astype(np.float32, copy=False).reshape(shape)
    is_finite = np.isfinite(values)
    if not is_finite.all():
        _note(rows, ~is_finite, column, "is not finite")
    return values


def _even_lists(rows: Rows, column: str, array: Any, width: int) -> Any:
    """Returns the elements of lists of this length. Other lists are noted as bad, and cut off or filled with nulls."""
    import pyarrow as pa
    import pyarrow.compute as pc

    lengths = pc.list_value_length(array).fill_null(-1).to_numpy(zero_copy_only=False)
    flat = array.flatten()
    flat = flat.dictionary_decode() if pa.types.is_dictionary(flat.type) else flat
    is_other = lengths != width
    if not is_other.any():
        return flat
    _note(rows, is_other, column, f"is a list of another length than {width}; all of an input must be as long")
    places = np.arange(width)
    where = _offsets_of(lengths.clip(min=0))[:-1, None] + places
    return flat.take(pa.array(where.ravel(), mask=(places >= lengths[:, None]).ravel()))


def _note(rows: Rows, is_bad: Array, column: str, what: str) -> None:
    is_bad_row = is_bad if is_bad.ndim == 1 else is_bad.any(axis=1)
    for row in np.flatnonzero(is_bad_row).tolist():
        rows.bad.setdefault(row, f"column {column!r} {what}")


def _note_lists(rows: Rows, is_bad: Array, offsets: Array | None, column: str, what: str) -> None:
    if is_bad.any():
        places = np.flatnonzero(is_bad)
        bad_rows = places if offsets is None else np.searchsorted(offsets, places, side="right") - 1
        for row in bad_rows.tolist():
            rows.bad.setdefault(row, f"column {column!r} {what}")
