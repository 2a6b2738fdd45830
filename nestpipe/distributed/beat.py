"""Heartbeats: the state that each rank publishes every few seconds, and the words in which messages quote it."""

import json
import socket
import time
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Beat:
    """Heartbeat of a rank."""

    number: int
    idle_seconds: float
    """Time since its last progress."""
    is_waiting: bool
    """True if it does nothing but wait for other ranks."""
    place: str
    """Step and stage."""
    host: str
    sent_at: float
    """Time by the clock of its host, in seconds since the epoch."""
    has_left: bool = False
    """True if its world was closed, or its process ends."""

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def decode(data: bytes) -> "Beat":
        return Beat(**json.loads(data))

    @property
    def seen(self) -> str:
        """Returns where and when this rank was last seen."""
        return f"({self.place}, on host {self.host}, last seen {clock(self.sent_at)})"

    @property
    def idle(self) -> str:
        """Returns where this rank is, and since when it has made no progress."""
        return f"({self.place}, on host {self.host}, since {clock(self.sent_at - self.idle_seconds)})"


def happened_here(place: str) -> str:
    """Returns, in the same words, that something has just happened on this host."""
    return f"({place}, on host {socket.gethostname()}, at {clock(time.time())})"


def clock(seconds: float) -> str:
    """Returns a time, in seconds since the epoch, as local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def unchanged(before: list[bytes], after: list[bytes]) -> list[int]:
    """Returns the ranks whose heartbeat did not change between two readings, except those that have left."""
    pairs = zip(before, after, strict=True)
    return [rank for rank, (old, new) in enumerate(pairs) if old == new and not Beat.decode(new).has_left]


def left(beats: list[bytes]) -> list[int]:
    """Returns the ranks that have left."""
    return [rank for rank, beat in enumerate(beats) if Beat.decode(beat).has_left]


def with_last_seen(beats: list[bytes], ranks: list[int], reason: str) -> dict[int, str]:
    """Returns, for each of these ranks, the reason and where it was last seen."""
    return {rank: f"{reason} {Beat.decode(beats[rank]).seen}" for rank in ranks}


def beat_key(rank: int) -> str:
    """Returns the key of a rank's heartbeat in the ranks' store."""
    return f"beat/{rank}"


def beat_keys(size: int) -> list[str]:
    return [beat_key(rank) for rank in range(size)]
