"""How much memory some tensors hold together, now and at most: the real figure beside a predicted one."""

import threading
import weakref

import torch
from torch import Tensor

from nestpipe.device.streams import is_accelerator
from nestpipe.device.transfer import OfTensors

Key = tuple[int, ...]


class Tally:
    """Tensors that were added count until their memory is free, whoever else may hold it. Any thread may add.

    On a device whole blocks of memory count. In host memory, where a tensor may be a view of somebody's larger one,
    only what was added.
    """

    def __init__(self) -> None:
        self.device: torch.device | None = None
        """where tensors count; None: nowhere"""
        self.peak_bytes = 0
        """the most they have held since `start`"""
        self._held: dict[Key, int] = {}
        self._num_bytes = 0
        self._lock = threading.RLock()  # a finalizer may run in the middle of `add`, in the same thread

    def start(self, device: torch.device) -> None:
        with self._lock:
            self.device, self.peak_bytes = device, self._num_bytes

    def stop(self) -> None:
        self.device = None

    def add(self, *tensors: Tensor | None) -> None:
        if self.device is not None:
            for tensor in tensors:
                if tensor is not None and tensor.device == self.device and tensor.nbytes > 0:
                    self._add(tensor)

    def add_all(self, value: OfTensors) -> None:
        """All tensors of a value."""
        if self.device is not None:
            value.map(self._seen)

    def _seen(self, tensor: Tensor) -> Tensor:
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
            self.peak_bytes = max(self.peak_bytes, self._num_bytes)
            weakref.finalize(storage, self._forget, key).atexit = False

    def _forget(self, key: Key) -> None:
        with self._lock:
            self._num_bytes -= self._held.pop(key)


def whole_device_peak(device: torch.device) -> int | None:
    """The most memory that all tensors of this process have held on an accelerator; None: it is no accelerator."""
    return torch.accelerator.max_memory_allocated(device) if is_accelerator(device) else None


embedding_memory = Tally()
"""of this process: what the embedding part holds, where the model is; the dense part's memory is not in it"""
