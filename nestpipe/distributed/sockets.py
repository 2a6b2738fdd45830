"""The sockets of a world: raises the limit of open files, and shuts sockets down while threads wait in them."""

import os
import resource
import socket
from pathlib import Path

FILES_OF_A_GROUP = 8
"""Open files of a gloo group that are not connections, such as its listener and its event queue."""
FILES_OF_A_STORE = 3
"""Open files of a client of the store; the process that holds the store has as many for every rank."""
SPARE_FILES = 64
"""Open files left for data, checkpoints and anything else that the process opens."""
_FOLDER = Path("/proc/self/fd")


def check_open_files(size: int, num_groups: int, holds_store: bool) -> None:
    """Raises the limit of open files to what a world needs, or raises OSError if the system does not allow it.

    Without this, a rank that runs out of sockets during the start leaves all others waiting.
    """
    num_stores = size if holds_store else 1
    reserve_files(
        num_groups * (size - 1 + FILES_OF_A_GROUP) + num_stores * FILES_OF_A_STORE,
        f"a rank among {size} keeps {num_groups} connections to each of the others",
    )


def reserve_files(num_files: int, why: str) -> None:
    """Raises the limit of open files by what is needed for this many more. why: begins the error message."""
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
    """The sockets that this process opened between the creation of this object and `settle`."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._before = _open_sockets()
        self._own: set[tuple[int, int]] | None = None

    def settle(self) -> None:
        self._own = _open_sockets() - self._before

    def shut_down(self) -> None:
        """Shuts the sockets down: threads that wait for one get an error at once, other ranks see closed connections.

        torch's gloo cannot cancel a collective, and a thread that returns from one while the interpreter shuts down
        aborts the process.
        """
        if os.getpid() != self._process:
            return  # a fork shares its parent's sockets, and must not close them
        for descriptor, inode in self._own if self._own is not None else _open_sockets() - self._before:
            try:
                if os.fstat(descriptor).st_ino == inode:
                    with socket.socket(fileno=os.dup(descriptor)) as connection:
                        connection.getpeername()  # raises for a listener, which must stay: gloo aborts if it fails
                        connection.shutdown(socket.SHUT_RDWR)
            except OSError:  # closed meanwhile, or not connected
                continue


def _open_sockets() -> set[tuple[int, int]]:
    """Returns descriptors with inode numbers, which tell a socket from a later one with the same descriptor."""
    sockets = set()
    for entry in _FOLDER.iterdir():
        try:
            kind, _, inode = str(entry.readlink()).partition(":")
        except OSError:  # closed meanwhile
            continue
        if kind == "socket":
            sockets.add((int(entry.name), int(inode.strip("[]"))))
    return sockets
