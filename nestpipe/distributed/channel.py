"""A channel: the collectives of one purpose, on a communicator of their own."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from nestpipe.device.streams import Mark, Streams, mark, use_here, wait_for, with_streams
from nestpipe.device.transfer import download
from nestpipe.distributed.lane import Lane, LaneThread
from nestpipe.distributed.watch import LostConnectionError, RankError, Watch, describe

T = TypeVar("T")


class Channel:
    """All ranks use a channel in the same order. In a world of one nothing is sent.

    Collectives are of host memory: what is on a device passes through pinned memory, which the thread waits for. Given
    a device group, those of device memory go through it, directly; then `lane` is the only thread that issues
    any, for all channels, in an order that is the same on every rank.

    The main thread never waits inside a collective: there it could neither be interrupted nor give up. It hands the
    collective to the channel's lane. The thread of another lane may block, since somebody waits for it with a watch.
    """

    def __init__(
        self,
        name: str,
        watch: Watch,
        group: dist.ProcessGroup | None = None,
        streams: Streams | None = None,
        lane: Lane | None = None,
        device_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.name = name
        self.rank = watch.rank
        self.size = watch.size
        self.watch = watch
        self._group = group
        self.device_group = device_group
        """carries device memory, directly; None: all goes through host memory"""
        self._lane = lane or Lane(name)
        self._streams = streams or Streams(torch.device("cpu"))
        self._num_agreed = 0

    @property
    def is_staged(self) -> bool:
        """Whether what is on a device passes through host memory."""
        return with_streams(self._streams.device) is not None and self.device_group is None

    def all_to_all(
        self,
        message: Tensor,
        send_bytes: list[int],
        received: Tensor,
        receive_bytes: list[int],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Sends a message, send_bytes[r] of its bytes to rank r, in order of ranks; what comes in goes to `received`,
        in the same order: receive_bytes[r] from rank r. What is in host memory must be complete.

        meanwhile: what this thread does while the message travels.
        """
        sizes = receive_bytes, send_bytes
        if self.size == 1:
            received.copy_(message)
            meanwhile()
        elif self._is_direct(message.device):
            group = self.device_group
            self._issue(lambda: dist.all_to_all_single(received, message, *sizes, group=group), message, received)
            meanwhile()  # comes after it in the stream
        else:
            group = self._host_group
            work = self._begin(lambda: dist.all_to_all_single(received, message, *sizes, group=group, async_op=True))
            meanwhile()
            self._wait(lambda: self._guarded(work.wait))

    def all_to_all_equal(self, parts: Tensor) -> Tensor:
        """Sends row r to rank r; row r of the result is what rank r sent here."""
        if self.size == 1:
            return parts
        parts, received = parts.contiguous(), torch.empty(parts.shape, dtype=parts.dtype)
        self._run(lambda: dist.all_to_all_single(received, parts, group=self._host_group, async_op=True))
        return received

    def all_gather_bytes(self, data: Tensor) -> list[Tensor]:
        """Every rank's bytes, on every rank."""
        sizes = self.all_to_all_equal(torch.full((self.size, 1), data.numel())).flatten().tolist()
        received = torch.empty(sum(sizes), dtype=data.dtype)
        self.all_to_all(data.repeat(self.size), [data.numel()] * self.size, received, sizes)
        return list(received.split(sizes))

    def all_reduce_sum(self, values: Tensor) -> None:
        """In place."""
        if self.size > 1 and self._is_direct(values.device):
            self._issue(lambda: dist.all_reduce(values, group=self.device_group), values)
        elif self.size > 1:
            here = download(values)
            self._run(lambda: dist.all_reduce(here, group=self._host_group, async_op=True))
            if here is not values:
                values.copy_(here, non_blocking=True)

    def begin_sum(self, parts: list[Tensor]) -> Future[tuple[Tensor, Mark]]:
        """Begins to add up, over ranks, these parts put behind each other; the caller waits with the watch. The sum is
        there, in memory of another stream, from the mark on."""
        device = parts[0].device
        if self.size == 1:
            done: Future[tuple[Tensor, Mark]] = Future()
            done.set_result((torch.cat([part.flatten() for part in parts]), None))
            return done
        moment = mark(device)

        def add_up() -> tuple[Tensor, Mark]:
            with self._streams.of(self.name):
                wait_for(moment)
                use_here(*parts)
                values = torch.cat([part.flatten() for part in parts])
                values = values if self._is_direct(device) else download(values)
                self.all_reduce_sum(values)
                return values.to(device, non_blocking=True), mark(device)

        return self._lane.submit(add_up)

    def share_text(self, text: str) -> list[str]:
        """Every rank's text, on every rank."""
        data = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8)
        texts = [bytes(part.numpy()).decode() for part in self.all_gather_bytes(data)]
        return ["" if text == "\0" else text for text in texts]

    def raise_agreed(self, error: Exception | None, failed: list[int]) -> NoReturn:
        """All ranks call it once all know which have failed; each raises its own error, or the others' text."""
        self._num_agreed += 1
        key = f"{self.name}/{self._num_agreed}"
        if error is not None:
            self.watch.post(f"{key}/{self.rank}", describe(error))
        self.all_reduce_sum(torch.zeros(1))  # the texts are there once all have passed here
        if error is None:
            error = RankError("; ".join(f"rank {r} failed: {self.watch.read(f'{key}/{r}')}" for r in failed))
        raise self.watch.agreed(error)

    def close(self) -> None:
        self._lane.close()

    def _run(self, collective: Callable[[], dist.Work]) -> None:
        """Of host memory, in its turn: when the lane has done what it was handed before."""

        def run() -> None:
            work = self._begin(collective)
            self._guarded(work.wait)

        self._wait(run)

    def _begin(self, collective: Callable[[], dist.Work]) -> dist.Work:
        """Returns at once: gloo's own threads carry it."""
        return self._guarded(collective)

    def _wait(self, until_done: Callable[[], object]) -> None:
        if isinstance(threading.current_thread(), LaneThread):
            until_done()
        else:
            self.watch.wait(self._lane.submit(until_done), self.name)

    @property
    def _host_group(self) -> dist.ProcessGroup:
        if self._group is None:  # torch would take None for its default group
            raise RuntimeError(f"the channel of {self.name} carries device memory only")
        return self._group

    def _is_direct(self, device: torch.device) -> bool:
        return self.device_group is not None and device == self._streams.device

    def _issue(self, collective: Callable[[], object], *tensors: Tensor) -> None:
        """Of device memory, always in the lane's thread. What this thread's stream is given next comes after it."""
        if self._lane.is_current:
            self._guarded(collective)
            return
        device = self._streams.device
        moment = mark(device)

        def issue() -> Mark:
            with self._streams.of(self.name):
                wait_for(moment)
                use_here(*tensors)
                self._guarded(collective)
                return mark(device)

        wait_for(self.watch.wait(self._lane.submit(issue), self.name))

    def _guarded(self, collective: Callable[[], T]) -> T:
        try:
            return collective()
        except RuntimeError as error:
            raise LostConnectionError(str(error)) from error
