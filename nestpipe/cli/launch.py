"""Starts the ranks of a run on this machine, and makes sure that all of them end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from torch._C._distributed_c10d import PrefixStore, TCPStore

from nestpipe.cli.sigterm import Sigterm
from nestpipe.distributed.beat import Beat, beat_key, happened_here
from nestpipe.distributed.child import die_with_parent
from nestpipe.distributed.link import prefix_of
from nestpipe.distributed.monitor import FAILED, PRESENT, lines_of
from nestpipe.distributed.sockets import FILES_OF_A_STORE, reserve_files

GRACE_SECONDS = 10.0
"""Time that ranks have to end after one has failed, or after Ctrl-C. They learn of it and report it themselves."""


def launch(num_ranks: int, arguments: Sequence[str]) -> int:
    """Runs `python -m nestpipe` with these arguments on each rank; returns the first exit code that is not 0, or 0."""
    try:
        reserve_files(num_ranks * FILES_OF_A_STORE, f"the store of {num_ranks} ranks has connections to all of them")
    except OSError as error:
        print(f"nestpipe: {error}", file=sys.stderr)
        return 1
    # This process holds the store, not rank 0, so the text of a failure can be read whichever rank has died.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    watched = PrefixStore(prefix_of(1), store)
    interrupted = False
    with Sigterm() as sigterm:
        ranks = [_start(rank, num_ranks, store.port, arguments) for rank in range(num_ranks)]
        try:
            _wait(ranks, passes_on=_PassesOn(sigterm, watched, ranks))
            _report(watched, ranks)
            _wait(ranks, time.monotonic() + GRACE_SECONDS)
        except KeyboardInterrupt:
            interrupted = True
            for rank in ranks:
                rank.send_signal(signal.SIGINT)
            _wait(ranks, time.monotonic() + GRACE_SECONDS)
        finally:
            _end(ranks)
    codes = [rank.returncode for rank in ranks if rank.returncode != 0]
    if interrupted:
        return 128 + signal.SIGINT
    return 0 if not codes else codes[0] if codes[0] > 0 else 128 - codes[0]


def _start(rank: int, num_ranks: int, port: int, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # tells torch that another process holds the store
    }
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the ranks report a lost peer themselves
    command = [sys.executable, "-m", "nestpipe", *arguments]
    # In their own session, ranks receive Ctrl-C once, from this process. If it dies, they die too.
    return subprocess.Popen(command, env=environment, start_new_session=True, preexec_fn=die_with_parent)


class _PassesOn:
    """Passes the SIGTERM of this process on to all ranks, once, when all of them can handle it.

    Before a rank has started, it would end it: the others would then report a lost rank instead of stopping.
    """

    def __init__(self, sigterm: Sigterm, watched: PrefixStore, ranks: list[subprocess.Popen[bytes]]) -> None:
        self._sigterm = sigterm
        self._watched = watched
        self._ranks = ranks
        self._is_done = False

    def __call__(self) -> None:
        if self._sigterm.is_received and not self._is_done and self._watched.add(PRESENT, 0) >= len(self._ranks):
            self._is_done = True
            for rank in self._ranks:
                rank.send_signal(signal.SIGTERM)


def _wait(
    ranks: list[subprocess.Popen[bytes]],
    deadline: float | None = None,
    passes_on: Callable[[], None] = lambda: None,
) -> None:
    """Waits until all ranks have ended, or until the deadline; without a deadline, until a rank has failed."""
    while None in (codes := [rank.poll() for rank in ranks]):  # polls every rank, as the first may never end
        if time.monotonic() > deadline if deadline is not None else any(codes):
            return
        passes_on()
        time.sleep(0.05)


def _report(watched: PrefixStore, ranks: list[subprocess.Popen[bytes]]) -> None:
    """Tells the other ranks about ranks that failed without a report: they may not be connected to them yet."""
    ended = {
        number: f"{_ending(rank.returncode)} {_last_seen(watched, number)}"
        for number, rank in enumerate(ranks)
        if rank.poll()
    }
    if ended and not (watched.check([FAILED]) and watched.get(FAILED)):
        watched.append(FAILED, lines_of(ended))  # type: ignore[attr-defined]


def _last_seen(watched: PrefixStore, rank: int) -> str:
    """Returns where and when a rank was last seen, or that it ended before its first heartbeat."""
    key = beat_key(rank)
    return Beat.decode(watched.get(key)).seen if watched.check([key]) else happened_here("before the start")


def _ending(code: int) -> str:
    if code > 0:
        return f"its process ended with code {code}"
    return f"it was killed by {signal.Signals(-code).name if -code in set(signal.Signals) else f'signal {-code}'}"


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    for number, rank in enumerate(ranks):
        if rank.poll() is None:
            print(f"nestpipe: rank {number} did not end in time and is killed", file=sys.stderr)
            rank.kill()
        rank.wait()
