"""A channel: the collectives of one purpose, on a communicator of their own."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from nestpipe.device.streams import Mark, Streams, mark, use_here, wait_for
from nestpipe.device.transfer import download, host_empty
from nestpipe.distributed.lane import Lane, LaneThread
from nestpipe.distributed.watch import LostConnectionError, RankError, Watch, describe


class Channel:
    """All ranks use a channel in the same order. In a world of one nothing is sent.

    Collectives are of host memory: what is on a device passes through pinned memory, and the thread waits for the copy.

    The main thread never waits inside a collective: there it could neither be interrupted nor give up. It hands the
    collective to the channel's lane. The thread of another lane may block, since somebody waits for it with a watch.
    """

    def __init__(
        self, name: str, watch: Watch, group: dist.ProcessGroup | None = None, streams: Streams | None = None
    ) -> None:
        self.name = name
        self.rank = watch.rank
        self.size = watch.size
        self.watch = watch
        self._group = group
        self._lane = Lane(name)
        self._streams = streams or Streams(torch.device("cpu"))
        self._num_agreed = 0

    def all_to_all(self, parts: list[Tensor], receive_bytes: list[int]) -> list[Tensor]:
        """Sends parts[r], bytes, to rank r; returns what rank r sent here, receive_bytes[r] bytes of it."""
        if self.size == 1:
            return parts
        device = parts[0].device
        send = download(torch.cat(parts))
        received = host_empty((sum(receive_bytes),), torch.uint8, device)
        send_bytes = [part.numel() for part in parts]
        self._run(lambda: dist.all_to_all_single(received, send, receive_bytes, send_bytes, group=self._group))
        return list(received.to(device, non_blocking=True).split(receive_bytes))

    def all_to_all_equal(self, parts: Tensor) -> Tensor:
        """Sends row r to rank r; row r of the result is what rank r sent here."""
        if self.size == 1:
            return parts
        parts, received = parts.contiguous(), torch.empty(parts.shape, dtype=parts.dtype)
        self._run(lambda: dist.all_to_all_single(received, parts, group=self._group))
        return received

    def all_gather_bytes(self, data: Tensor) -> list[Tensor]:
        """Every rank's bytes, on every rank."""
        sizes = self.all_to_all_equal(torch.full((self.size, 1), data.numel())).flatten().tolist()
        return self.all_to_all([data] * self.size, sizes)

    def all_reduce_sum(self, values: Tensor) -> None:
        """In place."""
        if self.size > 1:
            here = download(values)
            self._run(lambda: dist.all_reduce(here, group=self._group))
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
                values = download(torch.cat([part.flatten() for part in parts]))
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

    def _run(self, collective: Callable[[], object]) -> None:
        def guarded() -> None:
            try:
                collective()
            except RuntimeError as error:
                raise LostConnectionError(str(error)) from error

        if isinstance(threading.current_thread(), LaneThread):
            guarded()
        else:
            self.watch.wait(self._lane.submit(guarded), self.name)
