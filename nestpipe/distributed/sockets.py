"""The sockets of a world: how many it needs, and how to close them under threads that wait for them."""

import os
import resource
import socket
from pathlib import Path

FILES_OF_A_GROUP = 8
"""open files of a gloo group that are not connections: its listener, its event queue and the like"""
FILES_OF_A_STORE = 3
"""open files of a client of the store; its holder has as many again for every rank"""
SPARE_FILES = 64
"""left for data, checkpoints and whatever else the process opens"""
_FOLDER = Path("/proc/self/fd")


def check_open_files(size: int, num_groups: int, holds_store: bool) -> None:
    """Raises the limit of open files to what a world needs; refuses when that is not allowed.

    Without this, a rank that runs out of sockets while the ranks connect leaves all others waiting.
    """
    num_stores = size if holds_store else 1
    reserve_files(
        num_groups * (size - 1 + FILES_OF_A_GROUP) + num_stores * FILES_OF_A_STORE,
        f"a rank among {size} keeps {num_groups} connections to each of the others",
    )


def reserve_files(num_files: int, why: str) -> None:
    needed = len(list(_FOLDER.iterdir())) + num_files + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise OSError(
            f"{why}, which takes {needed} open files, but this process may have only {hard}; "
            f"allow more before the start: `ulimit -n {needed}`, or the limit 'nofile' of the container or the user"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class Sockets:
    """The sockets that this process opened since this object was made, until `settle` was called."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._before = _open_sockets()
        self._own: set[tuple[int, int]] | None = None

    def settle(self) -> None:
        self._own = _open_sockets() - self._before

    def shut_down(self) -> None:
        """Every thread that waits for one of them gets an error at once. Other ranks see closed connections.

        torch's gloo has no way to give up a collective, and a thread that sits in one when the interpreter ends aborts
        the whole process as soon as it comes back.
        """
        if os.getpid() != self._process:
            return  # a fork has the same sockets, but they are not its own
        for descriptor, number in self._own if self._own is not None else _open_sockets() - self._before:
            try:
                if os.fstat(descriptor).st_ino == number:
                    with socket.socket(fileno=os.dup(descriptor)) as connection:
                        connection.getpeername()  # raises for a listener: gloo aborts when one of them fails
                        connection.shutdown(socket.SHUT_RDWR)
            except OSError:  # closed meanwhile, or not connected
                continue


def _open_sockets() -> set[tuple[int, int]]:
    """Descriptors, with the numbers that tell a socket from a later one with the same descriptor."""
    sockets = set()
    for entry in _FOLDER.iterdir():
        try:
            kind, _, number = str(entry.readlink()).partition(":")
        except OSError:  # closed meanwhile
            continue
        if kind == "socket":
            sockets.add((int(entry.name), int(number.strip("[]"))))
    return sockets
