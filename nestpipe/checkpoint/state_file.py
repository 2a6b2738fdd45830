"""The file of everything in a checkpoint that is not an embedding row: nested plain values with tensors.

It is one safetensors file, so other programs can open it too. Tensors are named by their paths, such as
"model/layer.weight". A JSON text, the structure, says how values and tensors nest; it is in the file's metadata.
Reading looks up types in fixed tables and never runs code from the file, as unpickling could.

In the structure, None, booleans, strings, lists, and most numbers are those of JSON. Other values are objects:

    {"int": "0x..."}, {"float": bits}, {"complex": bits}, {"str": bytes}    what JSON would change; in hexadecimal
    {"bytes": base64}, {"bytearray": base64}, {"dtype": name}, {"device": name}, {"size": integers}
    {"tuple": entries}, {"set": entries}
    {"dict": pairs}, {"ordered_dict": pairs}, {"counter": pairs}            with "metadata", as a state_dict may have
    {"tensor": name in the file, "dtype": name, "shape": integers}          complex numbers are pairs in the file
    {"sparse": [indices, values], "shape": integers, "coalesced": boolean}
"""

import errno
import hashlib
import json
import math
import os
import re
import stat
import struct
from base64 import b64decode, b64encode
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from nestpipe.checkpoint.dtensors import is_sharded
from nestpipe.checkpoint.folder import with_file_name

VERSION = 1
METADATA_KEY = "nestpipe.state"
STRUCTURE_TENSOR = "nestpipe.structure"
MAX_METADATA_CHARACTERS = 10_000_000
"""A longer structure is stored as a tensor of its own, since safetensors limits the file's header to 100 MB."""
MAX_DEPTH = 100
"""Levels of nested containers. The limit also catches a container that holds itself."""

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_COMPLEX = {torch.complex32, torch.complex64, torch.complex128}
_STORED = {
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32),
    *(torch.int64, torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float4_e2m1fn_x2),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
}
"""Types that safetensors can hold, apart from complex64, which is stored like the other complex types."""
_SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a character, in a text that is not valid Unicode. JSON would join two halves to one character."""
_DICTS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "ordered_dict": OrderedDict, "counter": Counter}
_DICT_TAGS = {kind: tag for tag, kind in _DICTS.items()}


class Written(NamedTuple):
    """Checksum (SHA-256) and size of a file that is on disk."""

    checksum: str
    num_bytes: int


@dataclass(frozen=True)
class EncodedState:
    """A nested value as it is written: copies of its tensors in host memory, and the structure as a JSON text."""

    tensors: dict[str, Tensor]
    structure: str


def encode(value: Any, name: str) -> EncodedState:
    """Returns a copy of a nested value, as named tensors and a text. The caller may change the value afterwards.

    Entries that are the same tensor, such as tied weights, are stored once. NumPy's numbers become Python's.

    Sharded tensors (DTensors) are stored whole. They are gathered by a collective, so all of their ranks must encode
    the same entries in the same order.

    Raises ValueError for a value that could not be loaded again; `name` says which value it is.
    """
    encoder = _Encoder(name)
    structure = json.dumps({"version": VERSION, "value": encoder.encode(value)}, allow_nan=False, separators=(",", ":"))
    return EncodedState(encoder.tensors, structure)


def write_state(file: Path, state: EncodedState) -> Written:
    """Writes a state and syncs it to disk. The same content gives the same bytes.

    Raises OSError with the file's name if the disk is full or the file cannot be written.
    """
    library = _safetensors()
    tensors, text = state.tensors, state.structure
    if len(text) > MAX_METADATA_CHARACTERS:
        tensors = {**tensors, STRUCTURE_TENSOR: torch.frombuffer(bytearray(text, "ascii"), dtype=torch.uint8)}
        text = ""
    try:
        with file.open("wb") as out:
            mode = stat.S_IMODE(os.fstat(out.fileno()).st_mode)
        library.torch.save_file(tensors, file, metadata={METADATA_KEY: text})  # several keys would have a random order
        file.chmod(mode)  # safetensors puts a temporary file in its place, which only its owner can read
        with file.open("rb") as written:
            os.fsync(written.fileno())
            checksum = hashlib.file_digest(written, "sha256").hexdigest()
            return Written(checksum, os.fstat(written.fileno()).st_size)
    except OSError as error:
        raise with_file_name(error, file) from None
    except library.SafetensorError as error:
        raise with_file_name(_os_error(error), file) from None


def read_state(file: Path, expected: Written | None) -> Any:
    """Returns the value in a file, in host memory. Tensors that were one tensor in `encode` are one again.

    Raises ValueError if the file is not as `expected`, if it is given, or is not a state file.
    """
    library = _safetensors()
    with file.open("rb") as stored:
        if expected is not None:
            is_expected = os.fstat(stored.fileno()).st_size == expected.num_bytes
            if not is_expected or hashlib.file_digest(stored, "sha256").hexdigest() != expected.checksum:
                raise ValueError(f"{file} is damaged or of another save: its checksum is not that of the manifest")
    try:
        with library.safe_open(file, framework="pt") as tensors:
            return _Decoder(tensors).decode_file()
    except MemoryError:
        raise
    except Exception as error:  # the bytes may be anything, so any part of the libraries may reject them
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{file} is not a state file of nestpipe, or it is damaged ({reason})") from None


def _safetensors() -> Any:
    """Returns the library, which is imported only here: training without checkpoints does not need it."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(f"checkpoints need safetensors; install it with: pip install safetensors ({error})") from None
    return safetensors


