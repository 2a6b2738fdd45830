"""The processes of a run: a launcher and its ranks, like those of `nestpipe train --ranks 3`.

They are forks of a process that has imported everything, so a run starts in a fraction of a second. Everything else is
as usual: the launcher and each rank run `nestpipe` with the arguments of the run, in processes of their own. They die
with this process, however it ends.
"""

import faulthandler
import json
import multiprocessing
import os
import runpy
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Lock
from typing import Any

from nestpipe.bench.faults.moments import Hit
from nestpipe.bench.faults.seams import Seams, replace_function
from nestpipe.distributed.child import die_with_parent

END_SECONDS = 90.0
"""Time in which a run must end, whatever happens to it."""
_CHILDREN = Lock()
"""Held while a process is started or its exit code is read. A start reads the codes of all that have ended, and of two
threads that read the same one, one would get a wrong code."""
_FORK = multiprocessing.get_context("fork")
_SERVER = multiprocessing.get_context("forkserver")
_PRELOAD = [
    *("torch", "torch.distributed", "torch._dynamo", "safetensors.torch", "numpy.ctypeslib", "pydantic"),
    *("nestpipe.cli.main", "nestpipe.embedding.exchange.local", "nestpipe.embedding.exchange.distributed", __name__),
    "nestpipe.bench.faults.clicks",
]
"""Modules that a run imports. One that is missing only makes a start slower."""


class HangError(RuntimeError):
    """A run did not end, or one of its ranks outlived it."""


@dataclass(frozen=True)
class Command:
    """What the processes of a run need to know."""

    arguments: Sequence[str]
    num_ranks: int
    checkpoints: Path
    logs: Path
    """Folder for the output and the log of each process."""
    hits: Mapping[int, Sequence[Hit]] = field(default_factory=dict)
    """Hits by rank."""

    def output(self) -> str:
        """Returns the end of what the processes have printed."""
        files = sorted(self.logs.glob("output-*"))
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-3000:]}" for file in files)

    def events(self, rank: int, name: str) -> list[tuple[float, Any]]:
        """Returns the times and values of the events of one name in the log of a rank."""
        return self.all_events(rank).get(name, [])

    def steps(self) -> list[int]:
        """Returns the steps that rank 0 has done so far."""
        return [int(value) for _, value in self.events(0, "step")]

    def all_events(self, rank: int) -> dict[str, list[tuple[float, Any]]]:
        """Returns the times and values of all events in the log of a rank, by name."""
        file = self.logs / f"log-{rank}"
        found: dict[str, list[tuple[float, Any]]] = {}
        for line in file.read_text().splitlines(keepends=True) if file.exists() else ():
            if not line.endswith("\n"):
                break  # it is being written
            seconds, name, value = json.loads(line)
            found.setdefault(name, []).append((seconds, value))
        return found


class Run:
    """A run that has started."""

    def __init__(self, command: Command) -> None:
        command.logs.mkdir()
        _SERVER.set_forkserver_preload(_PRELOAD)
        here, there = _SERVER.Pipe(duplex=False)
        self.command = command
        self.started = time.monotonic()
        self._launcher = _SERVER.Process(target=_launch, args=(command, there))
        with _CHILDREN:
            self._launcher.start()
        there.close()
        if not here.poll(END_SECONDS):
            self._launcher.kill()
            raise HangError("the processes of a run did not start")
        self.ranks = [_Handle(process) for process in here.recv()]
        assert self._launcher.pid is not None
        self.launcher = _Handle(self._launcher.pid)

    @property
    def is_alive(self) -> bool:
        return self.launcher.is_alive

    def wait(self, seconds: float = END_SECONDS) -> int:
        """Waits until all processes have ended. Returns the exit code of the launcher, or minus a signal."""
        if not wait([self._launcher.sentinel], seconds):
            self._show_stacks()
            self.end()
            raise HangError(f"the run has not ended after {seconds} s:\n{self.command.output()}")
        deadline = time.monotonic() + 10.0
        while any(rank.is_alive for rank in self.ranks):
            if time.monotonic() > deadline:
                self.end()
                raise HangError(f"a rank outlives its launcher:\n{self.command.output()}")
            time.sleep(0.01)
        return self._exit_code()

    def end(self) -> None:
        """Kills all processes that are left."""
        for process in (*self.ranks, self.launcher):
            process.send(signal.SIGKILL)
        self._exit_code()

    def _exit_code(self) -> int:
        wait([self._launcher.sentinel])
        with _CHILDREN:
            self._launcher.join()
        assert self._launcher.exitcode is not None
        return self._launcher.exitcode

    def _show_stacks(self) -> None:
        """Has the ranks print the stacks of all threads."""
        for rank in self.ranks:
            rank.send(signal.SIGUSR1)
        time.sleep(1.0)


