"""The binding of the native library: loads it, types its functions, and turns status codes into exceptions.

See csrc/include/nestpipe.h.
"""

import ctypes
from ctypes import POINTER, c_char_p, c_double, c_int32, c_int64, c_uint8, c_uint32, c_uint64, c_void_p
from pathlib import Path

from torch import Tensor

from nestpipe.store.interface import TableFullError

ABI_VERSION = 15
LIBRARY = Path(__file__).with_name("libnestpipe.so")


class TableChangedError(RuntimeError):
    """A table was written to between two calls that belong together. The second call did nothing."""


class NativeSpec(ctypes.Structure):
    _fields_ = (
        ("name", c_char_p),
        ("dim", c_int64),
        ("state_width", c_int64),
        ("initial_state", POINTER(c_double)),
        ("max_rows", c_int64),
        ("seed", c_uint64),
        ("initial_a", c_double),
        ("initial_b", c_double),
        ("initial", c_int32),
        ("dtype", c_int32),
    )


class NativeMemoryReport(ctypes.Structure):
    _fields_ = (
        ("num_rows", c_int64),
        ("record_bytes", c_int64),
        ("payload_bytes", c_int64),
        ("metadata_bytes", c_int64),
        ("index_bytes", c_int64),
        ("erased_bytes", c_int64),
        ("mapped_bytes", c_int64),
    )


class NativeOptimizer(ctypes.Structure):
    """A row optimizer; see nestpipe_optimizer_kind for its formulas."""

    SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM = range(4)
    _fields_ = (("kind", c_int32), ("lr", c_double), ("eps", c_double), ("beta1", c_double), ("beta2", c_double))


class NativeRowUpdate(ctypes.Structure):
    _fields_ = (
        ("rows", c_void_p),
        ("state", c_void_p),
        ("gradient", c_void_p),
        ("slots", c_void_p),
        ("num_rows", c_int64),
        ("num_slots", c_int64),
        ("dim", c_int64),
        ("row_stride", c_int64),
        ("state_stride", c_int64),
        ("dtype", c_int32),
    )


class NativeKeyLists(ctypes.Structure):
    _fields_ = (("index", c_void_p), ("offsets", c_void_p), ("num_keys", c_int64))


class NativeBatch(ctypes.Structure):
    _fields_ = (
        ("features", POINTER(NativeKeyLists)),
        ("cost", c_void_p),
        ("num_samples", c_int64),
        ("num_distinct", c_int64),
        ("num_features", c_int32),
    )


class NativeSlotCounts(ctypes.Structure):
    _fields_ = (
        ("num_slots", c_int64),
        ("num_free", c_int64),
        ("num_resident", c_int64),
        ("num_dirty", c_int64),
        ("memory_bytes", c_int64),
    )


class NativeSlotRecords(ctypes.Structure):
    _fields_ = (
        ("slots", c_void_p),
        ("keys", c_void_p),
        ("steps", c_void_p),
        ("offsets", c_void_p),
        ("capacity", c_int64),
    )


class NativeRows(ctypes.Structure):
    _fields_ = (
        ("keys", c_void_p),
        ("records", c_void_p),
        ("steps", c_void_p),
        ("capacity", c_int64),
        ("num_columns", c_int64),
    )


class NativeMissingKeys(ctypes.Structure):
    _fields_ = (("indices", c_void_p), ("keys", c_void_p), ("offsets", c_void_p))