def _os_error(error: Exception) -> OSError:
    """Returns the error of the operating system that safetensors reports as a text."""
    code = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(code[1]), os.strerror(int(code[1]))) if code else OSError(errno.EIO, str(error))


class _Encoder:
    """Encodes one value. Keeps the path to the current entry, which names tensors and errors."""

    def __init__(self, name: str) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._name = name
        self._path: list[tuple[str, Any]] = []
        self._tensor_names: dict[Any, str] = {}

    def encode(self, value: Any) -> Any:
        """Returns the JSON of a value."""
        scalar = _encode_scalar(value)
        if scalar is not NotImplemented:
            return scalar
        if isinstance(value, Tensor):
            return self._encode_tensor(value)
        if len(self._path) >= MAX_DEPTH:
            raise ValueError(f"{self._label()} is nested more than {MAX_DEPTH} levels deep, or holds itself")
        if type(value) is list:
            return self._encode_entries("entry", value)
        if type(value) is tuple:
            return {"tuple": self._encode_entries("entry", value)}
        if type(value) is set:  # the order of strings in a set differs between processes
            return {"set": sorted(self._encode_entries("member", value), key=json.dumps)}
        if type(value) in _DICT_TAGS:
            return self._encode_dict(value)
        raise self._refusal(_type_name(value))

    def _encode_entries(self, role: str, entries: Iterable[Any]) -> list[Any]:
        return [self._encode_entry(role, i, entry) for i, entry in enumerate(entries)]

    def _encode_dict(self, value: Any) -> dict[str, Any]:
        pairs = [
            [self._encode_entry("key", key, key), self._encode_entry("entry", key, entry)]
            for key, entry in value.items()
        ]
        encoded: dict[str, Any] = {_DICT_TAGS[type(value)]: pairs}
        if hasattr(value, "_metadata"):  # versions of modules, which load_state_dict looks at
            encoded["metadata"] = self._encode_entry("entry", "_metadata", value._metadata)
        return encoded

    def _encode_entry(self, role: str, key: Any, value: Any) -> Any:
        """role: "entry" of a list or a dict; or for a hashed value, "key" of a dict or "member" of a set."""
        scalar = _encode_scalar(value)
        if scalar is not NotImplemented:  # most entries: no path is needed
            return scalar
        self._path.append((role, key))
        encoded = self.encode(value)
        self._path.pop()
        return encoded

    def _encode_tensor(self, value: Tensor) -> dict[str, Any]:
        if any(role != "entry" for role, _ in self._path):
            raise self._refusal("tensor that serves as a key or is in a set")
        if is_lazy(value) or value.is_meta:
            raise self._refusal("tensor without values")
        source = value.detach()
        if is_sharded(source):
            return self._encode_sharded(source)
        if type(source) is not Tensor:
            raise self._refusal(_type_name(source))
        if source.layout == torch.strided and not source.is_nested:
            return self._store(source, _identity(source), "")
        if source.layout != torch.sparse_coo:
            raise self._refusal(f"{'nested ' if source.is_nested else ''}tensor of layout {source.layout}")
        indices, values = source._indices(), source._values()
        parts = [self._store(indices, _identity(indices), "indices"), self._store(values, _identity(values), "values")]
        return {"sparse": parts, "shape": list(source.shape), "coalesced": source.is_coalesced()}

    def _encode_sharded(self, source: Any) -> dict[str, Any]:
        """Stores all of a DTensor. Every entry is gathered, even one stored already: ranks may see other ties."""
        full, local = source.full_tensor(), source.to_local()
        identity = _identity(local)
        placement = (tuple(source.shape), source.placements, source.device_mesh)
        return self._store(full, None if identity is None else (*identity, *placement), "")

    def _store(self, source: Tensor, identity: tuple[Any, ...] | None, suffix: str) -> dict[str, Any]:
        """Copies a tensor to host memory, unless a tensor of the same identity is there."""
        is_complex, is_packed = source.dtype in _COMPLEX, source.dtype == torch.float4_e2m1fn_x2
        if not (is_complex or source.dtype in _STORED) or (is_packed and source.ndim == 0):
            raise self._refusal(f"tensor of dtype {source.dtype} and shape {list(source.shape)}")
        name = self._tensor_names.get(identity) if identity is not None else None
        if name is None:
            name = self._new_name(suffix)
            copied = source.to("cpu", copy=True, memory_format=torch.contiguous_format)
            self.tensors[name] = torch.view_as_real(copied) if is_complex else copied
            if identity is not None:
                self._tensor_names[identity] = name
        return {"tensor": name, "dtype": str(source.dtype).removeprefix("torch."), "shape": list(source.shape)}

    def _new_name(self, suffix: str) -> str:
        """Returns the path of the current entry, with a number if another tensor has that name."""
        parts = [key if isinstance(key, str) else _repr(key) for _, key in self._path]
        path = "/".join([*parts, *([suffix] if suffix else [])]) or "value"
        path = name = path.encode("utf-8", "backslashreplace").decode()
        number = 1
        while name in self.tensors or name in ("__metadata__", STRUCTURE_TENSOR):
            number += 1
            name = f"{path}~{number}"
        return name

    def _label(self) -> str:
        labels = [f": the key {_repr(key)}" if role == "key" else f"[{_repr(key)}]" for role, key in self._path]
        return self._name + "".join(labels)

    def _refusal(self, kind: str) -> ValueError:
        return ValueError(
            f"{self._label()} is a {kind}, which could be saved but not loaded again; keep numbers, strings, tensors, "
            "and lists and dicts of them there"
        )


