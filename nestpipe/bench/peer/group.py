"""The ranks of one system, in processes of their own, which train when it is their turn."""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nestpipe.bench.harness.hosts import Host
from nestpipe.bench.harness.requirements import SOURCE_TREE
from nestpipe.bench.peer.turns import Task
from nestpipe.distributed.child import die_with_parent

LOCAL = "127.0.0.1"
GRACE_SECONDS = 3.0
"""Time in which the other ranks can write why they fail, too."""


class Rank:
    """One process. What it writes to stderr is shown only if it fails: TorchRec warns a lot."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed by `end`
        self.process = subprocess.Popen(
            command,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )

    def write(self, request: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which `read` finds
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()

    def read(self) -> dict[str, Any] | None:
        """Returns the next line that is an answer; None at the end. Libraries may print lines of their own."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        return None

    def errors(self) -> str:
        """Returns its exit code, and the end of what it has written to stderr."""
        self._errors.seek(0)
        return f"exit code {self.process.poll()}:\n{self._errors.read()[-4000:]}"

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._errors.close()


@dataclass
class Group:
    """Ranks that have started."""

    ranks: list[Rank]
    apart: float = 0.0
    """How far its weights are from those of the first group."""
    sent_bytes: int = 0
    """Bytes that rank 0 has sent in all turns. Only its own host's interface shows them, see `peer/turns.py`."""
    num_steps: int = 0
    peak_bytes: int = 0
    """Largest memory of a rank so far."""
    cpu_seconds: list[float] = field(default_factory=list)
    """CPU time of a step, by turn: the mean over ranks. Other programs on the machine hardly change it."""

    def train(self, num_steps: int) -> float:
        """Returns the seconds of a step."""
        answers = self._ask({"steps": num_steps})
        self.num_steps += num_steps
        self.sent_bytes += answers[0]["sent_bytes"]
        self.peak_bytes = max(self.peak_bytes, *(answer["peak_bytes"] for answer in answers))
        self.cpu_seconds.append(sum(answer["cpu_seconds"] for answer in answers) / len(answers) / num_steps)
        return float(answers[0]["seconds"]) / num_steps

    def save_weights(self, file: Path) -> None:
        self._ask({"weights": str(file)})

    def _ask(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        for rank in self.ranks:
            rank.write(request)
        return answers_of(self.ranks)


def answers_of(ranks: Sequence[Rank]) -> list[dict[str, Any]]:
    """Returns an answer of each rank. If one of them ends instead, shows the errors of all: others wait for it."""
    with ThreadPoolExecutor(len(ranks)) as readers:
        pending = [readers.submit(rank.read) for rank in ranks]
        if any(done.result() is None for done in as_completed(pending)):
            time.sleep(GRACE_SECONDS)
            texts = [f"rank {number}, {rank.errors()}" for number, rank in enumerate(ranks)]
            for rank in ranks:
                rank.process.kill()
            raise RuntimeError("\n".join(["a rank has ended", *texts]))
        return [answer for future in pending if (answer := future.result()) is not None]


@contextmanager
def started(program: Sequence[str], task: Task, port: int, hosts: Sequence[Host]) -> Iterator[Group]:
    """Starts two ranks, on hosts if there are any. Kills them at the end."""
    ranks: list[Rank] = []
    try:
        for number in range(2):
            inside = ["ip", "netns", "exec", hosts[number].namespace] if hosts else []
            ranks.append(Rank([*inside, *program], _environment(number, port, hosts)))
            ranks[-1].write(asdict(task))
        answers_of(ranks)
        yield Group(ranks)
    finally:
        for rank in ranks:
            rank.end()


def _environment(rank: int, port: int, hosts: Sequence[Host]) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(SOURCE_TREE),
        "MASTER_ADDR": hosts[0].address if hosts else LOCAL,
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GLOO_SOCKET_IFNAME": hosts[rank].interface if hosts else "lo",
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
