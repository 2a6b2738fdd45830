"""Decoded rows of files: columns as arrays, joined to a window, from which any samples are taken as a batch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.data.batch import Batch, Jagged
from nestpipe.data.row_files import BadDataError
from nestpipe.data.schema import WEIGHT, Schema, is_list

if TYPE_CHECKING:
    import pyarrow as pa

Array = NDArray[Any]


@dataclass(frozen=True)
class Lists:
    """Keys of rows; without offsets, one for each row."""

    values: Array
    offsets: Array | None = None


@dataclass
class Rows:
    num_rows: int
    keys: dict[str, Lists] = field(default_factory=dict)
    inputs: dict[str, Array] = field(default_factory=dict)
    bad: dict[int, str] = field(default_factory=dict)
    """what is wrong with a row, by its number; the first thing found"""


@dataclass(frozen=True)
class Samples:
    """Rows of a window in the order of its samples."""

    keys: dict[str, Jagged]
    inputs: dict[str, Tensor]
    one_each: frozenset[str]
    """features with one key for each sample: they need no offsets of their own"""

    def batch(self, rows: Tensor) -> "Samples":
        offsets = torch.arange(len(rows) + 1)
        keys = {
            name: Jagged(of.values.index_select(0, rows), offsets) if name in self.one_each else of.take(rows)
            for name, of in self.keys.items()
        }
        inputs = {name: values.index_select(0, rows) for name, values in self.inputs.items()}
        return Samples(keys, inputs, self.one_each)


def decode(table: "pa.Table", schema: Schema) -> Rows:
    """What the schema says of a row group."""
    rows = Rows(table.num_rows)
    for name, column in schema.key_columns.items():
        rows.keys[name] = _keys(rows, column, _array(table, column), schema.num_keys.get(name))
    for name, columns in schema.input_columns.items():
        parts = [_numbers(rows, column, _array(table, column)) for column in columns]
        rows.inputs[name] = parts[0] if isinstance(schema.inputs[name], str) else _side_by_side(parts)
    for name, column in schema.label_columns.items():
        rows.inputs[name] = _numbers(rows, column, _array(table, column)).astype(np.float32, copy=False)
    if schema.weight is not None:
        weights = _numbers(rows, schema.weight, _array(table, schema.weight)).astype(np.float32, copy=False)
        _note(rows, weights < 0, schema.weight, "is below 0, which no weight may be")
        rows.inputs[WEIGHT] = weights
    return rows


def keep(rows: Rows, which: Array) -> Rows:
    """These rows only; `which` ascends."""
    keys = {name: _kept_lists(of, which) for name, of in rows.keys.items()}
    return Rows(len(which), keys, {name: values[which] for name, values in rows.inputs.items()})


def _kept_lists(lists: Lists, which: Array) -> Lists:
    if lists.offsets is None:
        return Lists(lists.values[which])
    stays = np.isin(np.arange(len(lists.offsets) - 1), which)
    lengths = np.diff(lists.offsets)
    offsets = np.concatenate([np.zeros(1, np.int64), lengths[stays].cumsum()])
    return Lists(lists.values[np.repeat(stays, lengths)], offsets)


def join(parts: Sequence[Rows]) -> Samples:
    """The rows of some row groups as one; nothing of them is shared."""
    keys, one_each = {}, set()
    for name in parts[0].keys:
        lists = [part.keys[name] for part in parts]
        values = torch.from_numpy(np.concatenate([of.values for of in lists]))
        if all(of.offsets is None for of in lists):
            one_each.add(name)
            keys[name] = Jagged.one_each(values)
        else:
            keys[name] = Jagged(values, torch.from_numpy(_joined_offsets(lists)))
    inputs = {name: _stacked(name, [part.inputs[name] for part in parts]) for name in parts[0].inputs}
    return Samples(keys, inputs, frozenset(one_each))


def to_batch(parts: Sequence[Samples]) -> Batch:
    """Samples of one window or of several, one behind the other."""
    if len(parts) == 1:
        keys, inputs = parts[0].keys, parts[0].inputs
    else:
        keys = {name: _joined([part.keys[name] for part in parts]) for name in parts[0].keys}
        inputs = {name: torch.cat([part.inputs[name] for part in parts]) for name in parts[0].inputs}
    weight = float(inputs[WEIGHT].double().sum()) if WEIGHT in inputs else None
    return Batch(keys, inputs, weight)


def empty(schema: Schema) -> Samples:
    nothing = torch.empty(0, dtype=torch.int64)
    keys = {name: Jagged(nothing, nothing.new_zeros(1)) for name in schema.key_columns}
    inputs = {
        name: torch.empty(0) if isinstance(schema.inputs[name], str) else torch.empty(0, len(columns))
        for name, columns in schema.input_columns.items()
    }
    numbers = [*schema.label_columns, *([] if schema.weight is None else [WEIGHT])]
    return Samples(keys, inputs | {name: torch.empty(0) for name in numbers}, frozenset())


def _side_by_side(parts: Sequence[Array]) -> Array:
    return np.concatenate([part.reshape(len(part), -1) for part in _same_type(parts)], axis=1)


def _stacked(name: str, parts: Sequence[Array]) -> Tensor:
    widths = {part.shape[1:] for part in parts}
    if len(widths) > 1:
        raise BadDataError(f"the lists of input {name!r} have other lengths in other row groups: {sorted(widths)}")
    return torch.from_numpy(np.concatenate(_same_type(parts)))


def _same_type(parts: Sequence[Array]) -> Sequence[Array]:
    """Integers among floats become floats."""
    if all(part.dtype == parts[0].dtype for part in parts):
        return parts
    return [part.astype(np.float32, copy=False) for part in parts]


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
    if values.null_count:
        is_key = values.is_valid().to_numpy(zero_copy_only=False)
        before = np.concatenate([np.zeros(1, np.int64), is_key.cumsum()])
        offsets = before if offsets is None else before[offsets]
        values = values.drop_null()
    keys = _integers(values)
    if num_keys is not None:
        _note_lists(rows, (keys < 0) | (keys >= num_keys), offsets, column, f"has a key outside 0 .. {num_keys - 1}")
    return Lists(keys, offsets)


def _offsets(array: Any) -> Array:
    import pyarrow.compute as pc

    lengths = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
    return np.concatenate([np.zeros(1, np.int64), lengths.astype(np.int64).cumsum()])


def _integers(values: Any) -> Array:
    import pyarrow as pa

    if values.type == pa.uint64():
        return np.asarray(values.view(pa.int64()))  # by their bits: every int64 is a key
    return np.asarray(values.cast(pa.int64()))


def _numbers(rows: Rows, column: str, array: Any) -> Array:
    """[n], or [n, k] of lists; int64 or float32."""
    import pyarrow as pa

    shape: tuple[int, ...] = (rows.num_rows,)
    if is_list(array.type):
        array, shape = _even_lists(rows, column, array)
    if array.null_count:
        is_null = array.is_null().to_numpy(zero_copy_only=False)
        _note(rows, is_null.reshape(shape), column, "is null, but only keys may be")
        array = array.fill_null(False if pa.types.is_boolean(array.type) else 0)
    if pa.types.is_integer(array.type):
        return _integers(array).reshape(shape)
    values: Array = array.to_numpy(zero_copy_only=False).astype(np.float32, copy=False).reshape(shape)
    is_finite = np.isfinite(values)
    if not is_finite.all():
        _note(rows, ~is_finite, column, "is not finite")
    return values


def _even_lists(rows: Rows, column: str, array: Any) -> tuple[Any, tuple[int, ...]]:
    """All lists as long as the longest; others are noted, and filled up with zeros."""
    lengths = np.diff(_offsets(array))
    width = int(lengths.max(initial=0))
    _note(rows, lengths != width, column, f"is a list of another length than {width}; all of an input must be as long")
    flat = array.flatten()
    if bool((lengths != width).any()):
        where = np.full(len(lengths) * width, -1, np.int64)
        where[(np.arange(width) < lengths[:, None]).ravel()] = np.arange(len(flat))
        import pyarrow as pa

        flat = flat.take(pa.array(where, mask=where < 0)).fill_null(0)
    return flat, (len(lengths), width)


def _note(rows: Rows, is_bad: Array, column: str, what: str) -> None:
    of_rows = is_bad.reshape(len(is_bad), -1).max(axis=1, initial=False)
    for row in np.flatnonzero(of_rows).tolist():
        rows.bad.setdefault(row, f"column {column!r} {what}")


def _note_lists(rows: Rows, is_bad: Array, offsets: Array | None, column: str, what: str) -> None:
    if is_bad.any():
        places = np.flatnonzero(is_bad)
        of_rows = places if offsets is None else np.searchsorted(offsets, places, side="right") - 1
        for row in of_rows.tolist():
            rows.bad.setdefault(row, f"column {column!r} {what}")


def _joined_offsets(lists: Sequence[Lists]) -> Array:
    lengths = [np.ones(len(of.values), np.int64) if of.offsets is None else np.diff(of.offsets) for of in lists]
    return np.concatenate([np.zeros(1, np.int64), np.concatenate(lengths).cumsum()])


def _joined(parts: Sequence[Jagged]) -> Jagged:
    lengths = torch.cat([part.lengths for part in parts])
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return Jagged(torch.cat([part.values for part in parts]), offsets)
