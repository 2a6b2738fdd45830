"""`bench h200`: an accelerator beside a host whose memory holds the tables. Four parts, each of minutes."""

from collections.abc import Callable, Iterator

from nestpipe.bench import h200_four_ranks, h200_models, h200_one_rank, h200_stages
from nestpipe.bench.report import Record
from nestpipe.device.streams import default_device
from nestpipe.distributed import World

Part = Callable[[str, bool], Iterator[Record]]
"""(device, quick) -> records"""


def _alone(measure: Callable[[World, bool], Iterator[Record]]) -> Part:
    """In this process, a world of one."""
    return lambda device, quick: measure(World(device=device), quick)


PARTS: dict[str, Part] = {
    "one-rank": _alone(h200_one_rank.records),
    "four-ranks": h200_four_ranks.records,
    "models": _alone(h200_models.records),
    "stages": _alone(h200_stages.records),
}


def records(part: str, quick: bool) -> Iterator[Record]:
    device = default_device()
    if device == "cpu":
        raise ValueError("bench h200 needs an accelerator, and torch finds none here")
    return PARTS[part](device, quick)
