"""Work on stages: how long each of the last operations has taken, and how much of that was CPU time."""

import time
from collections import deque
from statistics import median

NUM_KEPT = 8192
"""Operations that are kept."""


class StageWork:
    """A ring of operations: those of lanes, and on a CPU those of the dense part."""

    def __init__(self) -> None:
        self._kept: deque[tuple[str, int, float, float]] = deque(maxlen=NUM_KEPT)

    def begin(self) -> tuple[float, float]:
        """Returns the CPU time of this thread, and the time, for `end`."""
        return time.thread_time(), time.perf_counter()

    def end(self, stage: str, batch: int, began: tuple[float, float]) -> tuple[float, float]:
        """Adds an operation, and returns its seconds of CPU time and of time. Several threads may call it at once."""
        seconds = time.thread_time() - began[0], time.perf_counter() - began[1]
        self._kept.append((stage, batch, *seconds))
        return seconds

    def medians(self, num_batches: int) -> dict[str, tuple[float, float]]:
        """Returns milliseconds of a batch by stage, waits inside the stage included, and those of CPU time among them.

        They are medians over the last batches of which all is kept, at most `num_batches`.
        """
        sums: dict[str, dict[int, list[float]]] = {}
        for stage, batch, cpu_seconds, seconds in list(self._kept):
            times = sums.setdefault(stage, {}).setdefault(batch, [0.0, 0.0])
            times[0] += seconds * 1e3
            times[1] += cpu_seconds * 1e3
        medians = {}
        for stage, by_batch in sums.items():
            complete = sorted(by_batch)[1:]  # of the first one, a part may have been forgotten
            last = [by_batch[batch] for batch in complete[-num_batches:]]
            if last:
                medians[stage] = (median(t[0] for t in last), median(t[1] for t in last))
        return medians
