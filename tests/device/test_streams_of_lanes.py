"""Streams of lanes are their own, though torch hands out the same 32 over and over.

Fails if Streams._draw takes the first stream that torch gives it: then a lane may have the stream on which a graph is
recorded, and what it enqueues meanwhile becomes part of the graph.
"""

import gc
from itertools import count

import pytest
import torch

from nestpipe.device.streams import Streams

NUM_STREAMS = 32
DEVICE = torch.device("cuda", 0)
LANES = ("input", "upload", "route", "host", "rows", "gradients")


class FakeStream:
    numbers = count()

    def __init__(self, device: torch.device) -> None:
        self.stream_id = next(self.numbers) % NUM_STREAMS


@pytest.fixture(autouse=True)
def _streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Stream", FakeStream)


def ids(streams: Streams, lanes=LANES) -> list[int]:
    return [streams.stream(lane).stream_id for lane in lanes]


def test_no_two_lanes_share_one() -> None:
    recording = Streams(DEVICE, is_exclusive=True)
    worlds = [Streams(DEVICE) for _ in range(5)]
    found = [*ids(recording, ["recording"]), *(number for world in worlds for number in ids(world))]
    assert len(set(found)) == len(found) == 31
    assert [number for world in worlds for number in ids(world)] == found[1:], "a lane keeps its stream"


def test_where_there_are_too_few_none_is_that_of_a_recording() -> None:
    worlds = [Streams(DEVICE) for _ in range(5)]
    before = [number for world in worlds for number in ids(world)]
    recording = Streams(DEVICE, is_exclusive=True)
    (exclusive,) = ids(recording, ["recording"])
    assert exclusive not in before
    more = [number for world in [Streams(DEVICE) for _ in range(5)] for number in ids(world)]
    assert exclusive not in more
    full = Streams(DEVICE)
    ids(full, [str(number) for number in range(31)])
    with pytest.raises(RuntimeError, match="no stream left"):
        Streams(DEVICE, is_exclusive=True).stream("recording")


def test_those_of_a_world_that_is_gone_are_free() -> None:
    for _ in range(5):
        found = ids(Streams(DEVICE), [str(number) for number in range(31)])
        assert len(set(found)) == 31
        gc.collect()
