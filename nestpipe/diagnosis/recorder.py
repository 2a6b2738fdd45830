"""Records what a rank measures while it trains, and brings the measurements of all ranks to rank 0."""

import json
import time
from collections.abc import Sequence
from statistics import mean, median
from typing import Any

import torch

from nestpipe.diagnosis.probe import probe_links
from nestpipe.distributed import Channel, World
from nestpipe.pipelining.stage import STAGES
from nestpipe.pipelining.stage_work import StageWork
from nestpipe.pipelining.step_times import StepLog, StepTimes

RankRecord = dict[str, Any]
"""Measurements of one rank, as they stand in the file."""

MOST_STEPS, LEAST_STEPS = 100, 8
"""Last steps of a run that are recorded. A run with fewer than LEAST_STEPS of them shows nothing."""
MOST_RECORDS = 6400
"""Steps of all ranks together that rank 0 gathers, except that each rank sends at least FEWEST_STEPS."""
FEWEST_STEPS = 20
NUM_CLOCK_ROUNDS = 15
"""Exchanges that compare the ranks' clocks."""


class Recorder:
    """Made before the training; `gather` comes after it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._before = {channel.name: channel.stamps.count for channel in world.step_channels}
        """Collectives of each channel before the training."""

    def gather(self, times: Sequence[StepTimes], work: StageWork) -> list[RankRecord]:
        """Returns the measurements of all ranks, on rank 0; on the others an empty list, as after a short run.

        All ranks call it, after the training.
        """
        num_steps = len(times) + (sum(block.num_steps for block in times.older) if isinstance(times, StepLog) else 0)
        most = max(FEWEST_STEPS, min(MOST_STEPS, MOST_RECORDS // self._world.size))
        num_recorded = min(len(times), num_steps - max(5, num_steps // 10), most)  # the first steps warm up
        if self._world.size == 1 or num_recorded < LEAST_STEPS:
            return []
        record = self._record(list(times[-num_recorded:]), num_steps, work)
        return _gathered(record, self._world)

    def _record(self, steps: list[StepTimes], num_steps: int, work: StageWork) -> RankRecord:
        return {
            "rank": self._world.rank,
            "num_steps": len(steps),
            "step_ms": median(step.step_ms for step in steps),
            "stages_ms": {stage: median(step.stages[stage] for step in steps) for stage in STAGES},
            "work_ms": work.medians(len(steps)),
            "owned_keys": mean(step.sizes["owned_keys_per_step"] for step in steps),
            "collectives": {
                channel.name: self._stamps_of(channel, len(steps), num_steps) for channel in self._world.step_channels
            },
            "clock_ns": _compare_clocks(self._world),
            "links": probe_links(self._world),
        }

    def _stamps_of(self, channel: Channel, num_recorded: int, num_steps: int) -> dict[str, Any]:
        """Returns the stamps of the last steps. Every step has equally many collectives of a channel, or nearly."""
        since = channel.stamps.count - self._before[channel.name]
        first, stamps = channel.stamps.last(round(since / num_steps * num_recorded))
        return {"first": first, "entered_ns": [s[0] for s in stamps], "left_ns": [s[1] for s in stamps]}


def _compare_clocks(world: World) -> list[tuple[int, int]]:
    """Returns when this rank entered and left exchanges of a few bytes, which no rank leaves before all entered."""
    stamps = []
    for _ in range(NUM_CLOCK_ROUNDS):
        entered = time.perf_counter_ns()
        world.control.all_to_all_equal(torch.zeros(world.size, 1))
        stamps.append((entered, time.perf_counter_ns()))
    return stamps


def _gathered(record: RankRecord, world: World) -> list[RankRecord]:
    """Returns the records of all ranks, on rank 0 alone: each of them may be large."""
    data = torch.frombuffer(bytearray(json.dumps(record).encode()), dtype=torch.uint8)
    sizes: list[int] = world.control.all_to_all_equal(torch.full((world.size, 1), len(data))).flatten().tolist()
    is_first = world.rank == 0
    received = torch.empty(sum(sizes) if is_first else 0, dtype=torch.uint8)
    to_first = [len(data), *[0] * (world.size - 1)]
    world.control.all_to_all(data, to_first, received, sizes if is_first else [0] * world.size)
    return [json.loads(bytes(part.numpy())) for part in received.split(sizes)] if is_first else []
