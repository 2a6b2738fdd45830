"""The state file gives back what was saved, to the last bit, and refuses what it cannot give back or did not write."""

import ctypes
import errno
import json
import math
import os
import pickle
import resource
import stat
import struct
import sys
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from nestpipe import World
from nestpipe.checkpoint import state_file
from nestpipe.checkpoint.state_file import EncodedState, encode, read_state, write_state
from tests.ranks import run_ranks

CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 0x40000
pytestmark = pytest.mark.filterwarnings("ignore:(ComplexHalf|Sparse|Lazy):UserWarning")  # of torch, about itself
DTYPES = sorted({*safetensors.torch._SIZE, torch.complex32, torch.complex128}, key=str)


def bits(value: Any) -> Any:
    """Returns a value in which types, bits, and order are compared by ==."""
    if isinstance(value, Tensor) and value.layout == torch.sparse_coo:
        return ("sparse", value.is_coalesced(), tuple(value.shape), bits(value._indices()), bits(value._values()))
    if isinstance(value, Tensor):
        flat = value.contiguous().resolve_conj().resolve_neg().view(-1)
        return (str(value.dtype), tuple(value.shape), flat.view(torch.uint8).tolist() if len(flat) else [])
    if isinstance(value, float | complex):
        return (type(value), struct.pack(">dd", value.real, value.imag))
    if isinstance(value, dict):
        pairs = [(bits(key), bits(entry)) for key, entry in value.items()]
        return (type(value), pairs, bits(getattr(value, "_metadata", None)))
    if isinstance(value, set):
        return (set, sorted(repr(bits(entry)) for entry in value))
    if type(value) in (list, tuple):
        return (type(value), [bits(entry) for entry in value])
    return (type(value), value)


def round_trip(value: Any, path: Path) -> Any:
    return read_state(path, write_state(path, encode(value, "state")))


def random_tensor(dtype: torch.dtype, shape: list[int], seed: int) -> Tensor:
    """Returns a tensor of random bits."""
    tensor = torch.empty(shape, dtype=dtype)
    raw = np.random.default_rng(seed).integers(0, 2 if dtype == torch.bool else 256, tensor.nbytes, np.uint8)
    return tensor if tensor.numel() == 0 else torch.from_numpy(raw).view(dtype).reshape(shape)


strings = st.text(st.characters(exclude_categories=()))  # lone surrogates, too
scalars = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.integers(2**52, 2**70), st.floats(), st.complex_numbers(), strings),
    *(st.binary(), st.sampled_from([torch.float32, torch.quint8, torch.device("cuda:1"), torch.device("cpu")])),
    st.lists(st.integers(0, 2**62), max_size=3).map(torch.Size),
)
keys = st.recursive(scalars, lambda inner: st.lists(inner, max_size=2).map(tuple), max_leaves=3)
tensors = st.builds(
    random_tensor, st.sampled_from(DTYPES), st.lists(st.integers(0, 3), min_size=1, max_size=3), st.integers(0, 99)
)
values = st.recursive(
    st.one_of(scalars, tensors, st.binary().map(bytearray)),
    lambda inner: st.one_of(
        *(st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple), st.sets(keys, max_size=3)),
        *(st.dictionaries(keys, inner, max_size=3), st.dictionaries(keys, inner, max_size=3).map(OrderedDict)),
        st.dictionaries(keys, inner, max_size=3).map(Counter),
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=values)
@example(value="\ud800\udc00")
def test_comes_back(tmp_path: Path, value: Any) -> None:
    """Types, bits, and order come back, and the same value gives the same bytes.

    Fails, for example, if `_encode_scalar` writes infinite floats or surrogates as JSON's own, or if `_decode` returns
    lists for tuples.
    """
    loaded = round_trip(value, tmp_path / "one")
    assert bits(loaded) == bits(value)
    write_state(tmp_path / "two", encode(loaded, "state"))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    """Fails if a type is missing in `_STORED`, or if `_store` does not keep the shape of scalars and empty tensors."""
    shapes = [[3, 2], [0], [2, 0, 3], [1, 1, 1], *([[]] if dtype != torch.float4_e2m1fn_x2 else [])]
    value = [random_tensor(dtype, shape, 0) for shape in shapes]
    assert bits(round_trip(value, tmp_path / "file")) == bits(value)


