"""`bench h200`: an accelerator beside a host whose memory holds the tables. Four parts, each of minutes."""

from collections.abc import Callable, Iterator

from nestpipe.bench.h200 import four_ranks, models, one_rank, stages
from nestpipe.bench.harness.report import Record
from nestpipe.device.streams import default_device
from nestpipe.distributed import World

Part = Callable[[str, bool], Iterator[Record]]
"""(device, quick) -> records"""


def _alone(measure: Callable[[World, bool], Iterator[Record]]) -> Part:
    """In this process, a world of one."""
    return lambda device, quick: measure(World(device=device), quick)


PARTS: dict[str, Part] = {
    "one-rank": _alone(one_rank.records),
    "four-ranks": four_ranks.records,
    "models": _alone(models.records),
    "stages": _alone(stages.records),
}


def records(part: str, quick: bool) -> Iterator[Record]:
    device = default_device()
    if device == "cpu":
        raise ValueError("bench h200 needs an accelerator, and torch finds none here")
    return PARTS[part](device, quick)
