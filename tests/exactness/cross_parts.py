"""What the model of the exchange across batches is made of: fits of several ranks, their oracle, and collectives."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.exactness.pool_model_parts import NEW, Keys, Rows
from tests.exactness.pool_model_time import RuleError

Uses = dict[int, tuple[int, ...]]
"""The keys that a rank needs for a batch, and the micro-batches that need each."""
GlobalBatch = list[Uses] | None
"""What each rank needs; None if the batch is not a step."""


@dataclass
class Collective:
    """Is over once all ranks have posted something."""

    tag: object
    size: int
    posted: dict[int, Any] = field(default_factory=dict)
    """By rank."""

    @property
    def done(self) -> bool:
        return len(self.posted) == self.size


class Channels:
    """Collectives of a number of ranks. All ranks have to use a channel in the same order."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._collectives: defaultdict[str, list[Collective]] = defaultdict(list)
        self._num_joined: Counter[tuple[str, int]] = Counter()

    def join(self, channel: str, rank: int, tag: object) -> Collective:
        """Returns the next collective of a rank on a channel."""
        number, collectives = self._num_joined[channel, rank], self._collectives[channel]
        self._num_joined[channel, rank] += 1
        if number == len(collectives):
            collectives.append(Collective(tag, self._size))
        if collectives[number].tag != tag:
            raise RuleError(f"wrong message: rank {rank} joins {tag} where others join {collectives[number].tag}")
        return collectives[number]


@dataclass(frozen=True)
class CrossFit:
    """What happens in a fit. Steps count from its first one."""

    size: int
    batches: list[GlobalBatch]
    num_micro_batches: int
    has_late: bool
    """False if something needs all gradients before the update."""
    last_step: int
    """Step after which it stops, however many batches there are."""
    flushes: set[int]
    """Steps after which it flushes."""
    left_step: int | None
    """Step that all ranks leave after its dense part."""
    bad: tuple[int, int, int] | None
    """Step, rank and key of a gradient that is not finite. On a device, all later steps are masked, too."""
    max_rows: int
    limit: int
    """Most slots of a rank."""
    route_fault: tuple[str, int, int] | None
    """Collective, batch and rank of a route that fails."""
    store_fault: tuple[int, int] | None
    """Rank, and the call of its store in the host lane that fails."""

    def owner(self, key: int) -> int:
        return key % self.size

    def keys(self, batch: int, owner: int) -> Keys:
        """Returns the keys of a batch that a rank owns."""
        uses = self.batches[batch]
        return None if uses is None else sorted({key for rank in uses for key in rank if self.owner(key) == owner})

    def step(self, batch: int) -> int:
        """Returns the number of steps before a batch."""
        return sum(uses is not None for uses in self.batches[:batch])


def choose_cross_fit(draw: Random, size: int, keys: list[int], untrained: list[GlobalBatch]) -> CrossFit:
    """Returns a fit that may begin with the batches that the one before has left untrained."""
    num_batches, num_micro_batches = draw.randint(3, 9), draw.randint(1, 2)
    drawn = _choose_batches(draw, size, keys, num_batches, num_micro_batches)
    new = [batch if draw.random() < 0.92 else None for batch in drawn]
    batches = untrained + new if draw.random() < 0.5 and not _is_split(untrained, num_micro_batches) else new

    def perhaps(probability: float, value: Any) -> Any:
        return value if draw.random() < probability else None

    flush = perhaps(0.3, draw.randrange(num_batches))
    return CrossFit(
        size=size,
        batches=batches,
        num_micro_batches=num_micro_batches,
        has_late=draw.random() < 0.9,
        last_step=draw.randrange(num_batches) if draw.random() < 0.2 else 99,
        flushes=set() if flush is None else {flush},
        left_step=perhaps(0.06, draw.randrange(num_batches)),
        bad=perhaps(0.15, _choose_bad(draw, batches)),
        max_rows=draw.randint(len(keys) // size // 2, len(keys) // size) if draw.random() < 0.1 else 99,
        limit=draw.randint(1, len(keys) // size + 1) if draw.random() < 0.1 else 99,
        route_fault=perhaps(
            0.08, (draw.choice(["header", "reply"]), draw.randrange(1, num_batches), draw.randrange(size))
        ),
        store_fault=perhaps(0.1, (draw.randrange(size), draw.randint(2, 10))),
    )


def _choose_batches(
    draw: Random, size: int, keys: list[int], num_batches: int, num_micro_batches: int
) -> list[list[Uses]]:
    """Returns batches that share some keys with all others, some with their neighbours, and some with later ones."""
    common, most, period = draw.sample(keys, draw.randint(0, 2)), draw.randint(1, 3), draw.choice([1, 2, 3, 99, 99, 99])
    slide, width = draw.choice([0, 1, 2, 3, 4]), draw.randint(3, 6)
    parts = [(0,), (1,), (0, 1)] if num_micro_batches == 2 else [(0,)]

    def choose_uses(i: int) -> Uses:
        window = [keys[(i * slide + j) % len(keys)] for j in range(width)]
        chosen = {*draw.sample(window, draw.randint(0, most)), *(key for key in common if draw.random() < 0.7)}
        return {key: draw.choice(parts) for key in sorted(chosen)}

    drawn = [[choose_uses(i) for _ in range(size)] for i in range(num_batches)]
    return [drawn[i % period] for i in range(num_batches)]


def _choose_bad(draw: Random, batches: list[GlobalBatch]) -> tuple[int, int, int] | None:
    """Returns a step, and a rank and a key that has a gradient in it."""
    steps = [batch for batch in batches if batch is not None]
    number = draw.randrange(len(steps) // 2 + 1)
    uses = steps[number] if number < len(steps) else []
    needed = [(number, rank, key) for rank, keys in enumerate(uses) for key in keys]
    return draw.choice(needed) if needed else None


def _is_split(batches: list[GlobalBatch], num_micro_batches: int) -> bool:
    """Returns whether batches have more micro-batches than the given number."""
    uses = [parts for batch in batches if batch is not None for rank in batch for parts in rank.values()]
    return any(max(parts) >= num_micro_batches for parts in uses)


@dataclass(frozen=True)
class Expected:
    """What plain training gives, batch by batch on a dict."""

    states: list[Rows]
    """Rows before each step, and after the last one that counts."""
    full_ranks: set[int]
    """Ranks whose max_rows refuses the step after that."""
    bad_step: int | None
    """Step that is not finite."""

    def rows(self, step: int) -> Rows:
        """Returns the rows that a step sees, or those that remain if it is never reached."""
        return self.states[min(step, len(self.states) - 1)]


def train_plainly(rows: Rows, fit: CrossFit, first_step: int) -> Expected:
    states = [dict(rows)]
    for uses in fit.batches:
        if uses is None:
            continue
        before, number = states[-1], len(states) - 1
        step, after = first_step + number, dict(before)
        for key in {key for rank in uses for key in rank}:
            gradients = tuple((r, rank[key]) for r, rank in enumerate(uses) if key in rank)
            after[key] = (*before.get(key, NEW)[0], (step, gradients)), step
        num_rows = Counter(map(fit.owner, after))
        full_ranks = {rank for rank in range(fit.size) if num_rows[rank] > fit.max_rows}
        is_bad = fit.bad is not None and fit.bad[0] == number and fit.bad[2] in uses[fit.bad[1]]
        if full_ranks or is_bad:
            return Expected(states, full_ranks, number if is_bad else None)
        states.append(after)
    return Expected(states, set(), None)
