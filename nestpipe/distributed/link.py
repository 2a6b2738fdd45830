"""The link of a rank to the others: the ranks' store, the watch, and process groups that are made under the watch."""

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from datetime import timedelta
from typing import TypeVar, cast

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.distributed_c10d import _get_default_store

from nestpipe.distributed.backend import abort_all
from nestpipe.distributed.lane import Lane, wait_for_lanes
from nestpipe.distributed.monitor import POLL_SECONDS, TextStore
from nestpipe.distributed.sockets import Sockets
from nestpipe.distributed.watch import START_SECONDS, LostConnectionError, Watch

T = TypeVar("T")

UNLIMITED = timedelta(days=1)
"""Value for torch's own timeouts: the watch decides how long to wait, and must come first."""
ABORT_SECONDS = 10.0
"""Time that a rank waits until its collectives of device memory have ended."""
END_SECONDS = 2.0
"""Time that the end of a process waits for busy threads."""
REMEDY = (
    "see that rank 0, or whoever starts the ranks, runs, and that MASTER_ADDR and MASTER_PORT name its host and port"
)
_open_links: "set[Link]" = set()
_num_links = 0


class Link:
    """The connections of one world and the threads behind them, until the world is closed or the process ends.

    Groups are made in a thread of the link. The caller's thread waits for it with the watch, open to Ctrl-C.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        timeout_seconds: float,
        stall_seconds: float,
        connect: Callable[[], Store] | None = None,
    ) -> None:
        """connect: returns the store through which ranks find each other; None takes that of torch's default group."""
        self.size = size
        self.watch = Watch(rank, size, None, timeout_seconds, stall_seconds)
        self.process = os.getpid()
        self._device_groups: list[dist.ProcessGroup] = []
        self._aborting: threading.Thread | None = None
        self._abort_lock = threading.Lock()
        self._sockets = Sockets()
        self._lane = Lane("link")
        _open_links.add(self)
        self._store = self._within(START_SECONDS, connect or _get_default_store)
        # The monitor gets its own connection: a thread that waits in the first one blocks it.
        connection = self._within(START_SECONDS, self._store.clone)  # type: ignore[attr-defined]
        texts = cast(TextStore, PrefixStore(_next_prefix(), connection))
        self.watch = Watch(rank, size, texts, timeout_seconds, stall_seconds)
        self.group: dist.ProcessGroup = self._default_group(rank) if connect is not None else self.new_group("gloo")
        """Default group, for collectives of host memory."""

    @staticmethod
    def from_environment(rank: int, size: int, timeout_seconds: float, stall_seconds: float) -> "Link":
        """Connects to the store that the environment names, and makes torch's default group."""
        return Link(rank, size, timeout_seconds, stall_seconds, lambda: _connect(rank, size))

    def new_group(self, backend: str, ranks: Sequence[int] | None = None) -> dist.ProcessGroup:
        """Makes a group of some ranks, or of all. Those ranks call it together."""
        if backend == "nccl":
            # NCCL's own watchdog would abort the process when a rank is lost, before the watch can say which, and why.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        group: dist.ProcessGroup = self.run(
            lambda: dist.new_group(
                None if ranks is None else list(ranks),
                timeout=UNLIMITED,
                backend=backend,
                use_local_synchronization=ranks is not None,  # the other ranks do not call
            )
        )
        if backend == "nccl":
            self._device_groups.append(group)
            if len(self._device_groups) == 1:
                self.watch.when_failed.append(self._abort)
                self.watch.call_when_lost(self._begin_abort)
        return group

    @property
    def has_device_groups(self) -> bool:
        """Returns whether collectives may be under way on a device."""
        return len(self._device_groups) > 0

    def _abort(self) -> None:
        """Ends the collectives of device memory that wait for a lost rank: the device would wait for ever, and with it
        the process. NCCL may itself hang in this, so another thread does it."""
        self._begin_abort().join(ABORT_SECONDS)

    def _begin_abort(self) -> threading.Thread:
        with self._abort_lock:
            if self._aborting is None:
                groups = (self._device_groups,)
                self._aborting = threading.Thread(target=abort_all, args=groups, name="nestpipe-abort", daemon=True)
                self._aborting.start()
            return self._aborting

    def gather(self, text: str) -> list[str]:
        """Returns the text of every rank."""
        texts = [""] * self.size
        self.run(lambda: dist.all_gather_object(texts, text, group=self.group))
        return texts

    def settle(self) -> None:
        """Ends the setup. Call it when all groups are made."""
        self._sockets.settle()
        self._lane.close(POLL_SECONDS)

    def end(self) -> None:
        """Ends the monitor. After a failure, also ends the threads that wait for lost ranks."""
        _open_links.discard(self)
        if self._aborting is not None:
            self._aborting.join(ABORT_SECONDS)
        is_idle = self.watch.stop(END_SECONDS) and wait_for_lanes(0.0)
        if not is_idle or self.watch.failure is not None:
            self._sockets.shut_down()
            wait_for_lanes(END_SECONDS)
            self.watch.stop(END_SECONDS)

    def _default_group(self, rank: int) -> dist.ProcessGroup:
        def make() -> None:
            # With a prefix of its own: the store may still have the keys of an earlier start.
            store = PrefixStore(f"{prefix_of(0)}/default_pg", self._store)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=self.size, timeout=UNLIMITED)

        self.run(make)
        group = dist.group.WORLD
        assert group is not None
        return group

    def run(self, work: Callable[[], T]) -> T:
        """Runs work that connects ranks. Raises the failure of a rank that the watch sees meanwhile."""

        def guarded() -> T:
            try:
                return work()
            except (RuntimeError, OSError) as error:
                raise LostConnectionError(str(error)) from error

        return self.watch.wait(self._lane.submit(guarded), "connecting")

    def _within(self, limit_seconds: float, work: Callable[[], T]) -> T:
        """Runs work with a time limit, while there is no watch yet."""
        pending = self._lane.submit(work)
        store = f"the ranks' store at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        deadline = time.monotonic() + limit_seconds
        while not wait([pending], POLL_SECONDS).done:
            if time.monotonic() > deadline:
                raise ConnectionError(f"{store} has not answered within {limit_seconds:.0f} s; {REMEDY}")
        if isinstance(error := pending.exception(), RuntimeError):
            raise ConnectionError(f"{store} cannot be reached: {error}; {REMEDY}") from error
        return pending.result()


