"""Shared memory between the ranks of one host: their messages take no network, no system buffers and no other threads.

Rank 0 makes the memory, and hands it to the others over Unix sockets. It has no name, so nothing stays behind when the
ranks are gone. The connections stay open: one that closes tells that its rank has died. If the ranks of a world are on
several hosts, all use gloo, except for the hop inside a host (hosts.py).
"""

import ctypes
import mmap
import os
import secrets
import select
import socket
import struct
from collections.abc import Sequence
from ctypes import byref, c_int32, c_int64
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.distributed.watch import LostConnectionError
from nestpipe.store.native.library import call

LARGE_RING_BYTES = 2 << 20
"""Bytes between two ranks on a channel of rows, gradients or dense sums. Larger messages travel in pieces."""
RING_BYTES = 128 << 10
CONNECT_SECONDS = 60.0
SMALL_SUM_BYTES = 64 << 10
"""Up to this size each rank sends all values to all others; larger sums are shared out among the ranks."""


def host_identity() -> str:
    """Returns a text that is equal on ranks that can share memory: the same system, network namespace and user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/net').readlink()} {os.getuid()}"


class Listener:
    """A socket at which the ranks of this host find this one."""

    def __init__(self) -> None:
        self._name = f"nestpipe-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(f"\0{self._name}")
        self._socket.listen(socket.SOMAXCONN)
        self._socket.settimeout(CONNECT_SECONDS)

    @property
    def address(self) -> str:
        """Returns the host and the name of the socket, for the other ranks."""
        return f"{host_identity()} {self._name}"

    def accept(self) -> tuple[int, socket.socket]:
        """Returns the number of a rank that has connected, and the connection."""
        while True:
            connection, _ = self._socket.accept()
            _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if user == os.getuid():
                connection.settimeout(CONNECT_SECONDS)
                return struct.unpack("q", connection.recv(8, socket.MSG_WAITALL))[0], connection
            connection.close()  # any user of this system may connect

    def close(self) -> None:
        self._socket.close()


def are_on_one_host(addresses: Sequence[str]) -> bool:
    return len({address.rpartition(" ")[0] for address in addresses}) == 1


class Neighbours:
    """The connections of a rank to others on its host, and the memory that they share. They are numbered in order."""

    def __init__(self, rank: int, listener: Listener, addresses: Sequence[str], ranks: Sequence[int]) -> None:
        """ranks: those that share the memory, this one included. addresses: theirs."""
        self.ranks = ranks
        """Rank in the world of each."""
        self.rank, self.size = ranks.index(rank), len(ranks)
        self._connections: dict[int, socket.socket] = {}
        for other in range(self.rank):
            self._connections[other] = self._connect(addresses[other].rpartition(" ")[2])
        while len(self._connections) < self.size - 1:
            other, connection = listener.accept()
            self._connections[other] = connection

    def _connect(self, name: str) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(CONNECT_SECONDS)
        connection.connect(f"\0{name}")
        connection.sendall(struct.pack("q", self.rank))
        return connection

    def shared(self, num_bytes: int) -> mmap.mmap:
        """Returns memory that all ranks share, zero at first. All ranks call it together."""
        if self.rank == 0:
            file = os.memfd_create("nestpipe")
            os.ftruncate(file, num_bytes)
            for connection in self._connections.values():
                socket.send_fds(connection, [b"m"], [file])
        else:
            _, (file, *_), _, _ = socket.recv_fds(self._connections[0], 1, 1)
        try:
            return mmap.mmap(file, num_bytes)
        finally:
            os.close(file)

    def lost(self) -> list[int]:
        """Returns the numbers of those whose connections have closed."""
        poll = select.poll()
        for connection in self._connections.values():
            poll.register(connection, select.POLLIN)  # nothing is sent any more: a closed connection is all it can be
        ready = {descriptor for descriptor, _ in poll.poll(0)}
        return [rank for rank, connection in self._connections.items() if connection.fileno() in ready]

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()


class SharedMemory:
    """Transports of the channels of ranks that are all on one host."""

    def __init__(self, neighbours: Neighbours, ring_bytes: Sequence[int]) -> None:
        """ring_bytes: for each channel, in the order in which all ranks take their transports. All ranks call it
        together."""
        self._neighbours = neighbours
        sizes = [_mailbox_bytes(neighbours.size, number) for number in ring_bytes]
        starts = [0, *accumulate(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes)]
        memory = neighbours.shared(starts[-1])
        parts = zip(starts, sizes, ring_bytes, strict=False)
        self._transports = iter([SharedMemoryTransport(neighbours, memory, *part) for part in parts])

    def next_transport(self) -> "SharedMemoryTransport":
        return next(self._transports)

    def close(self) -> None:
        self._neighbours.close()


def _mailbox_bytes(size: int, ring_bytes: int) -> int:
    num_bytes = c_int64()
    call("mailbox_bytes", size, ring_bytes, byref(num_bytes))
    return num_bytes.value


class SharedMemoryTransport:
    """See Transport. The threads of the ranks copy messages into shared memory and out of it; see the native library's
    mailbox.hpp. Sums are added in order of rank, so their bits do not depend on sizes or on who comes first."""

    blocks = False

    def __init__(self, neighbours: Neighbours, memory: mmap.mmap, start: int, num_bytes: int, ring_bytes: int) -> None:
        self.rank, self.size = neighbours.rank, neighbours.size
        self._neighbours = neighbours
        self._memory = (ctypes.c_char * num_bytes).from_buffer(memory, start)
        self._mailbox = ctypes.addressof(self._memory), num_bytes, self.rank, self.size, ring_bytes
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def begin_all_to_all(
        self, message: Tensor, send_bytes: list[int], received: Tensor, receive_bytes: list[int]
    ) -> "_Exchange":
        sent, arriving = _bounds(send_bytes), _bounds(receive_bytes)
        own = slice(*sent[self.rank : self.rank + 2]), slice(*arriving[self.rank : self.rank + 2])
        if own[0].start < own[0].stop:
            _bytes(received)[own[1]] = _bytes(message)[own[0]]
        outgoing, incoming = message.data_ptr(), received.data_ptr()
        parcels = [
            [(outgoing + start, size, 0) for start, size in zip(sent, send_bytes, strict=False)],
            [(incoming + start, size, 0) for start, size in zip(arriving, receive_bytes, strict=False)],
        ]
        return self._begun(parcels, message, received)

    def begin_sum(self, values: Tensor) -> "_Sum":
        return _Sum(self, values)

    def gather(self, source: Tensor, target: Tensor, bounds: list[int]) -> "_Exchange":
        """Begins to send `source` to all other ranks. Rank r's arrives in target[bounds[r]:bounds[r + 1]]."""
        return self._begun([[_parcel(source)] * self.size, _parcels(target, bounds)], source, target)

    def spread(self, source: Tensor, bounds: list[int], parts: Tensor) -> "_Exchange":
        """Begins to send source[bounds[r]:bounds[r + 1]] to each other rank r. Rank r's arrives in parts[r]."""
        return self._begun([_parcels(source, bounds), [_parcel(part) for part in parts]], source, parts)

    def scratch(self, num_values: int, dtype: torch.dtype) -> Tensor:
        """Returns memory that the next sum uses again: new memory costs page faults."""
        num_bytes = num_values * dtype.itemsize
        if self._scratch.nbytes < num_bytes:
            self._scratch = torch.empty(num_bytes, dtype=torch.uint8)
        return self._scratch[:num_bytes].view(dtype)

    def _begun(self, parcels: list[list[tuple[int, int, int]]], *tensors: Tensor) -> "_Exchange":
        exchange = _Exchange(self._neighbours, self._mailbox, np.array(parcels, dtype=np.int64), tensors)
        exchange.advance(0.0)
        return exchange