_TABLE = (c_void_p, c_int32)
_TABLES = (c_void_p, c_void_p, c_void_p, c_int64)  # store, table numbers, offsets of their keys, number of tables
_KEYS = (c_void_p, c_int64)
_BUCKETS = (c_int64, c_int64)
_COUNTS = (c_void_p, c_int64, c_int64)
_ROWS = (c_void_p, c_int64, c_int64)
_SLOT_KEYS = (c_void_p, c_void_p, *_KEYS)  # slots, offsets of the keys by table, keys
_SLOT_LIST = (c_void_p, c_void_p, c_int64)
_SIGNATURES: dict[str, tuple[object, ...]] = {
    "store_create": (POINTER(c_void_p),),
    "store_destroy": (c_void_p,),
    "table_create": (c_void_p, POINTER(NativeSpec), POINTER(c_int32)),
    "table_size": (*_TABLE, POINTER(c_int64)),
    "table_reserve": (*_TABLE, c_int64),
    "table_memory": (*_TABLE, POINTER(NativeMemoryReport)),
    "gather": (*_TABLE, *_KEYS, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_int32),
    "scatter": (*_TABLE, *_KEYS, c_void_p, c_int64, c_int64, c_int32),
    "find": (*_TABLE, *_KEYS, c_void_p, c_int32),
    "gather_tables": (
        *_TABLES,
        *_KEYS,
        c_void_p,
        c_int64,
        c_void_p,
        c_int64,
        c_int64,
        c_void_p,
        c_int32,
    ),
    "scatter_tables": (*_TABLES, *_KEYS, c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int32),
    "update_tables": (*_TABLES, *_KEYS, POINTER(NativeOptimizer), c_void_p, c_int64, c_int32),
    "find_tables": (*_TABLES, *_KEYS, c_void_p, c_int32),
    "table_sizes": (c_void_p, c_void_p, c_int64, c_void_p),
    "match_tables": (*_KEYS, c_void_p, *_KEYS, c_void_p, c_int64, c_void_p, c_int32),
    "erase": (*_TABLE, *_KEYS, POINTER(c_int64)),
    "count": (*_TABLE, *_BUCKETS, POINTER(c_int64)),
    "export": (*_TABLE, *_BUCKETS, c_int64, c_void_p, c_void_p, c_int64, c_void_p, POINTER(c_int64)),
    "import": (*_TABLE, *_BUCKETS, c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_int32),
    "digest": (*_TABLE, POINTER(c_uint8), c_int32),
    "snapshot_begin": (*_TABLE, c_int32, POINTER(c_int64), POINTER(c_int64)),
    "snapshot_erased": (*_TABLE, c_int64, c_void_p),
    "snapshot_next": (
        *_TABLE,
        c_int64,
        c_int64,
        c_int64,
        POINTER(NativeRows),
        c_void_p,
        POINTER(c_int64),
        POINTER(c_int32),
    ),
    "snapshot_preserve": (*_TABLE, *_KEYS, POINTER(NativeRows), POINTER(c_int64), POINTER(c_int64)),
    "snapshot_end": _TABLE,
    "crc32c": (c_void_p, c_int64, c_uint32, POINTER(c_uint32)),
    "unique": (*_KEYS, c_void_p, c_void_p, POINTER(c_int64), c_int32),
    "group_by_owner": (c_char_p, *_KEYS, c_int32, c_void_p, c_void_p),
    "hash": (c_char_p, *_KEYS, c_void_p),
    "slots_create": (c_void_p, c_int64, c_int32, c_int32, POINTER(c_void_p)),
    "slots_destroy": (c_void_p,),
    "slots_counts": (c_void_p, POINTER(NativeSlotCounts)),
    "slots_grow": (c_void_p, c_int64),
    "slots_find": (*_SLOT_KEYS, c_void_p),
    "slots_use": (*_SLOT_KEYS, c_int64, c_void_p, POINTER(NativeMissingKeys)),
    "slots_assign": (c_void_p, c_int64, c_int64, *_KEYS, c_void_p, *_KEYS, POINTER(NativeSlotRecords)),
    "slots_evict": _SLOT_LIST,
    "slots_fill": (*_SLOT_KEYS, c_void_p, c_void_p, c_int64),
    "slots_release": _SLOT_LIST,
    "slots_claim": (*_SLOT_LIST, c_void_p),
    "slots_settle": (*_SLOT_LIST, c_int64),
    "slots_dirty": (c_void_p, POINTER(NativeSlotRecords)),
    "slots_clean": _SLOT_LIST,
    "slots_clear": (c_void_p,),
    "cluster": (POINTER(NativeBatch), c_int32, c_int32, c_uint64, c_void_p, c_void_p),
    "group_by_row": (*_KEYS, *_KEYS, c_int64, c_void_p, c_void_p, c_void_p),
    "pool": (*_KEYS, c_void_p, c_void_p, c_int64, c_int32),
    "pool_backward": (*_KEYS, c_void_p, c_int64, c_void_p, c_int32),
    "update_rows": (POINTER(NativeOptimizer), POINTER(NativeRowUpdate), c_int32),
    "table_salt": (c_char_p, POINTER(c_uint64)),
    "dedup": (*_KEYS, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int32),
    "pack_keys": (*_KEYS, c_int64, c_void_p, c_void_p, c_void_p, c_int32),
    "copy_arrays": (*_KEYS, *_KEYS, c_int32),
    "find_ranges": (*_KEYS, c_void_p, c_int32),
    "lay_out": (*_KEYS, c_void_p, *_KEYS, c_int64, c_void_p, c_void_p, c_void_p, c_int32),
    "split": (*_KEYS, c_void_p, *_COUNTS, c_int64, c_void_p, c_void_p, c_int64, c_int64, *(c_void_p,) * 9),
    "owner_dedup": (*_KEYS, *_COUNTS, c_void_p, c_void_p, c_void_p, c_void_p, c_int32),
    "exchange_lists": (*_KEYS, c_int64, c_int32, *_KEYS, c_int64, *_KEYS, c_void_p, c_void_p),
    "one_part_lists": (*_COUNTS, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_int64, *(c_void_p,) * 5),
    "cluster_numbers": (*_COUNTS, c_void_p, c_int64, c_void_p),
    "copy_runs": (*_KEYS, c_void_p, *_KEYS, c_void_p, *_KEYS),
    "copy_rows": (*_ROWS, c_void_p, *_ROWS, c_void_p, c_int64, c_int64, c_int32),
    "add_rows": (*_ROWS, c_void_p, *_ROWS, c_void_p, c_int64, c_int64, c_int32, c_double, c_void_p, c_int32),
    "check_rows": (*_ROWS, c_int64, c_int64, c_int32, c_double, c_void_p, c_int32),
    "mailbox_bytes": (c_int64, c_int64, POINTER(c_int64)),
    "mailbox_exchange": (c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_int64, POINTER(c_int32)),
    "sum_rows": (*_ROWS, *_KEYS, *_KEYS, c_int64, c_int32, *_ROWS, c_int32),
}

