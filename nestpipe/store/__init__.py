"""Host memory: tables of rows by key, and operations on arrays of keys."""

from nestpipe.store.dict_store import DictStore
from nestpipe.store.host_store import HostStore
from nestpipe.store.interface import NUM_BUCKETS, Gathered, MemoryReport, Piece, Store, TableFullError, TableSpec
from nestpipe.store.native.cluster_ops import cluster
from nestpipe.store.native.key_ops import crc32c, group_by_owner, group_by_row, hash_keys, match_tables, unique
from nestpipe.store.snapshot import ShardedPiece, Shards, Snapshot
from nestpipe.store.writer import Writer

__all__ = [
    "NUM_BUCKETS",
    "DictStore",
    "Gathered",
    "HostStore",
    "MemoryReport",
    "Piece",
    "ShardedPiece",
    "Shards",
    "Snapshot",
    "Store",
    "TableFullError",
    "TableSpec",
    "Writer",
    "cluster",
    "crc32c",
    "group_by_owner",
    "group_by_row",
    "hash_keys",
    "match_tables",
    "unique",
]
