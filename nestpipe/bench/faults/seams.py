"""Puts faults into the process of a rank, and keeps a log of what it does. Only processes of this benchmark call it."""

import importlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock, current_thread
from typing import Any

from nestpipe.bench.faults.disk import mend, spoil
from nestpipe.bench.faults.moments import MOMENTS, STEP, Hit, Moment
from nestpipe.bench.faults.power import stamp, stamps_in

SLOW_SECONDS = {"finish a shard": 0.002, "remove a file": 0.0005}
"""Pauses that stretch saves over several steps, as with large tables."""
PIECES_A_STEP, MOST_SECONDS = 3, 1.0
"""After this number of pieces a save waits for the next step, unless training waits for the save; but not for ever."""
SMALL_BYTES = {
    "nestpipe.checkpoint.row_writer:STRETCH_BYTES": 4096,
    "nestpipe.checkpoint.row_writer:ASIDE_BYTES": 8192,
    "nestpipe.store.host_snapshot:ASIDE_BYTES": 2048,
}
"""Sizes for small tables: rows are taken in many pieces, and training waits for what is aside."""


class Seams:
    """The seams of one rank. `install` replaces functions by ones that count their calls, log some, and do the hits."""

    def __init__(self, log: Path, checkpoints: Path, hits: Sequence[Hit]) -> None:
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._checkpoints = checkpoints
        self._hits = tuple(hits)
        self._counts: Counter[str] = Counter()
        self._lock = Lock()

    def install(self) -> None:
        for moment in MOMENTS.values():
            owner, name = _find(moment.target)
            setattr(owner, name, self._seam(moment, getattr(owner, name)))
        for target, num_bytes in SMALL_BYTES.items():
            owner, name = _find(target)
            getattr(owner, name)  # raises if the package no longer has it
            setattr(owner, name, num_bytes)
        light, name = _find("nestpipe.pipelining.light:LIGHT_SECONDS")
        setattr(light, name, 0.0)  # stages run on their lanes, however short they are

    def log(self, event: str, value: object = None) -> None:
        """Appends a line to the log. It survives a SIGKILL of this process."""
        os.write(self._log, json.dumps([time.monotonic(), event, value]).encode() + b"\n")

    def log_counts(self) -> None:
        self.log("counts", self._counts)

    def _seam(self, moment: Moment, function: Callable[..., Any]) -> Callable[..., Any]:
        def seam(*arguments: Any, **keywords: Any) -> Any:
            if moment.in_folder and not self._is_in_folder(arguments[0]):
                return function(*arguments, **keywords)
            with self._lock:
                self._counts[moment.name] += 1
                number = self._counts[moment.name]
            self._hit(moment, number, is_after=False)
            time.sleep(SLOW_SECONDS.get(moment.name, 0.0))
            if moment.name == "append what is aside" and number % PIECES_A_STEP == 0:
                self._wait_for_step()
            self._log_call(moment, arguments)
            result = function(*arguments, **keywords)
            self._log_result(moment, arguments, result)
            self._hit(moment, number, is_after=True)
            return result

        return seam

    def _hit(self, moment: Moment, number: int, is_after: bool) -> None:
        for hit in self._hits:
            if (hit.moment, hit.number, hit.is_after) == (moment.name, number, is_after):
                self.log("hit", str(hit))
                self._do(hit)

    def _do(self, hit: Hit) -> None:
        if hit.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()  # until the signal arrives, which may be in another thread
        elif hit.action == "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
        elif hit.action == "mend":
            mend(self._checkpoints.parent)
        else:
            spoil(self._checkpoints.parent, hit.action, hit.leave_bytes)

    def _wait_for_step(self) -> None:
        """Has the thread that saves wait until training has done another step."""
        if current_thread().name != "save":
            return
        num_steps, deadline = self._counts[STEP.name], time.monotonic() + MOST_SECONDS
        while self._counts[STEP.name] == num_steps and time.monotonic() < deadline:
            if self._counts["finish"] >= self._counts["begin the rows"]:
                return
            time.sleep(0.001)

    def _log_call(self, moment: Moment, arguments: tuple[Any, ...]) -> None:
        if moment.name == "open the folders":
            self.log(moment.name)
        if moment.name == "rename" and ".partial" in Path(arguments[0]).name:
            folder = Path(arguments[0])
            self.log("visible", [folder.name, stamps_in(folder), stamp(folder.parent)[0]])

    def _log_result(self, moment: Moment, arguments: tuple[Any, ...], result: Any) -> None:
        if moment.name in ("step", "load"):
            self.log(moment.name, arguments[0].num_steps)
        elif moment.name == "publish":
            self.log(moment.name, result.name)
        elif moment.name == "sync a file":
            self.log("sync", stamp(arguments[0]))

    def _is_in_folder(self, file: int | str | Path) -> bool:
        try:
            path = Path(f"/proc/self/fd/{file}").readlink() if isinstance(file, int) else Path(file)
        except OSError:
            return False
        return path.is_relative_to(self._checkpoints)


def replace_function(target: str, function: Callable[..., Any]) -> None:
    """Replaces a function that is named like the target of a moment."""
    owner, name = _find(target)
    getattr(owner, name)
    setattr(owner, name, function)


def _find(target: str) -> tuple[Any, str]:
    """Returns the module or class of a target, and the name in it."""
    module, _, path = target.partition(":")
    owner = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, name
