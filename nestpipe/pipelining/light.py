"""Stages so short that handing them to another thread costs more than doing them.

Threads of one interpreter take turns. A stage that runs on a lane of its own interrupts the compute lane at each of its
calls, which takes about a millisecond in all, however little there is to do. So with small batches a stage is done by
the compute lane itself, where the schedule has it; with larger ones it goes back to its lane.
"""

from dataclasses import dataclass

LIGHT_SECONDS = 1.5e-3
"""a stage is light if it takes less of the processor's time, on average over the last few times"""
NUM_AVERAGED = 8
MOST_FACTOR = 4
"""a light stage that took more than this many times as long, waiting included, is not light: it waits for something"""
FIRST_PAUSE, LONGEST_PAUSE = 64, 4096
"""times that it is then done on its lane, before it is tried again; doubled each time"""


@dataclass
class _Load:
    num_times: int = 0
    mean_seconds: float = 0.0
    pause: int = FIRST_PAUSE
    num_paused: int = 0


class LightStages:
    """What each stage took so far, and whether it is light. Each stage is recorded by one thread at a time."""

    def __init__(self, light_seconds: float) -> None:
        self._light_seconds = light_seconds
        self._loads: dict[str, _Load] = {}

    def is_light(self, stage: str) -> bool:
        load = self._loads.get(stage)
        if load is None or load.num_times < NUM_AVERAGED or load.num_paused > 0:
            return False
        return load.mean_seconds < self._light_seconds

    def record(self, stage: str, work_seconds: float, seconds: float, *, is_here: bool) -> None:
        """work_seconds: time on the processor; seconds: waiting included; is_here: whether the compute lane did it."""
        load = self._loads.setdefault(stage, _Load())
        load.num_times += 1
        weight = 1 / min(load.num_times, NUM_AVERAGED)
        load.mean_seconds += weight * (work_seconds - load.mean_seconds)
        if is_here and seconds > MOST_FACTOR * self._light_seconds:
            load.num_paused, load.pause = load.pause, min(2 * load.pause, LONGEST_PAUSE)
        elif not is_here and load.num_paused > 0:
            load.num_paused -= 1
