"""Tests that lanes do not share streams, although torch hands out the same 32 in turn.

Fails if Streams._draw takes the first stream that torch gives it: a lane may then get the stream on which a graph is
recorded, and what it enqueues becomes part of the graph.
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

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self.stream_id = next(self.numbers) % NUM_STREAMS


@pytest.fixture(autouse=True)
def _streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Stream", FakeStream)


def ids(streams: Streams, lanes=LANES) -> list[int]:
    return [streams.stream(lane).stream_id for lane in lanes]


def test_no_two_lanes_share_one() -> None:
    recording = Streams(DEVICE, is_exclusive=True)
    worlds = [Streams(DEVICE) for _ in range(5)]
    drawn = [*ids(recording, ["recording"]), *(number for world in worlds for number in ids(world))]
    assert len(set(drawn)) == len(drawn) == 31
    assert [number for world in worlds for number in ids(world)] == drawn[1:], "a lane keeps its stream"


def test_the_stream_of_a_recording_is_never_shared() -> None:
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


def test_streams_of_a_deleted_world_are_free() -> None:
    for _ in range(5):
        drawn = ids(Streams(DEVICE), [str(number) for number in range(31)])
        assert len(set(drawn)) == 31
        gc.collect()
