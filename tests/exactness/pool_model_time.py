"""Time, for the model of the row pool: lanes, which are threads, and streams, whose effects run later than launched."""

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from random import Random
from typing import Protocol

NUM_TRIES = 20


class RuleError(AssertionError):
    """A rule does not hold."""


class Awaitable(Protocol):
    @property
    def done(self) -> bool: ...


class Actor(Awaitable, Protocol):
    @property
    def is_runnable(self) -> bool: ...

    def advance(self) -> None: ...


@dataclass
class Event:
    done: bool = False


@dataclass
class Condition:
    is_true: Callable[[], bool]

    @property
    def done(self) -> bool:
        return self.is_true()


Work = Generator[Awaitable | None, None, None]
"""What a lane does. It yields wherever others can run: what it waits for, or None."""


class Lane:
    """A thread that does what it is given, in order. It is done when it has nothing to do."""

    def __init__(self) -> None:
        self.queue: deque[Work] = deque()
        self._awaited: Awaitable | None = None

    @property
    def done(self) -> bool:
        return not self.queue

    @property
    def is_runnable(self) -> bool:
        return bool(self.queue) and (self._awaited is None or self._awaited.done)

    def advance(self) -> None:
        try:
            self._awaited = next(self.queue[0])
        except StopIteration:
            self.queue.popleft()
            self._awaited = None

    def drop_waiting(self) -> None:
        """Gives up all work but that under way."""
        while len(self.queue) > 1:
            self.queue.pop().close()


class Stream:
    """Effects on a device, in order. Without a device an effect runs when it is launched."""

    def __init__(self, is_late: bool) -> None:
        self._is_late = is_late
        self._queue: deque[tuple[Callable[[], None], Awaitable | None, Event]] = deque()

    @property
    def done(self) -> bool:
        return not self._queue

    @property
    def is_runnable(self) -> bool:
        if not self._queue:
            return False
        _, after, _ = self._queue[0]
        return after is None or after.done

    def launch(self, effect: Callable[[], None], after: Awaitable | None = None) -> Event:
        """Returns the event that the effect has run. It runs after those launched before it, and after `after`."""
        event = Event()
        self._queue.append((effect, after, event))
        if not self._is_late:
            assert self.is_runnable
            self.advance()
        return event

    def wait(self, event: Event) -> None:
        """Makes all later effects wait for an event."""
        self.launch(lambda: None, after=event)

    def mark(self) -> Event:
        """Returns the event that everything launched so far has run."""
        return self.launch(lambda: None)

    def advance(self) -> None:
        effect, _, event = self._queue.popleft()
        effect()
        event.done = True


def take_turns(actors: list[Actor], draw: Random, check: Callable[[Actor], None]) -> None:
    """Lets actors take turns at random until none can go on; then the first one has to be done. Some are much faster.

    check: called with each actor after its turn.
    """
    weights = [draw.choice((1, 8, 64)) for _ in actors]
    weighted = [actor for actor, weight in zip(actors, weights, strict=True) for _ in range(weight)]
    while True:
        for _ in range(NUM_TRIES):  # much faster than to look at all actors
            actor = weighted[int(draw.random() * len(weighted))]
            if actor.is_runnable:
                break
        else:
            runnable = [i for i, actor in enumerate(actors) if actor.is_runnable]
            if not runnable:
                break
            actor = actors[draw.choices(runnable, [weights[i] for i in runnable])[0]]
        actor.advance()
        check(actor)
    if not actors[0].done:
        raise RuleError("deadlock: no lane and no stream can go on")