def test_sparse_tensors(tmp_path: Path) -> None:
    """Fails if `_encode_tensor` coalesces, or if "coalesced" is not kept."""
    twice = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.ones(2, 3), (4, 3))
    value = [torch.eye(3).to_sparse(), twice, torch.zeros(3, 2, dtype=torch.complex64).to_sparse(), twice.conj()]
    loaded = round_trip(value, tmp_path / "file")
    assert bits(loaded) == bits(value)
    assert [tensor.is_coalesced() for tensor in loaded] == [True, False, True, False]


def test_order_in_a_set() -> None:
    """Fails if `encode` does not sort the members of a set: these two are in one place of the hash table."""
    assert list({0, 8}) != list({8, 0})
    assert encode({0, 8}, "state") == encode({8, 0}, "state")


class Extra(nn.Linear):
    """A layer with extra state."""

    def get_extra_state(self) -> object:
        return {"seen": 3, "mean": torch.ones(2)}

    def set_extra_state(self, state: object) -> None:
        assert bits(state) == bits(self.get_extra_state())


def test_training_state(tmp_path: Path) -> None:
    """Fails if `_encode_dict` leaves out `_metadata`: BatchNorm then loads as of version 1, without its counter."""
    model = nn.Sequential(Extra(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, weight_decay=math.inf)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 2, 5])
    model(torch.rand(4, 3)).square().sum().backward()
    optimizer.step()
    schedule.step()
    value = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
    value["random"] = {"torch": torch.get_rng_state(), "python": (3, (2**31, 5), None)}
    loaded = round_trip(value, tmp_path / "file")
    assert bits(loaded) == bits(value)
    assert loaded["model"]._metadata["1"]["version"] == 2
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    schedule.load_state_dict(loaded["schedule"])
    assert "optimizer/state/0/exp_avg" in encode(value, "state").tensors


def test_tied_tensors(tmp_path: Path) -> None:
    """Fails if `_identity` leaves out the stride or the conjugation, or if `_decode_tensor` reads a tensor twice."""
    weight, number = torch.rand(3, 3), torch.ones(3, dtype=torch.complex64) * 1j
    value = {"a": weight, "b": nn.Parameter(weight), "t": weight.t(), "row": weight[0], "n": number, "c": number.conj()}
    state = encode(value, "state")
    assert list(state.tensors) == ["a", "t", "row", "n", "c"]
    loaded = round_trip(value, tmp_path / "file")
    assert loaded["a"] is loaded["b"]
    assert bits(loaded) == bits({**value, "b": weight})


def test_views_and_later_changes(tmp_path: Path) -> None:
    """Fails if `_store` keeps views, or tensors of the caller."""
    large = torch.zeros(1_000_000)
    value = {"part": large[5:8], "every second": large[:6:2], "one for all": torch.ones(1).expand(4)}
    state = encode(value, "state")
    value["part"].fill_(7)
    assert all(tensor.untyped_storage().nbytes() <= 16 for tensor in state.tensors.values())
    written = write_state(tmp_path / "file", state)
    assert written.num_bytes < 2000
    loaded = read_state(tmp_path / "file", written)
    assert loaded["part"].tolist() == [0, 0, 0]
    with (tmp_path / "file").open("r+b") as file:
        file.write(bytes(written.num_bytes))  # the loaded tensors must not be in the memory of the file
    assert loaded["one for all"].tolist() == [1, 1, 1, 1]


def test_names_of_tensors(tmp_path: Path) -> None:
    """Fails if `_new_name` does not number equal names, or does not know names that safetensors reserves; or if
    `_encode_scalar` writes large integers as JSON's own."""
    one = torch.ones(1)
    value: dict[Any, Any] = {
        "a": {"b": one, 0: one + 1},
        "a/b": one + 2,
        "__metadata__": one + 3,
        "\ud800": one + 4,
        ("x", 1): [one + 5],
    }
    value |= {state_file.STRUCTURE_TENSOR: one + 6, 10**5000: one + 7}
    names = ["a/b", "a/0", "a/b~2", "__metadata__~2", "\\ud800", "('x', 1)/0", f"{state_file.STRUCTURE_TENSOR}~2"]
    assert list(encode(value, "state").tensors)[:-1] == names
    assert bits(round_trip(value, tmp_path / "file")) == bits(value)
    assert list(encode(one, "state").tensors) == ["value"]


