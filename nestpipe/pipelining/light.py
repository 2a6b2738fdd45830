"""Light stages: those so short that handing them to another thread costs more than doing them.

Threads of one interpreter take turns. A stage on its own lane interrupts the compute lane at each of its calls, which
takes about a millisecond in total, however little there is to do. So with small batches the compute lane does a stage
itself, at its place in the schedule; with larger batches the stage returns to its lane.
"""

from dataclasses import dataclass

LIGHT_SECONDS = 1.5e-3
"""A stage is light if it takes less CPU time than this, on average over its last runs."""
NUM_AVERAGED = 8
MOST_FACTOR = 4
"""A light stage that took more than this many times LIGHT_SECONDS, waiting included, is paused: it had to wait."""
FIRST_PAUSE, LONGEST_PAUSE = 64, 4096
"""Runs on its own lane before a paused stage is tried again; doubled each time."""


@dataclass
class _Load:
    num_times: int = 0
    mean_seconds: float = 0.0
    pause: int = FIRST_PAUSE
    num_paused: int = 0


class LightStages:
    """Measures how long each stage takes, and finds the light ones. Each stage is recorded by one thread at a time."""

    def __init__(self, light_seconds: float) -> None:
        self._light_seconds = light_seconds
        self._loads: dict[str, _Load] = {}

    def is_light(self, stage: str) -> bool:
        load = self._loads.get(stage)
        if load is None or load.num_times < NUM_AVERAGED or load.num_paused > 0:
            return False
        return load.mean_seconds < self._light_seconds

    def record(self, stage: str, work_seconds: float, seconds: float, *, is_inline: bool) -> None:
        """Records a run. work_seconds: CPU time. seconds: wall time. is_inline: the compute lane did it."""
        load = self._loads.setdefault(stage, _Load())
        load.num_times += 1
        weight = 1 / min(load.num_times, NUM_AVERAGED)
        load.mean_seconds += weight * (work_seconds - load.mean_seconds)
        if is_inline and seconds > MOST_FACTOR * self._light_seconds:
            load.num_paused, load.pause = load.pause, min(2 * load.pause, LONGEST_PAUSE)
        elif not is_inline and load.num_paused > 0:
            load.num_paused -= 1