def _encode_scalar(value: Any) -> Any:
    """Returns the JSON of a value without entries, or NotImplemented for another value."""
    if isinstance(value, np.generic):
        value = value.item()
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        return {"str": value.encode("utf-8", "surrogatepass").hex()} if _SURROGATE.search(value) else value
    if kind is int:
        return value if abs(value) < 2**53 else {"int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
    if kind is complex:
        return {"complex": struct.pack(">dd", value.real, value.imag).hex()}
    if kind in (bytes, bytearray):
        return {kind.__name__: b64encode(value).decode()}
    if kind is torch.dtype:
        return {"dtype": str(value).removeprefix("torch.")}
    if kind is torch.device:
        return {"device": str(value)}
    if kind is torch.Size:
        return {"size": list(value)}
    return NotImplemented


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _repr(key: Any) -> str:
    try:
        return repr(key)
    except ValueError:  # Python does not print integers of more than 4,300 digits
        return f"a {type(key).__name__} with a very large integer"


def _identity(tensor: Tensor) -> tuple[Any, ...] | None:
    """Returns values that only the same tensor has, or None for an empty one: it has no address."""
    if tensor.numel() == 0:
        return None
    layout = (tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg())
    return (tensor.data_ptr(), tensor.dtype, tensor.device, *layout)


class _Decoder:
    """Decodes one file. `stored` is an open safetensors file."""

    def __init__(self, stored: Any) -> None:
        self._stored = stored
        self._names = set(stored.keys())
        self._tensors: dict[str, Tensor] = {}

    def decode_file(self) -> Any:
        structure = (self._stored.metadata() or {}).get(METADATA_KEY)
        if structure is None:
            raise ValueError("it was written by another program")
        if not structure:
            self._names.remove(STRUCTURE_TENSOR)
            structure = self._stored.get_tensor(STRUCTURE_TENSOR).numpy().tobytes().decode("ascii")
        content = json.loads(structure)
        if content["version"] != VERSION:
            raise ValueError(f"its version is {content['version']}, this nestpipe reads version {VERSION}")
        value = self._decode(content["value"], 0)
        if self._tensors.keys() != self._names:
            raise ValueError("it holds tensors that its structure does not name")
        return value

    def _decode(self, encoded: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
        match encoded:
            case None | bool() | int() | float() | str():
                return encoded
            case list():
                return [self._decode(entry, depth + 1) for entry in encoded]
            case {"tuple": list(entries)}:
                return tuple(self._decode(entry, depth + 1) for entry in entries)
            case {"set": list(entries)}:
                return {self._decode(entry, depth + 1) for entry in entries}
            case {"dict": list()} | {"ordered_dict": list()} | {"counter": list()}:
                return self._decode_dict(encoded, depth)
            case {"tensor": str(), "dtype": str(), "shape": list()}:
                return self._decode_tensor(encoded)
            case {"sparse": [dict(indices), dict(values)], "shape": list(shape), "coalesced": bool(is_coalesced)}:
                parts = self._decode_tensor(indices), self._decode_tensor(values)
                return torch.sparse_coo_tensor(*parts, shape, is_coalesced=is_coalesced, check_invariants=True)
        return _decode_scalar(encoded)

    def _decode_dict(self, encoded: dict[str, Any], depth: int) -> dict[Any, Any]:
        tag = next(tag for tag in _DICTS if tag in encoded)
        decoded = _DICTS[tag]()
        for key, entry in encoded[tag]:
            decoded[self._decode(key, depth + 1)] = self._decode(entry, depth + 1)
        if len(decoded) != len(encoded[tag]):
            raise ValueError("a dict has a key twice")
        if "metadata" in encoded:
            decoded._metadata = self._decode(encoded["metadata"], depth + 1)  # type: ignore[attr-defined]
        return decoded

    def _decode_tensor(self, encoded: dict[str, Any]) -> Tensor:
        name, dtype, shape = encoded["tensor"], _DTYPES[encoded["dtype"]], encoded["shape"]
        if name not in self._tensors:
            stored = self._stored.get_tensor(name).clone()  # the file may be removed: nothing may refer to its memory
            self._tensors[name] = torch.view_as_complex(stored) if dtype in _COMPLEX else stored
        tensor = self._tensors[name]
        if tensor.dtype != dtype or list(tensor.shape) != shape:
            raise ValueError(f"its tensor {name} is of type {tensor.dtype} and shape {list(tensor.shape)}")
        return tensor


def _decode_scalar(encoded: Any) -> Any:
    match encoded:
        case {"int": str(digits)}:
            return int(digits, 16)
        case {"float": str(bits)}:
            return struct.unpack(">d", bytes.fromhex(bits))[0]
        case {"complex": str(bits)}:
            return complex(*struct.unpack(">dd", bytes.fromhex(bits)))
        case {"str": str(text)}:
            return bytes.fromhex(text).decode("utf-8", "surrogatepass")
        case {"bytes": str(text)}:
            return b64decode(text, validate=True)
        case {"bytearray": str(text)}:
            return bytearray(b64decode(text, validate=True))
        case {"dtype": str(name)}:
            return _DTYPES[name]
        case {"device": str(name)}:
            return torch.device(name)
        case {"size": list(lengths)}:
            return torch.Size(lengths)
    raise ValueError(f"its structure has an unknown entry, {str(encoded)[:100]}")