def test_long_structure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if `write_state` puts a text of any length into the header, which safetensors limits."""
    monkeypatch.setattr(state_file, "MAX_METADATA_CHARACTERS", 10)
    value = {"numbers": list(range(100)), "tensor": torch.ones(2)}
    assert bits(round_trip(value, tmp_path / "file")) == bits(value)
    assert state_file.STRUCTURE_TENSOR in safetensors.torch.load_file(tmp_path / "file")


class Subclass(Tensor):
    """A tensor of another program's type."""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"where": [1, Path()]}, r"state\['where'\]\[1\] is a pathlib.PosixPath, which could be saved but not loaded"),
        ({(1, Path("a")): 2}, r"state: the key \(1, PosixPath\('a'\)\)\[1\] is a pathlib.PosixPath, which could"),
        ([np.datetime64("2020-01-01")], r"state\[0\] is a numpy.datetime64, "),
        ([np.ones(2)], r"state\[0\] is a numpy.ndarray, "),
        (np.longdouble(1), "state is a numpy.longdouble, "),
        ([torch.ones(2).as_subclass(Subclass)], r"state\[0\] is a tests.checkpoint.test_state_file.Subclass, "),
        (lambda: [torch.eye(2).to_sparse_csr()], r"state\[0\] is a tensor of layout torch.sparse_csr, "),
        ([torch.empty(2, dtype=torch.bits8)], r"state\[0\] is a tensor of dtype torch.bits8 "),
        ([torch.ones(2, device="meta")], r"state\[0\] is a tensor without values, "),
        (lambda: [nn.LazyLinear(2).weight], r"state\[0\] is a tensor without values, "),
        ({torch.ones(2)}, r"state\[0\] is a tensor that serves as a key or is in a set, "),
        ({"a": frozenset()}, r"state\['a'\] is a builtins.frozenset, "),
    ],
)
def test_what_could_not_be_loaded(value: Any, text: str) -> None:
    """Fails if `encode` passes on an entry that it does not know, or names another one."""
    with pytest.raises(ValueError, match=text):
        encode(value() if callable(value) else value, "state")


def test_a_list_that_holds_itself() -> None:
    """Fails if `encode` does not look at the depth."""
    value: list[Any] = []
    value.append(value)
    with pytest.raises(ValueError, match="more than 100 levels deep, or holds itself"):
        encode(value, "state")


def test_numpy_numbers(tmp_path: Path) -> None:
    """Fails if `_encode_scalar` does not call `item`."""
    value = {np.int64(3): np.float32(0.5), "b": [np.bool_(True), np.str_("x")]}
    assert bits(round_trip(value, tmp_path / "file")) == bits({3: 0.5, "b": [True, "x"]})


def small_state() -> EncodedState:
    value = {"weight": torch.arange(3.0), "eye": torch.eye(2).to_sparse(), "numbers": (1, math.nan, 2**60, {"a"})}
    return encode([value, torch.float16, OrderedDict(a=b"b")], "state")


def is_refused(file: Path) -> bool:
    """Returns whether a file was refused by its name. Raises any error other than ValueError."""
    try:
        read_state(file, None)
    except ValueError as error:
        return str(file) in str(error)
    return False


def test_damage(tmp_path: Path) -> None:
    """Fails if `read_state` does not compare the checksum, or raises errors of safetensors, JSON or torch."""
    file = tmp_path / "file"
    written = write_state(file, small_state())
    content = file.read_bytes()
    for position in range(len(content)):
        file.write_bytes(
            content[:position] + bytes([content[position] ^ (1 << position % 8)]) + content[position + 1 :]
        )
        is_refused(file)
        with pytest.raises(ValueError, match="is damaged or of another save: its checksum is not that of the manifest"):
            read_state(file, written)
    for length in range(0, len(content), 3):
        file.write_bytes(content[:length])
        assert is_refused(file)
        with pytest.raises(ValueError, match="is damaged or of another save"):
            read_state(file, written)


