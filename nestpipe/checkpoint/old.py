"""Reads checkpoints of formats 1 and 2, which version 0.1 and an early 0.2 wrote by torch.save.

They are loaded with weights_only=True, which builds plain values and tensors and runs no code of the file.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nestpipe.checkpoint.errors import DamagedError
from nestpipe.checkpoint.save import digest_of
from nestpipe.checkpoint.state_file import encode
from nestpipe.store import NUM_BUCKETS, Piece, Store, group_by_owner


def read_old_dense(checkpoint: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    dense: dict[str, Any] = _read(checkpoint, "dense.pt", manifest)
    return dense


def read_old_rank(
    checkpoint: Path, manifest: Mapping[str, Any], store: Store, tables: Sequence[str], rank: int, world_size: int
) -> tuple[dict[str, Any], bool]:
    """Imports the rows that a rank owns. Returns what the file of that rank has besides, in format 2, and whether the
    state of the data is equal in all files that were read. At another world size the file is that of rank 0."""
    num_saved = manifest["world_size"]
    others, data_digests = {"data": manifest.get("data")}, set[str]()
    for saved_rank in range(num_saved) if num_saved != world_size else (rank,):
        own = _read(checkpoint, f"rank{saved_rank}.pt", manifest)
        if manifest["format"] == 1:  # this file has rows only; the manifest has the data state
            own = {"rows": own, "data": manifest.get("data")}
        for table in tables:
            _import(store, table, Piece(*own["rows"][table]), rank, world_size)
        if saved_rank == rank or (saved_rank == 0 and num_saved != world_size):
            others = {name: value for name, value in own.items() if name != "rows"}
        data_digests.add(digest_of(encode(own["data"], "the state of the data")))
    return others, len(data_digests) == 1


def _import(store: Store, table: str, piece: Piece, rank: int, world_size: int) -> None:
    order, counts = group_by_owner(table, piece.keys, world_size)
    own = order.split(counts.tolist())[rank]
    store.reserve(table, store.size(table) + len(own))
    store.import_piece(table, 0, NUM_BUCKETS, Piece(*(array[own] for array in piece)))


def _read(checkpoint: Path, name: str, manifest: Mapping[str, Any]) -> Any:
    """Returns the content of a file, in host memory. Refuses a file whose checksum is not that of the manifest."""
    file = checkpoint / name
    try:
        with file.open("rb") as data:
            checksum = hashlib.file_digest(data, "sha256").hexdigest()
    except OSError as error:
        raise DamagedError(f"{file} cannot be read: {error.strerror or error}") from None
    if checksum != manifest["checksums"].get(name):
        raise DamagedError(f"{file} is damaged or of another save: its checksum is not that of the manifest")
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise DamagedError(f"{file} is not a file that version 0.1 or 0.2 wrote: {error}") from None
