"""Streams and their marks. A CPU has none: there an operation is over when it returns, and nothing here does anything.

A lane of an accelerator is a thread with a stream of its own. What it enqueues is done later, in order; a mark says how
far a stream had got, so that another stream can go on from there while no thread waits.
"""

import threading
from contextlib import AbstractContextManager, nullcontext
from weakref import WeakSet

import torch
from torch import Tensor

Mark = torch.Event | None
"""a moment of a stream; None: it has passed"""


def default_device() -> str:
    """The accelerator that torch finds, or the CPU."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if found is None else found.type


def full_device(name: torch.device | str) -> torch.device:
    """With its number, as tensors say where they are: without one it is the current one. It must be there."""
    device = _known(name)
    if not is_accelerator(device):
        return device
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type != device.type or (device.index or 0) >= torch.accelerator.device_count():
        there = "no accelerator" if found is None else f"{torch.accelerator.device_count()} of {found.type}"
        raise ValueError(
            f"there is no {device} here, torch finds {there}; set runtime.device, or World's, to what there is"
        )
    return device if device.index is not None else torch.device(device.type, torch.accelerator.current_device_index())


def _known(name: torch.device | str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"{name!r} is no device that torch knows; cpu, cuda or cuda:1, for example") from error


def device_of_rank(name: str | torch.device, local_rank: int) -> torch.device:
    """That of one of several processes on this machine: they share devices if there are more of them than devices."""
    device = full_device(name)
    if is_accelerator(device) and _known(name).index is None:
        torch.accelerator.set_device_index(local_rank % torch.accelerator.device_count())
    return full_device(name)


def is_accelerator(device: torch.device) -> bool:
    return device.type != "cpu"


def with_streams(device: torch.device | None) -> torch.device | None:
    """Returns the device if it has streams, whose events tell the time; else None."""
    return device if device is not None and is_accelerator(device) else None


def mark(device: torch.device) -> Mark:
    """After all that this thread's stream has been given so far."""
    return torch.accelerator.current_stream(device).record_event() if is_accelerator(device) else None


def wait_for(moment: Mark) -> None:
    """What this thread's stream is given from here on comes after the mark. The thread does not wait."""
    if moment is not None:
        torch.accelerator.current_stream(moment.device).wait_event(moment)


def finish(device: torch.device) -> None:
    """This thread waits until its stream has done all it was given."""
    if is_accelerator(device):
        torch.accelerator.current_stream(device).synchronize()


def finish_all(device: torch.device) -> None:
    """This thread waits until all streams have done all they were given."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def use_here(*tensors: Tensor | None) -> None:
    """Tensors made in another stream: their memory is not used again before this thread's stream is done with them."""
    for tensor in tensors:
        if tensor is not None and is_accelerator(tensor.device):
            tensor.record_stream(torch.accelerator.current_stream(tensor.device))


class Streams:
    """One for each lane, the same as long as the world lives: the memory of a stream is used again by that stream."""

    def __init__(self, device: torch.device, is_exclusive: bool = False) -> None:
        """is_exclusive: shares no stream with others, whatever happens."""
        self.device = device
        self.is_exclusive = is_exclusive
        self._of_lanes: dict[str, torch.Stream] = {}
        with _lock:
            _alive.add(self)

    def of(self, lane: str) -> AbstractContextManager[object]:
        """What is enqueued within it, in this thread, goes to the lane's stream."""
        return self.stream(lane) if is_accelerator(self.device) else nullcontext()

    def stream(self, lane: str) -> torch.Stream:
        with _lock:
            if lane not in self._of_lanes:
                self._of_lanes[lane] = self._draw()
            return self._of_lanes[lane]

    def _draw(self) -> torch.Stream:
        """One that nobody here has. torch hands out the same few streams, one after the other, over and over: what one
        user of a stream enqueues while the other records a graph is recorded with it; and lanes would wait."""
        others = [streams for streams in _alive if streams.device == self.device]
        for avoided in (others,) if self.is_exclusive else (others, [o for o in others if o.is_exclusive]):
            taken = {stream.stream_id for streams in avoided for stream in streams._of_lanes.values()}
            for _ in range(NUM_DRAWS):
                stream = torch.Stream(self.device)
                if stream.stream_id not in taken:
                    return stream
        raise RuntimeError(f"{self.device} has no stream left that is not another's")


NUM_DRAWS = 128
"""more than torch has streams of a device"""
_alive: WeakSet[Streams] = WeakSet()
_lock = threading.RLock()  # a world may be forgotten in the middle of it
