"""Compares TorchRec and nestpipe: all loops of a workload are started at once, and take turns."""

import math
import socket
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from nestpipe.bench.harness.hosts import PORT, Host, linked_hosts
from nestpipe.bench.harness.pairs import alternate, spread
from nestpipe.bench.harness.report import Record
from nestpipe.bench.peer.group import LOCAL, Group, started
from nestpipe.bench.peer.turns import Task
from nestpipe.bench.peer.workload import SEED

THEIRS, OURS = ("plain", "pipelined"), ("serial", "nested")
OPTIMIZERS = ("sgd", "rowwise_adagrad")
LEAST_EMBEDDING_SHARE = 0.05
"""What the embeddings cost counts as at least this share of the dense part: the difference of two times is noisy."""
BURST_BYTES = 32768
WARM_UP_ROUNDS = 2


@dataclass(frozen=True)
class Effort:
    num_rounds: int = 7
    steps_a_turn: int = 12
    network_steps_a_turn: int = 3
    num_micro_batches: int = 1
    network_micro_batches: int = 4


QUICK = Effort(num_rounds=2, steps_a_turn=2, network_steps_a_turn=2)


@dataclass(frozen=True)
class Peer:
    """How the comparison is made."""

    python: Path
    """Python of the environment that has TorchRec."""
    quick: bool

    @property
    def effort(self) -> Effort:
        return QUICK if self.quick else Effort()

    def on_one_host(self, workload: str, optimizer: str) -> Record:
        effort = self.effort
        task = Task(workload, optimizer, "", effort.num_micro_batches, self.quick)
        groups, times = self._turns(task, effort.steps_a_turn, ())
        return {**self._identity(task, groups), **_figures(times, groups, effort.steps_a_turn)}

    def on_two_hosts(self, workload: str, optimizer: str, rate: str) -> Record:
        """The same with a link of a limited rate between the ranks."""
        effort = self.effort
        task = Task(workload, optimizer, "", effort.network_micro_batches, self.quick)
        with linked_hosts(rate, BURST_BYTES) as hosts:
            groups, times = self._turns(task, effort.network_steps_a_turn, hosts)
        theirs, ours = fastest(times, THEIRS), fastest(times, OURS)
        return {
            **self._identity(task, groups),
            "rate": rate,
            **_milliseconds(times),
            "torchrec": theirs,
            "ours": ours,
            **spread("network_speed_vs_torchrec", ratios(times[theirs], times[ours])),
            **{f"{way}_sent_bytes": groups[way].sent_bytes / groups[way].num_steps for way in (*THEIRS, *OURS)},
        }

    def _turns(
        self, task: Task, steps_a_turn: int, hosts: Sequence[Host]
    ) -> tuple[dict[str, Group], dict[str, list[float]]]:
        with ExitStack() as stack, tempfile.TemporaryDirectory(prefix="nestpipe-peer-") as folder:
            groups = {
                way: stack.enter_context(started(self._program(way), _for(task, way), _port(number, hosts), hosts))
                for number, way in enumerate((*THEIRS, *OURS, "dense"))
            }
            turns = {way: partial(group.train, steps_a_turn) for way, group in groups.items()}
            times = alternate(turns, self.effort.num_rounds, warm_up_rounds=WARM_UP_ROUNDS)
            for way in (*THEIRS, *OURS):
                file = Path(folder) / f"{way}.npz"
                groups[way].save_weights(file)
                groups[way].apart = _apart(Path(folder) / f"{THEIRS[0]}.npz", file)
        return groups, times

    def _program(self, way: str) -> list[str]:
        """All run with the same Python, torch and other packages: those imported take memory, too."""
        module = "torchrec_rank" if way in THEIRS else "our_rank"
        return [str(self.python), "-m", f"nestpipe.bench.peer.{module}"]

    def _identity(self, task: Task, groups: Mapping[str, Group]) -> Record:
        work = task.work
        return {
            "workload": task.workload,
            "optimizer": task.optimizer,
            "tables": work.num_tables,
            "rows": work.num_rows,
            "dim": work.dim,
            "keys_per_feature": work.keys_per_feature,
            "batch_size": work.batch_size,
            "ranks": 2,
            "threads": 1,
            "num_micro_batches": task.num_micro_batches,
            "num_rounds": self.effort.num_rounds,
            "seed": SEED,
            "torchrec_sharding": "table_wise",
            **{f"{way}_weights_apart": groups[way].apart for way in (*THEIRS[1:], *OURS)},
            "weights_apart": max(groups[way].apart for way in OURS),
        }


