"""Writes and reads the files of a checkpoint: plain values and compact tensors, each file with a checksum."""

import hashlib
import io
import os
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nestpipe.train.checkpoint.folder import with_file_name

_PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray, torch.dtype, torch.device, torch.Size)
"""Types that `torch.load(weights_only=True)` reads back, apart from containers and tensors."""


class Written(NamedTuple):
    """Checksum and size of a file that is on disk."""

    checksum: str
    num_bytes: int


def write(file: Path, content: Any) -> Written:
    """Writes content with torch.save and syncs it to disk. The same content gives the same bytes."""
    out = _Output(file)
    try:
        try:
            torch.save(content, out)
            out.flush()
            os.fsync(out.fileno())
        finally:
            out.raw.close()  # drops what the buffer holds of a failed write
    except (RuntimeError, OSError) as error:
        cause = out.error or error
        raise with_file_name(cause, file) if isinstance(cause, OSError) else cause from None
    return Written(checksum(file), file.stat().st_size)


def read(checkpoint: Path, name: str, manifest: Mapping[str, Any]) -> Any:
    """Returns the content of a file, in host memory. Refuses a file whose checksum is not that of the manifest."""
    file = checkpoint / name
    if checksum(file) != manifest["checksums"].get(name):
        raise ValueError(f"{file} is damaged or of another save: its checksum is not that of the manifest")
    return torch.load(file, map_location="cpu", weights_only=True)


def checksum(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def plain(value: Any, name: str) -> Any:
    """Returns a copy that can be loaded again. NumPy's numbers become Python's; tensors lose memory they do not show.

    Raises for a value that could be saved but not loaded; `name` says which entry it is.
    """
    if isinstance(value, Tensor):
        return _compact(value.detach())
    if isinstance(value, np.generic) and type(value.item()) in _PLAIN:
        return value.item()
    if type(value) in _PLAIN:
        return value
    if type(value) in (dict, OrderedDict, Counter):
        copied = type(value)()
        for key, entry in value.items():
            copied[plain(key, f"{name}: the key {key!r}")] = plain(entry, f"{name}[{key!r}]")
        if hasattr(value, "_metadata"):  # versions of modules, which load_state_dict looks at
            copied._metadata = value._metadata
        return copied
    if type(value) in (list, tuple, set):
        return type(value)(plain(entry, f"{name}[{i}]") for i, entry in enumerate(value))
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise ValueError(
        f"{name} is a {kind}, which could be saved but not loaded again; keep numbers, strings, tensors, and lists and "
        "dicts of them there"
    )


def _compact(tensor: Tensor) -> Tensor:
    """Returns a tensor without spare storage. torch saves a view's whole storage, even memory never written."""
    if tensor.layout != torch.strided:
        return tensor
    is_whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
    return tensor if is_whole else tensor.clone(memory_format=torch.contiguous_format)


class _Output(io.BufferedWriter):
    """A file that keeps its first error, which torch's writer replaces by one about positions."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "w"))
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.error = self.error or error
            raise
