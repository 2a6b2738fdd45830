"""A state file without all of its tensors in memory: its values by path, and one tensor at a time."""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nestpipe.checkpoint.errors import DamagedError
from nestpipe.checkpoint.state_file import METADATA_KEY, STRUCTURE_TENSOR, VERSION, Written

Place = tuple[str, ...]
"""Keys and indices that lead to a value, such as ("model", "layer.weight")."""
_CHUNK_BYTES = 16 << 20
_DICTS = ("dict", "ordered_dict", "counter")
_LISTS = ("tuple", "set")


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a state file."""

    name: str
    """Name in the file. Entries that are one tensor, such as tied weights, have one name."""
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_values(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return self.num_values * dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class StateView:
    """A state file. Only its structure is read at first."""

    def __init__(self, file: Path, expected: Written | None = None) -> None:
        """expected: compares the file's size and checksum first, which reads all of it. Raises DamagedError."""
        from safetensors import safe_open

        self.file = file
        if expected is not None:
            check_file(file, expected)
        try:
            stored: Any = safe_open(file, framework="pt")
            self._stored = stored
            structure = (stored.metadata() or {})[METADATA_KEY]
            if not structure:
                structure = stored.get_tensor(STRUCTURE_TENSOR).numpy().tobytes().decode("ascii")
            content = json.loads(structure)
            if content["version"] != VERSION:
                raise ValueError(f"its version is {content['version']}, this nestpipe reads version {VERSION}")
            self.entries: dict[Place, Any] = dict(_flat((), content["value"]))
            """Values by path: TensorEntry, or plain values of JSON."""
        except MemoryError:
            raise
        except Exception as error:  # the bytes may be anything, so any part of the libraries may reject them
            raise DamagedError(f"{file} is not a state file of nestpipe, or it is damaged ({error!r})") from None

    def tensor(self, entry: TensorEntry) -> Tensor:
        """Reads a tensor. Complex numbers are pairs in the file."""
        try:
            stored: Tensor = self._stored.get_tensor(entry.name)
            return torch.view_as_complex(stored) if entry.dtype.startswith("complex") else stored
        except Exception as error:
            raise DamagedError(f"{self.file} is damaged: its tensor {entry.name} cannot be read ({error!r})") from None

    def under(self, *first: str) -> dict[Place, Any]:
        """Returns the values whose path begins so, by the rest of their paths."""
        return {path[len(first) :]: value for path, value in self.entries.items() if path[: len(first)] == first}


def check_file(file: Path, expected: Written, after_chunk: Callable[[int], None] = lambda num_bytes: None) -> None:
    """Raises DamagedError if a file has another size or checksum. after_chunk: called with the number of bytes read."""
    try:
        size, sha = file.stat().st_size, hashlib.sha256()
        if expected.num_bytes is not None and size != expected.num_bytes:
            raise DamagedError(f"{file} has {size} bytes instead of {expected.num_bytes}")
        with file.open("rb") as data:
            while chunk := data.read(_CHUNK_BYTES):
                sha.update(chunk)
                after_chunk(len(chunk))
    except OSError as error:
        raise DamagedError(f"{file} cannot be read: {error.strerror or error}") from None
    if sha.hexdigest() != expected.checksum:
        raise DamagedError(f"{file} is damaged or of another save: its checksum is wrong")


def _flat(path: Place, encoded: Any) -> Iterator[tuple[Place, Any]]:
    """Returns the values in a structure. The layout of structures is described in state_file.py."""
    if isinstance(encoded, list):
        yield from _entries(path, [(str(i), entry) for i, entry in enumerate(encoded)], "[]")
        return
    if not isinstance(encoded, dict):
        yield path, encoded
        return
    if "tensor" in encoded:
        yield path, TensorEntry(encoded["tensor"], encoded["dtype"], tuple(encoded["shape"]))
        return
    if "sparse" in encoded:
        parts = zip(("indices", "values"), encoded["sparse"], strict=True)
        yield from _entries(path, [("shape", encoded["shape"]), *parts], "[]")
        return
    for tag in _LISTS:
        if tag in encoded:
            yield from _flat(path, encoded[tag])
            return
    for tag in _DICTS:
        if tag in encoded:
            pairs = [(key if isinstance(key, str) else json.dumps(key), entry) for key, entry in encoded[tag]]
            yield from _entries(path, pairs, "{}")
            return
    yield path, int(encoded["int"], 16) if "int" in encoded else json.dumps(encoded)


def _entries(path: Place, pairs: list[tuple[str, Any]], if_empty: str) -> Iterator[tuple[Place, Any]]:
    if not pairs:
        yield path, if_empty
    for key, entry in pairs:
        yield from _flat((*path, key), entry)