_INVALID_ARGUMENT, _OUT_OF_MEMORY, _TABLE_FULL, _TABLE_EXISTS, _CHANGED = 1, 2, 3, 4, 5
_EXCEPTIONS: dict[int, type[Exception]] = {
    _INVALID_ARGUMENT: ValueError,
    _OUT_OF_MEMORY: MemoryError,
    _TABLE_FULL: TableFullError,
    _TABLE_EXISTS: ValueError,
    _CHANGED: TableChangedError,
}


def _load(path: Path) -> ctypes.CDLL:
    if not path.exists():
        raise ImportError(f"the native library {path.name} has not been built; run `make native` in the source folder")
    library = ctypes.CDLL(str(path))  # releases the GIL during calls
    version = library.nestpipe_abi_version()
    if version != ABI_VERSION:
        raise ImportError(
            f"{path.name} has interface version {version}, this package needs {ABI_VERSION}; run `make native` again"
        )
    library.nestpipe_last_error.restype = c_char_p
    for name, argtypes in _SIGNATURES.items():
        getattr(library, f"nestpipe_{name}").argtypes = argtypes
    return library


_library = _load(LIBRARY)


def call(name: str, *arguments: object) -> None:
    """Calls nestpipe_<name>, and raises an exception if its status is an error."""
    status = getattr(_library, f"nestpipe_{name}")(*arguments)
    if status != 0:
        text = _library.nestpipe_last_error().decode(errors="replace")
        raise _EXCEPTIONS.get(status, RuntimeError)(text)


def pointer(array: Tensor | None) -> int | None:
    """Returns the address of an array that interface.py has checked."""
    return None if array is None else array.data_ptr()
