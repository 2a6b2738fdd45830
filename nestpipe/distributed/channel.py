"""A channel: collectives for one purpose, on their own communicator."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from nestpipe.device.streams import Mark, Streams, mark, use_here, wait_for, with_streams
from nestpipe.device.transfer import download
from nestpipe.distributed.lane import Lane, LaneThread
from nestpipe.distributed.mesh import Mesh
from nestpipe.distributed.monitor import POLL_SECONDS
from nestpipe.distributed.stamps import Stamps
from nestpipe.distributed.transport import Transfer, Transport
from nestpipe.distributed.watch import LostConnectionError, RankError, Watch, describe

T = TypeVar("T")


class Channel:
    """Collectives for one purpose. All ranks use a channel in the same order. In a world of one nothing is sent.

    Without a device group, collectives run on host memory: tensors on a device pass through pinned memory, and the
    calling thread waits for the copy. With a device group, collectives of device memory run on it directly. Then
    `lane` is the only thread that issues them, for all channels, in the same order on every rank.

    The main thread never waits inside a collective that blocks, where it could neither be interrupted nor give up. It
    hands the wait to the channel's lane. The thread of a lane may block, because its caller waits for it with a watch.
    """

    def __init__(
        self,
        name: str,
        watch: Watch,
        transport: Transport | None = None,
        streams: Streams | None = None,
        lane: Lane | None = None,
        device_group: dist.ProcessGroup | None = None,
        mesh: Mesh | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """ranks: those that use the channel, which numbers them in this order; None for all."""
        self.name = name
        self.rank = watch.rank if ranks is None else ranks.index(watch.rank)
        self.size = watch.size if ranks is None else len(ranks)
        self.mesh = mesh or Mesh(self.rank, self.size)
        """Groups of ranks that share rows. Collectives are always those of all ranks of the channel."""
        self.watch = watch
        self.transport = transport
        """Way of host memory; None in a world of one, or if the channel carries device memory only."""
        self.device_group = device_group
        """Group that carries device memory directly; None if everything goes through host memory."""
        self.stamps = Stamps()
        """When this rank entered and left the last collectives of host memory."""
        self._lane = lane or Lane(name)
        self._streams = streams or Streams(torch.device("cpu"))
        self._num_agreed = 0
        self._handed_over: Future[Any] | None = None
        """Last collective that the lane was handed: the next one must come after it."""

    @property
    def is_staged(self) -> bool:
        """Returns whether tensors on a device pass through host memory."""
        return with_streams(self._streams.device) is not None and self.device_group is None

    def all_to_all(
        self,
        message: Tensor,
        send_bytes: list[int],
        received: Tensor,
        receive_bytes: list[int],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Sends send_bytes[r] bytes of `message` to rank r, and receives receive_bytes[r] bytes from rank r into
        `received`, both in order of ranks. A message in host memory must be complete.

        meanwhile: called by this thread while the message travels.
        """
        sizes = receive_bytes, send_bytes
        if self.size == 1:
            received.copy_(message)
            meanwhile()
        elif self._is_direct(message.device):
            group = self.device_group
            self._issue(lambda: dist.all_to_all_single(received, message, *sizes, group=group), message, received)
            meanwhile()  # enqueued behind the collective
        else:
            entered = time.perf_counter_ns()
            transfer = self._host_transport.begin_all_to_all(message, send_bytes, received, receive_bytes)
            try:
                meanwhile()
            except Exception:
                self._complete(transfer, entered)  # the other ranks wait for it
                raise
            self._complete(transfer, entered)

    def all_to_all_equal(self, parts: Tensor) -> Tensor:
        """Sends row r to rank r. Row r of the result comes from rank r."""
        if self.size == 1:
            return parts
        parts, received = parts.contiguous(), torch.empty(parts.shape, dtype=parts.dtype)
        sizes = [parts[0].nbytes] * self.size
        bytes_of = (parts.view(-1).view(torch.uint8), received.view(-1).view(torch.uint8))
        self._run(lambda: self._host_transport.begin_all_to_all(bytes_of[0], sizes, bytes_of[1], sizes))
        return received

    def all_gather_bytes(self, data: Tensor) -> list[Tensor]:
        """Returns the bytes of every rank, on every rank."""
        sizes = self.all_to_all_equal(torch.full((self.size, 1), data.numel())).flatten().tolist()
        received = torch.empty(sum(sizes), dtype=data.dtype)
        self.all_to_all(data.repeat(self.size), [data.numel()] * self.size, received, sizes)
        return list(received.split(sizes))

    def all_reduce_sum(self, values: Tensor) -> None:
        """Sums values over ranks, in place."""
        if self.size > 1 and self._is_direct(values.device):
            self._issue(lambda: dist.all_reduce(values, group=self.device_group), values)
        elif self.size > 1:
            in_host = download(values)
            self._run(lambda: self._host_transport.begin_sum(in_host))
            if in_host is not values:
                values.copy_(in_host, non_blocking=True)

    def begin_sum(self, parts: list[Tensor], has_other_work: bool = True) -> Future[tuple[Tensor, Mark]]:
        """Begins to sum the concatenated parts over ranks. The caller waits for the result with the watch.

        The sum belongs to another stream, and is complete when the returned mark is reached. has_other_work: False if
        the caller waits for the sum next. A thread that can give up then does it itself, before this returns.
        """
        device = parts[0].device
        if self.size == 1 or (not has_other_work and self._is_quick(device)):
            values = torch.cat([part.flatten() for part in parts])
            self.all_reduce_sum(values)
            done: Future[tuple[Tensor, Mark]] = Future()
            done.set_result((values, None))
            return done
        moment = mark(device)

        def add_up() -> tuple[Tensor, Mark]:
            with self._streams.on_lane(self.name):
                wait_for(moment)
                use_here(*parts)
                values = torch.cat([part.flatten() for part in parts])
                values = values if self._is_direct(device) else download(values)
                self.all_reduce_sum(values)
                return values.to(device, non_blocking=True), mark(device)

        self._handed_over = self._lane.submit(add_up)
        return self._handed_over

    def share_text(self, text: str) -> list[str]:
        """Returns the text of every rank, on every rank."""
        data = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8)
        texts = [bytes(part.numpy()).decode() for part in self.all_gather_bytes(data)]
        return ["" if text == "\0" else text for text in texts]

    def raise_agreed(self, error: Exception | None, failed: list[int]) -> NoReturn:
        """Raises on all ranks, once all know which have failed: each its own error, or one that quotes the others."""
        self._num_agreed += 1
        key = f"{self.name}/{self._num_agreed}"
        if error is not None:
            self.watch.post(f"{key}/{self.rank}", describe(error))
        self.all_reduce_sum(torch.zeros(1))  # after this collective all texts have been posted
        if error is None:
            error = RankError("; ".join(f"rank {r} failed: {self.watch.read(f'{key}/{r}')}" for r in failed))
        raise self.watch.agreed(error)

    def close(self) -> None:
        self._lane.close()

    def _run(self, begin: Callable[[], Transfer]) -> None:
        """Runs a collective of host memory, after the one that the lane was handed before."""

        def run() -> None:
            entered = time.perf_counter_ns()
            self._complete(begin(), entered)

        is_free = self._handed_over is None or self._handed_over.done()
        if isinstance(threading.current_thread(), LaneThread) or (is_free and not self._host_transport.blocks):
            run()
        else:
            self.watch.wait(self._lane.submit(run), self.name)

    def _complete(self, transfer: Transfer, entered_ns: int) -> None:
        """Waits for a collective of host memory that this rank entered at that time."""

        def complete() -> None:
            while not transfer.advance(POLL_SECONDS):
                pass

        if isinstance(threading.current_thread(), LaneThread):
            complete()
        elif not self._host_transport.blocks and transfer.advance(0.0):
            self.watch.check()
        elif self._host_transport.blocks:
            self.watch.wait(self._lane.submit(complete), self.name)
        else:
            self.watch.wait_until(transfer.advance, self.name)
        self.stamps.add(entered_ns, time.perf_counter_ns())

    @property
    def _host_transport(self) -> Transport:
        if self.transport is None:
            raise RuntimeError(f"the channel of {self.name} carries device memory only")
        return self.transport

    def _is_quick(self, device: torch.device) -> bool:
        """Returns whether this thread can sum memory of this device without handing it to the lane."""
        is_in_host = with_streams(device) is None and not self._is_direct(device)
        return is_in_host and not self._host_transport.blocks

    def _is_direct(self, device: torch.device) -> bool:
        return self.device_group is not None and device == self._streams.device

    def _issue(self, collective: Callable[[], object], *tensors: Tensor) -> None:
        """Issues a collective of device memory in the lane's thread. Later work of the caller's stream waits for it."""
        if self._lane.is_current:
            self._guarded(collective)
            return
        device = self._streams.device
        moment = mark(device)

        def issue() -> Mark:
            with self._streams.on_lane(self.name):
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