def _connect(rank: int, size: int) -> Store:
    """Connects like torch's env://, but does not wait for all ranks: the watch can name those that are missing."""
    is_held_elsewhere = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        size,
        is_master=rank == 0 and not is_held_elsewhere,
        timeout=timedelta(seconds=START_SECONDS),
        wait_for_workers=False,
        multi_tenant=not is_held_elsewhere,
    )


def prefix_of(number: int) -> str:
    """Returns the prefix of the keys of one world. Each start of the ranks has its own: torchrun may keep its store."""
    return f"nestpipe/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{number}"


def _next_prefix() -> str:
    """Returns the prefix of the next world. All ranks make their worlds in the same order."""
    global _num_links
    _num_links += 1
    return prefix_of(_num_links)


@atexit.register
def _end_links() -> None:
    """Ends the open links. Reports the error that ends the process, if any: other ranks may wait for this one."""
    error = getattr(sys, "last_value", None)
    is_stuck = False
    for link in list(_open_links):
        if os.getpid() != link.process:
            continue  # a fork has no threads, and must not close its parent's connections
        if isinstance(error, BaseException):
            link.watch.report(error)
        link.end()
        is_stuck = is_stuck or (link.has_device_groups and link.watch.failure is not None)
    wait_for_lanes(END_SECONDS)
    if is_stuck:  # the device waits for lost ranks, and torch would wait for the device
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
