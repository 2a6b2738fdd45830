"""What the kernel knows of this process's TCP connections: the bytes sent, and the time that they were under way."""

import socket
import struct
from dataclasses import dataclass

from nestpipe.distributed.sockets import open_sockets

INFO_BYTES = 184
"""Bytes of the kernel's struct tcp_info up to its last field that is read here; older kernels have fewer."""
_BYTES_ACKED, _BUSY_US, _RECEIVER_LIMITED_US = 120, 168, 176
"""Offsets of fields of 64 bits in struct tcp_info of Linux, which only grows at its end."""


@dataclass(frozen=True)
class Connection:
    """One direction of a connection, from this process to another."""

    own: str
    """Address and port."""
    peer: str
    num_bytes: int
    """Bytes that the other side has acknowledged."""
    busy_ms: float
    """Time in which bytes were under way and the receiver had room for them."""


def connections() -> list[Connection]:
    """Returns the TCP connections of this process, on Linux; elsewhere none."""
    option = getattr(socket, "TCP_INFO", None)
    if option is None:
        return []
    found = (_connection(descriptor, option) for descriptor, _ in open_sockets())
    return [connection for connection in found if connection is not None]


def _connection(descriptor: int, option: int) -> Connection | None:
    try:
        with socket.socket(fileno=socket.dup(descriptor)) as opened:
            if opened.family not in (socket.AF_INET, socket.AF_INET6) or opened.type != socket.SOCK_STREAM:
                return None
            peer, own = _text(opened.getpeername()), _text(opened.getsockname())
            info = opened.getsockopt(socket.IPPROTO_TCP, option, INFO_BYTES)
    except OSError:  # closed meanwhile, or a listener
        return None
    if len(info) < INFO_BYTES:
        return None
    num_bytes, busy_us, limited_us = (
        struct.unpack_from("=Q", info, at)[0] for at in (_BYTES_ACKED, _BUSY_US, _RECEIVER_LIMITED_US)
    )
    return Connection(own, peer, num_bytes, max(0.0, (busy_us - limited_us) / 1e3))


def _text(address: tuple[object, ...]) -> str:
    return f"{str(address[0]).removeprefix('::ffff:')}:{address[1]}"