class _Handle:
    """A process that this one did not start itself. Another one that gets its number later is never meant."""

    def __init__(self, process: int) -> None:
        self._descriptor = os.pidfd_open(process)

    def __del__(self) -> None:
        os.close(self._descriptor)

    @property
    def is_alive(self) -> bool:
        return not select.select([self._descriptor], [], [], 0)[0]

    def send(self, number: signal.Signals) -> None:
        """Sends a signal, unless the process has ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, number)

    def kill(self) -> None:
        """Sends SIGKILL, and waits until the process is dead."""
        self.send(signal.SIGKILL)
        select.select([self._descriptor], [], [])


def _launch(command: Command, told: Connection) -> None:
    """The launcher. With one rank it is that rank, as on the command line."""
    _leave_with_parent()
    if command.num_ranks == 1:
        told.send([os.getpid()])
        _be_rank(command, 0, {})
        return
    ranks = [_ForkedRank(command, rank) for rank in range(command.num_ranks)]
    told.send([rank.pid for rank in ranks])
    _redirect(command.logs / "output-launcher")

    def start(rank: int, num_ranks: int, port: int, arguments: Sequence[str]) -> _ForkedRank:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        environment = {name: str(value) for name, value in (numbers | address).items()}
        ranks[rank].begin({"TORCH_CPP_LOG_LEVEL": "ERROR", **environment})
        return ranks[rank]

    replace_function("nestpipe.cli.launch:_start", start)
    try:
        _run_command(command.arguments)
    finally:
        for rank in ranks:
            rank.kill()


class _ForkedRank:
    """A rank, with the methods of Popen that the launcher uses. It waits for its environment before it begins."""

    def __init__(self, command: Command, rank: int) -> None:
        here, self._there = _FORK.Pipe(duplex=False)
        self._process = _FORK.Process(target=_wait_and_be_rank, args=(command, rank, here))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def begin(self, environment: dict[str, str]) -> None:
        self._there.send(environment)

    def poll(self) -> int | None:
        return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> None:
        self._process.join()


def _wait_and_be_rank(command: Command, rank: int, told: Connection) -> None:
    _leave_with_parent()
    _be_rank(command, rank, told.recv())


def _be_rank(command: Command, rank: int, environment: Mapping[str, str]) -> None:
    os.environ.update(environment)
    _redirect(command.logs / f"output-{rank}")
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    seams = Seams(command.logs / f"log-{rank}", command.checkpoints, command.hits.get(rank, ()))
    seams.install()
    try:
        _run_command(command.arguments)
    finally:
        seams.log_counts()


def _run_command(arguments: Sequence[str]) -> None:
    """Does what `python -m nestpipe` with these arguments does."""
    sys.argv = ["nestpipe", *arguments]
    try:
        runpy.run_module("nestpipe", run_name="__main__", alter_sys=False)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _leave_with_parent() -> None:
    parent = os.getppid()
    die_with_parent()
    if os.getppid() != parent:  # it died in between
        os._exit(1)


def _redirect(file: Path) -> None:
    """Has this process print to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