class _Exchange:
    """See Transfer."""

    def __init__(
        self,
        neighbours: Neighbours,
        mailbox: tuple[int, int, int, int, int],
        parcels: NDArray[np.int64],
        tensors: tuple[Tensor, ...],
    ) -> None:
        self._neighbours = neighbours
        self._mailbox = mailbox
        self._parcels = parcels
        first = parcels.ctypes.data
        self._pointers = first, first + parcels[0].nbytes
        self._tensors = tensors  # keeps alive what the parcels point to
        self._is_done = c_int32(0)

    def advance(self, seconds: float) -> bool:
        if self._exchanged(seconds):
            return True
        lost = self._neighbours.lost() if seconds > 0.0 else []
        # A rank may leave once it has sent and received everything, while others still wait for each other.
        if (
            lost
            and not self._exchanged(0.0)
            and (missed := [self._neighbours.ranks[rank] for rank in lost if self._is_open(rank)])
        ):
            raise LostConnectionError(f"the connection to rank {', '.join(map(str, missed))} has closed")
        return bool(self._is_done.value)

    def _is_open(self, rank: int) -> bool:
        """Returns whether something is still to be sent to a rank, or to come from it."""
        _, num_bytes, num_done = self._parcels[:, rank].T
        return bool((num_done < num_bytes).any())

    def _exchanged(self, seconds: float) -> bool:
        if not self._is_done.value:
            call("mailbox_exchange", *self._mailbox, *self._pointers, int(seconds * 1e6), byref(self._is_done))
        return bool(self._is_done.value)


