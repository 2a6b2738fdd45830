"""Counts the memory that some tensors hold together, to check a prediction."""

import threading
import weakref

import torch
from torch import Tensor

from nestpipe.device.streams import is_accelerator
from nestpipe.device.transfer import OfTensors

Key = tuple[int, ...]


class Tally:
    """Counts tensors from when they are added until their memory is freed. Any thread may add tensors.

    On a device the whole storage of a tensor counts. In host memory, where a tensor may be a view of a much larger
    storage, only the tensor itself counts.
    """

    def __init__(self) -> None:
        self.device: torch.device | None = None
        """Device whose tensors count; None if the tally is stopped."""
        self.peak_bytes = 0
        """Largest number of bytes held since `start`."""
        self._held: dict[Key, int] = {}
        self._num_bytes = 0
        self._arrays: dict[int, tuple[torch.device, int]] = {}
        """Bytes of arrays that grow."""
        self._lock = threading.RLock()  # reentrant: a finalizer may run in the middle of `add`, in the same thread

    def start(self, device: torch.device) -> None:
        with self._lock:
            self.device = device
            # What other runs of this process still hold does not count.
            self._held.clear()
            self._arrays.clear()
            self._num_bytes = self.peak_bytes = 0

    def stop(self) -> None:
        self.device = None

    def add(self, *tensors: Tensor | None) -> None:
        if self.device is not None:
            for tensor in tensors:
                if tensor is not None and tensor.device == self.device and tensor.nbytes > 0:
                    self._add(tensor)

    def add_all(self, value: OfTensors) -> None:
        """Adds all tensors of a value."""
        if self.device is not None:
            value.map(self._add_and_return)

    def _add_and_return(self, tensor: Tensor) -> Tensor:
        self.add(tensor)
        return tensor

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key: Key = (storage._cdata,)
        num_bytes = storage.nbytes()
        if not is_accelerator(tensor.device):
            key, num_bytes = (storage._cdata, int(tensor.storage_offset()), tensor.nbytes), tensor.nbytes
        with self._lock:
            if key in self._held:
                return
            self._held[key] = num_bytes
            self._num_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self._total())
            weakref.finalize(storage, self._forget, key).atexit = False

    def resize(self, owner: object, device: torch.device, num_bytes: int) -> None:
        """Sets the bytes that an array holds, from now until it is freed or the tally is started again."""
        if self.device is None:
            return
        with self._lock:
            if id(owner) not in self._arrays:
                weakref.finalize(owner, self._arrays.pop, id(owner), None).atexit = False
            self._arrays[id(owner)] = device, num_bytes
            self.peak_bytes = max(self.peak_bytes, self._total())

    def _total(self) -> int:
        return self._num_bytes + sum(size for device, size in self._arrays.values() if device == self.device)

    def _forget(self, key: Key) -> None:
        with self._lock:
            self._num_bytes -= self._held.pop(key, 0)


def whole_device_peak(device: torch.device) -> int | None:
    """Returns the largest number of bytes that this process has allocated on an accelerator; None for a CPU."""
    return torch.accelerator.max_memory_allocated(device) if is_accelerator(device) else None


embedding_memory = Tally()
"""Memory of the embedding part of this process, on the model's device. The dense part is not counted."""