def _for(task: Task, way: str) -> Task:
    return Task(task.workload, task.optimizer, way, task.num_micro_batches if way == "nested" else 1, task.is_quick)


def _figures(times: Mapping[str, list[float]], groups: Mapping[str, Group], steps_a_turn: int) -> Record:
    theirs, ours = fastest(times, THEIRS), fastest(times, OURS)
    costs = [embedding_speed(t, o, d) for t, o, d in zip(times[theirs], times[ours], times["dense"], strict=True)]
    return {
        "steps_a_turn": steps_a_turn,
        **_milliseconds(times),
        **_cpu_milliseconds(groups),
        "torchrec": theirs,
        "ours": ours,
        **spread("speed_vs_torchrec", ratios(times[theirs], times[ours])),
        **spread("embedding_speed_vs_torchrec", costs),
        "most_speed_vs_torchrec": statistics.median(ratios(times[theirs], times["dense"])),
        **{f"{way}_peak_bytes": groups[way].peak_bytes for way in (*THEIRS, *OURS)},
        "memory_vs_torchrec": groups[ours].peak_bytes / groups[theirs].peak_bytes,
    }


def fastest(times: Mapping[str, list[float]], ways: Sequence[str]) -> str:
    return min(ways, key=lambda way: statistics.median(times[way]))


def ratios(baseline: Sequence[float], ours: Sequence[float]) -> list[float]:
    return [b / o for b, o in zip(baseline, ours, strict=True)]


def embedding_speed(theirs: float, ours: float, dense: float) -> float:
    """Returns what embeddings cost beyond the dense part in TorchRec / what they cost in ours."""
    return (theirs - dense) / max(ours - dense, LEAST_EMBEDDING_SHARE * dense)


def _cpu_milliseconds(groups: Mapping[str, Group]) -> Record:
    """Returns the CPU time of a step, without the rounds of warming up."""
    return {
        f"{way}_cpu_ms": statistics.median(group.cpu_seconds[WARM_UP_ROUNDS:]) * 1e3 for way, group in groups.items()
    }


def _milliseconds(times: Mapping[str, list[float]]) -> Record:
    return {f"{way}_ms": statistics.median(seconds) * 1e3 for way, seconds in times.items()}


def _apart(one: Path, other: Path) -> float:
    """Returns the largest difference of weights, relative to how far the weights of their tensor have moved."""
    with np.load(one) as a, np.load(other) as b:
        if set(a) != set(b):
            raise RuntimeError(f"{one.name} has weights {sorted(a)}, {other.name} has {sorted(b)}")
        apart = [float(np.abs(a[name] - b[name]).max() / np.abs(a[name]).max()) for name in a]
    return max(apart) if all(map(math.isfinite, apart)) else math.inf


def _port(number: int, hosts: Sequence[Host]) -> int:
    if hosts:
        return PORT + number  # in a new namespace every port is free
    with socket.socket() as free:
        free.bind((LOCAL, 0))
        return int(free.getsockname()[1])


def measure(peer: Peer, workloads: Sequence[str], rate: str | None) -> Iterator[Record]:
    for workload in workloads:
        for optimizer in OPTIMIZERS:
            yield peer.on_one_host(workload, optimizer)
    if rate is not None:
        for workload in workloads:
            yield peer.on_two_hosts(workload, OPTIMIZERS[0], rate)