def foreign_structures() -> list[str]:
    deep: Any = 1
    for _ in range(150):
        deep = [deep]
    tensor = {"tensor": "a", "dtype": "float32", "shape": [2]}
    indices = {"tensor": "i", "dtype": "int64", "shape": [1, 2]}
    wrong = [
        *({"unknown": 1}, {}, {"tuple": 1}, {"set": [[]]}, {"dict": [[[], 1]]}, {"dict": [[1]]}, deep, {"device": "x"}),
        *({"dict": [[1, 1], [1, 2]]}, {"dtype": "load"}, {"dtype": "nn.Linear"}, {"size": ["a"]}),
        *({"bytes": "*"}, {"int": "x"}, {"float": "00"}, {"complex": "0"}, {"str": "ff"}, {**tensor, "tensor": "b"}),
        *({**tensor, "shape": [3]}, {**tensor, "dtype": "int32"}, {**tensor, "dtype": "complex64"}),
        {"sparse": [{**indices, "dtype": "float32"}, tensor], "shape": [4], "coalesced": False},
        {"sparse": [indices, tensor], "shape": [4], "coalesced": True},
        {"sparse": [indices, tensor], "shape": [3], "coalesced": False},
    ]
    texts = [json.dumps({"version": 1, "value": [tensor, indices, value]}) for value in wrong]
    texts += [json.dumps({"version": 1, "value": tensor}), json.dumps({"version": 2, "value": [tensor, indices]})]
    return [*texts, "", "1", "[]", "{", "{}", '{"version":1,"value":' + "[" * 100_000]


@pytest.mark.parametrize("structure", foreign_structures(), ids=lambda text: text[120:180])
def test_foreign_structure(tmp_path: Path, structure: str) -> None:
    """Fails if `_decode_tensor` does not compare the shape, if `_decode` does not look at the depth, if a dtype is
    looked up by getattr, or if `decode_file` does not compare the names of tensors."""
    stored = {"a": torch.ones(2), "i": torch.tensor([[3, 0]])}
    write_state(tmp_path / "file", EncodedState(stored, structure))
    assert is_refused(tmp_path / "file")


class Attack:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


def test_pickles_are_not_run(tmp_path: Path) -> None:
    """Fails if `read_state` falls back to torch.load(weights_only=False)."""
    file, created = tmp_path / "file", tmp_path / "created"
    file.write_bytes(pickle.dumps(Attack(created)))
    assert is_refused(file)
    torch.save(Attack(created), file)
    assert is_refused(file)
    assert not created.exists()
    torch.load(file, weights_only=False)
    assert created.exists()


def test_other_files(tmp_path: Path) -> None:
    """Fails if `_Decoder` does not ask for our metadata, or if a missing file is called damaged."""
    safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / "file")
    with pytest.raises(ValueError, match=r"file is not a state file of nestpipe.*written by another program"):
        read_state(tmp_path / "file", None)
    with pytest.raises(FileNotFoundError):
        read_state(tmp_path / "missing", None)
    with pytest.raises(FileNotFoundError, match="missing/file"):
        write_state(tmp_path / "missing" / "file", small_state())


def test_mode_of_the_file(tmp_path: Path) -> None:
    """Others may read the file if the umask lets them. Fails if `write_state` does not call chmod."""
    before = os.umask(0o027)
    try:
        write_state(tmp_path / "file", small_state())
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def write_too_much(world: World, path: Path) -> list[tuple[int | None, str]]:
    """Returns the errors of a file that is larger than allowed, and of a disk that is full."""
    errors = []
    state = encode(torch.ones(100_000), "state")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    for is_small_disk in (False, True) if os.getuid() == 0 else (False,):
        if is_small_disk:  # mounted for this process only
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            libc = ctypes.CDLL(None, use_errno=True)
            assert libc.unshare(CLONE_NEWNS) == 0
            assert libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) == 0
            assert libc.mount(b"none", str(path).encode(), b"tmpfs", 0, b"size=256k") == 0
        try:
            write_state(path / "file", state)
        except OSError as error:
            errors.append((error.errno, str(error)))
    return errors


def test_full_disk(tmp_path: Path) -> None:
    """Only root can mount a small disk. Fails if `write_state` does not turn SafetensorError into OSError."""
    (errors,) = run_ranks(1, write_too_much, tmp_path)
    assert errors[0] == (errno.EFBIG, f"[Errno 27] File too large: '{tmp_path}/file'")
    assert errors[1:] in ([], [(errno.ENOSPC, f"[Errno 28] no space left on the disk: '{tmp_path}/file'")])


def test_failed_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the file is not synced, or if the error of it has no file name."""

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=f"no space left on the disk: '{tmp_path}/file'"):
        write_state(tmp_path / "file", small_state())


def test_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if state_file.py imports safetensors at its top, or passes on the plain ImportError."""
    state = small_state()
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    for call in (lambda: write_state(tmp_path / "file", state), lambda: read_state(tmp_path / "file", None)):
        with pytest.raises(ImportError, match="pip install safetensors"):
            call()
