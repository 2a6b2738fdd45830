"""A launcher and its ranks as forks of a process that has imported everything: a run starts in a second, not in ten.

The launcher is `launch`, and each rank calls `on_this_rank`, like the processes of `nestpipe train --ranks 2`.
"""

import hashlib
import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from tests.ranks import _CONTEXT

_FORK = multiprocessing.get_context("fork")
NUM_RANKS = 2
TRAINING_SECONDS = 30.0


class ForkedRank:
    """A rank, with the methods of Popen that `launch` uses. It waits for its environment before it begins."""

    def __init__(self, rank: int, folder: Path, kind: str) -> None:
        here, self._there = _FORK.Pipe(duplex=False)
        self._process = _FORK.Process(target=_rank, args=(rank, folder, kind, here))
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


@dataclass
class Run:
    """A launcher that has started, and the processes of its ranks."""

    folder: Path
    launcher: multiprocessing.process.BaseProcess
    ranks: list[int]

    def wait_until(self, name: str) -> None:
        """Waits until every rank has written a file of this name."""
        deadline = time.monotonic() + TRAINING_SECONDS
        while not all((self.folder / f"{name}-{rank}").exists() for rank in range(NUM_RANKS)):
            assert time.monotonic() < deadline, self.errors()
            assert self.launcher.is_alive(), self.errors()
            time.sleep(0.02)

    def exit_code(self, seconds: float = 20.0) -> int | None:
        self.launcher.join(seconds)
        return self.launcher.exitcode

    def are_gone(self, seconds: float = 10.0) -> bool:
        """Returns whether no rank is alive at the latest after this time."""
        deadline = time.monotonic() + seconds
        while any(map(_is_alive, self.ranks)) and time.monotonic() < deadline:
            time.sleep(0.02)
        return not any(map(_is_alive, self.ranks))

    def errors(self) -> list[str]:
        return [(self.folder / f"errors-{rank}").read_text() for rank in range(NUM_RANKS)]

    def num_steps(self) -> list[str]:
        return [(self.folder / f"steps-{rank}").read_text() for rank in range(NUM_RANKS)]

    def end(self) -> None:
        for process in (*self.ranks, self.launcher.pid):
            if process is not None and _is_alive(process):
                os.kill(process, signal.SIGKILL)
        self.launcher.join()


def start(folder: Path, kind: str = "trains") -> Run:
    """Starts a launcher and two ranks. kind: what the ranks do; see _work and _rank."""
    here, there = _CONTEXT.Pipe(duplex=False)
    launcher = _CONTEXT.Process(target=_launcher, args=(folder, kind, there))
    launcher.start()
    assert here.poll(TRAINING_SECONDS)
    return Run(folder, launcher, here.recv())


def _is_alive(process: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{process}/stat").read_text()  # a dead one may wait for its parent
    except (FileNotFoundError, ProcessLookupError):
        return False


def _launcher(folder: Path, kind: str, told) -> None:
    from nestpipe.cli import launch

    ranks = [ForkedRank(rank, folder, kind) for rank in range(NUM_RANKS)]
    told.send([rank.pid for rank in ranks])

    def begin(rank: int, num_ranks: int, port: int, arguments: Sequence[str]) -> ForkedRank:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        ranks[rank].begin({name: str(value) for name, value in (numbers | address).items()})
        return ranks[rank]

    launch._start = begin
    raise SystemExit(launch.launch(NUM_RANKS, ()))


def _rank(rank: int, folder: Path, kind: str, told) -> None:
    import torch
    import typer

    from nestpipe.cli.this_rank import on_this_rank
    from nestpipe.distributed.child import die_with_parent
    from nestpipe.distributed.world import World
    from nestpipe.recipe.text import load_config

    die_with_parent()
    errors = os.open(folder / f"errors-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(errors, 2)
    torch.set_num_threads(1)
    os.environ.update(told.recv())
    if kind == "starts late":
        (folder / f"starting-{rank}").touch()
        time.sleep(0.5 * rank)
    if kind == "asks before its world exists" and rank == 1:
        from_environment = World.from_environment

        def asked(*arguments, **names) -> World:
            os.kill(os.getpid(), signal.SIGTERM)
            return from_environment(*arguments, **names)

        World.from_environment = staticmethod(asked)
    config = load_config(None, ["runtime.device=cpu"])
    try:
        on_this_rank(config, lambda resolved, world: _work(world, folder, kind), trains=kind != "evaluates")
    except typer.Exit as ended:
        raise SystemExit(ended.exit_code) from None


def _work(world, folder: Path, kind: str) -> dict:
    """Trains until it is stopped. "hangs": rank 1's third forward does not return, not even to the interpreter."""
    from tests.exactness.cases import Case, global_batches, make_trainer, share_of

    trainer = make_trainer(world, Case("adagrad", "pooled_sum", 2, schedule="nested"))
    trainer.check_split = False
    forward, batches = trainer.model.forward, share_of(global_batches(6), world)

    def spoiled(embeddings, inputs):
        if kind == "hangs" and trainer.num_steps == 2:
            (folder / f"hanging-{world.rank}").touch()
            hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000_000 if world.rank == 1 else 1)
        return forward(embeddings, inputs)

    def tell(result) -> None:
        if trainer.num_steps == 3:
            (folder / f"training-{world.rank}").touch()

    trainer.model.forward = spoiled
    trainer.fit((batches[i % 6] for i in count()), after_step=tell)
    (folder / f"steps-{world.rank}").write_text(str(trainer.num_steps))
    return {}
