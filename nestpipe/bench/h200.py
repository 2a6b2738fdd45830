"""`bench h200`: an accelerator beside a host whose memory holds the tables. Three parts, each of minutes."""

from collections.abc import Iterator

from nestpipe.bench import h200_one_rank, h200_stages
from nestpipe.bench.report import Record
from nestpipe.device.streams import default_device
from nestpipe.distributed import World

PARTS = {"one-rank": h200_one_rank.records, "stages": h200_stages.records}


def records(part: str, quick: bool) -> Iterator[Record]:
    device = default_device()
    if device == "cpu":
        raise ValueError("bench h200 needs an accelerator, and torch finds none here")
    return PARTS[part](World(device=device), quick)
