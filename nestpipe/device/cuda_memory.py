"""CUDA memory that is added to a reserved range of addresses, by the driver's virtual memory functions."""

import ctypes
from ctypes import POINTER, byref, c_int, c_size_t, c_ubyte, c_uint64, c_ulonglong, c_void_p
from functools import cache

import torch
from torch import Tensor

_OUT_OF_MEMORY = 2
_PINNED, _ON_DEVICE, _READ_WRITE, _RECOMMENDED = 1, 1, 3, 1


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _Allocation(ctypes.Structure):
    """CUmemAllocationProp of cuda.h."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("windows_metadata", c_void_p),
        ("flags", c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc of cuda.h."""

    _fields_ = (("location", _Location), ("flags", c_int))


@cache
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    signatures = {
        "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(_Allocation), c_int),
        "cuMemAddressReserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_ulonglong),
        "cuMemAddressFree": (c_uint64, c_size_t),
        "cuMemCreate": (POINTER(c_ulonglong), c_size_t, POINTER(_Allocation), c_ulonglong),
        "cuMemRelease": (c_ulonglong,),
        "cuMemMap": (c_uint64, c_size_t, c_size_t, c_ulonglong, c_ulonglong),
        "cuMemSetAccess": (c_uint64, c_size_t, POINTER(_Access), c_size_t),
        "cuMemUnmap": (c_uint64, c_size_t),
    }
    for name, arguments in signatures.items():
        getattr(library, name).argtypes = arguments
    return library


def _call(name: str, *arguments: object) -> None:
    status = getattr(_driver(), name)(*arguments)
    if status == _OUT_OF_MEMORY:
        raise MemoryError(
            "the device has no memory left for resident rows; take a smaller batch, more ranks, or a smaller "
            "memory.resident_bytes"
        )
    if status != 0:
        raise RuntimeError(f"{name} failed with CUDA error {status}")


class _Range:
    """A reserved range of addresses, which torch sees as an array. Frees its memory when the last tensor is gone."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self.device = device
        self.allocation = _Allocation(type=_PINNED, location=_Location(_ON_DEVICE, device.index))
        granularity = c_size_t()
        _call("cuMemGetAllocationGranularity", byref(granularity), byref(self.allocation), _RECOMMENDED)
        self.granularity = granularity.value
        self.num_bytes = _round_up(num_bytes, self.granularity)
        self.num_mapped = 0
        self._chunks: list[tuple[int, int]] = []
        address = c_uint64()
        _call("cuMemAddressReserve", byref(address), self.num_bytes, 0, 0, 0)
        self.address = address.value

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 2}

    def map(self, end: int) -> None:
        """Backs the range with memory up to `end`, a multiple of the granularity."""
        num_bytes, start = end - self.num_mapped, self.address + self.num_mapped
        handle = c_ulonglong()
        _call("cuMemCreate", byref(handle), num_bytes, byref(self.allocation), 0)
        try:
            _call("cuMemMap", start, num_bytes, 0, handle, 0)
        finally:
            _call("cuMemRelease", handle)  # a mapping keeps the memory
        self._chunks.append((start, num_bytes))
        self.num_mapped = end
        access = _Access(self.allocation.location, _READ_WRITE)
        _call("cuMemSetAccess", start, num_bytes, byref(access), 1)

    def __del__(self) -> None:
        if hasattr(self, "address"):
            torch.cuda.synchronize(self.device)  # kernels may still use it
            for start, num_bytes in self._chunks:
                _call("cuMemUnmap", start, num_bytes)
            _call("cuMemAddressFree", self.address, self.num_bytes)


class CudaMemory:
    """Memory of a CUDA device for one growing array."""

    def __init__(self, device: torch.device, most_bytes: int | None) -> None:
        torch.cuda.init()
        with torch.cuda.device(device):
            _, physical = torch.cuda.mem_get_info(device)
            self.most_bytes = most_bytes if most_bytes is not None else physical
            self._range = _Range(device, self.most_bytes)
            self._range.map(self._range.granularity)  # torch looks up the first address
            self._bytes = torch.as_tensor(self._range, device=device)

    def elements(self, dtype: torch.dtype) -> Tensor:
        return self._bytes[: self.most_bytes // dtype.itemsize * dtype.itemsize].view(dtype)

    def back(self, num_bytes: int) -> None:
        mapped = self._range
        end = _round_up(num_bytes, mapped.granularity)
        if end <= mapped.num_mapped:
            return
        with torch.cuda.device(mapped.device):
            try:
                mapped.map(end)
            except MemoryError:
                torch.cuda.empty_cache()  # torch may hold memory that it does not use
                mapped.map(end)


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
