"""Streams of an accelerator and marks in them. On a CPU an operation is over when it returns, so all this does nothing.

A lane of an accelerator is a thread with its own stream, which runs later and in order what the thread enqueues. A mark
is a moment of a stream: another stream can wait for it without making a thread wait.
"""

import threading
from contextlib import AbstractContextManager, nullcontext
from weakref import WeakSet

import torch
from torch import Tensor

Mark = torch.Event | None
"""A moment of a stream; None if it has passed already."""


def default_device() -> str:
    """Returns the kind of accelerator that torch finds, or "cpu"."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def full_device(name: torch.device | str) -> torch.device:
    """Returns the device with its index, the current one if the name has none. Raises if the device does not exist."""
    device = _known(name)
    if not is_accelerator(device):
        return device
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count()
    if accelerator is None or accelerator.type != device.type or (device.index or 0) >= count:
        available = "no accelerator" if accelerator is None else f"{count} of {accelerator.type}"
        raise ValueError(
            f"there is no {device} here, torch finds {available}; set runtime.device, or World's, to what there is"
        )
    return device if device.index is not None else torch.device(device.type, torch.accelerator.current_device_index())


def _known(name: torch.device | str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"{name!r} is not a device that torch knows; give cpu, cuda or cuda:1, for example") from error


def device_of_rank(name: str | torch.device, local_rank: int) -> torch.device:
    """Returns the device of one of several processes on this machine. Processes share devices if those are fewer."""
    device = full_device(name)
    if is_accelerator(device) and _known(name).index is None:
        torch.accelerator.set_device_index(local_rank % torch.accelerator.device_count())
    return full_device(name)


def is_accelerator(device: torch.device) -> bool:
    return device.type != "cpu"


def with_streams(device: torch.device | None) -> torch.device | None:
    """Returns the device if it has streams, whose events can be timed; else None."""
    return device if device is not None and is_accelerator(device) else None


def mark(device: torch.device) -> Mark:
    """Marks the moment after everything that this thread's stream has been given so far."""
    return torch.accelerator.current_stream(device).record_event() if is_accelerator(device) else None


def wait_for(moment: Mark) -> None:
    """Makes this thread's stream wait for a mark before anything it is given later. The thread does not wait."""
    if moment is not None:
        torch.accelerator.current_stream(moment.device).wait_event(moment)


def finish(device: torch.device) -> None:
    """Makes this thread wait until its stream has done everything it was given."""
    if is_accelerator(device):
        torch.accelerator.current_stream(device).synchronize()


def finish_all(device: torch.device) -> None:
    """Makes this thread wait until all streams have done everything they were given."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def use_here(*tensors: Tensor | None) -> None:
    """Keeps the memory of tensors made in another stream from being reused until this thread's stream is done."""
    for tensor in tensors:
        if tensor is not None and is_accelerator(tensor.device):
            tensor.record_stream(torch.accelerator.current_stream(tensor.device))


class Streams:
    """One stream for each lane, kept as long as the world lives: torch reuses a stream's memory in that stream only."""

    def __init__(self, device: torch.device, is_exclusive: bool = False) -> None:
        """is_exclusive: raise an error rather than share a stream with others."""
        self.device = device
        self.is_exclusive = is_exclusive
        self._by_lane: dict[str, torch.Stream] = {}
        with _lock:
            _alive.add(self)

    def on_lane(self, lane: str) -> AbstractContextManager[object]:
        """Returns a context in which this thread enqueues into the lane's stream."""
        return self.stream(lane) if is_accelerator(self.device) else nullcontext()

    def stream(self, lane: str) -> torch.Stream:
        with _lock:
            if lane not in self._by_lane:
                self._by_lane[lane] = self._draw(_FIRST if lane in _URGENT_LANES else 0)
            return self._by_lane[lane]

    def _draw(self, priority: int) -> torch.Stream:
        """Returns a stream that is not in use, if there is one. torch hands out the same few streams in turn.

        Lanes that share a stream wait for each other, and what one enqueues while the other records a graph becomes
        part of that graph.
        """
        others = [streams for streams in _alive if streams.device == self.device]
        for avoided in (others,) if self.is_exclusive else (others, [o for o in others if o.is_exclusive]):
            taken = {stream.stream_id for streams in avoided for stream in streams._by_lane.values()}
            for _ in range(NUM_DRAWS):
                stream = torch.Stream(self.device, priority=priority)
                if stream.stream_id not in taken:
                    return stream
        raise RuntimeError(f"{self.device} has no stream left that is not in use; delete worlds that are not needed")


_URGENT_LANES = ("upload",)
"""Lanes with many short kernels, for whose results a thread waits. Without priority each would wait for a long kernel
of the model to end."""
_FIRST = -1
NUM_DRAWS = 128
"""Attempts to get an unused stream: more than torch has streams for a device."""
_alive: WeakSet[Streams] = WeakSet()
_lock = threading.RLock()  # reentrant: a world may be finalized while the lock is held