class _Sum:
    """A sum over ranks. Each rank adds up one part, from all ranks, and sends it to all; a small sum is added up by all
    of them."""

    def __init__(self, transport: SharedMemoryTransport, values: Tensor) -> None:
        size, number = transport.size, values.numel()
        self._transport = transport
        self._values = values.view(-1)
        self._is_small = values.nbytes <= SMALL_SUM_BYTES
        num_parts = 1 if self._is_small else size
        self._bounds = [number * r // num_parts for r in range(num_parts + 1)]
        self._own = slice(0, number) if self._is_small else slice(*self._bounds[transport.rank : transport.rank + 2])
        num_own = self._own.stop - self._own.start
        self._parts = transport.scratch(size * num_own, values.dtype).view(size, num_own)
        """Own part of each other rank's values."""
        if self._is_small:
            everyone = [num_own * r for r in range(size + 1)]
            self._exchange = transport.gather(self._values, self._parts, everyone)
        else:
            self._exchange = transport.spread(self._values, self._bounds, self._parts)
        self._is_added = False

    def advance(self, seconds: float) -> bool:
        if not self._exchange.advance(seconds):
            return False
        if not self._is_added:
            self._is_added = True
            total = self._add_up()
            if not self._is_small:
                self._exchange = self._transport.gather(total, self._values, self._bounds)
                return self._exchange.advance(seconds)
        return True

    def _add_up(self) -> Tensor:
        """Adds the own part of all ranks' values, in order of rank, in the place of this rank's."""
        own, rank, parts = self._values[self._own], self._transport.rank, list(self._parts)
        if rank > 0:
            before = parts[0]
            for part in parts[1:rank]:
                before += part
            torch.add(before, own, out=own)
        for part in parts[rank + 1 :]:
            own += part
        return own


def _parcel(data: Tensor) -> tuple[int, int, int]:
    return data.data_ptr(), data.nbytes, 0


def _parcels(data: Tensor, bounds: list[int]) -> list[tuple[int, int, int]]:
    """Returns a parcel for each part of the data. bounds: elements."""
    first, item = data.data_ptr(), data.itemsize
    return [(first + begin * item, (end - begin) * item, 0) for begin, end in pairwise(bounds)]


def _bounds(sizes: Sequence[int]) -> list[int]:
    return [0, *accumulate(sizes)]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
