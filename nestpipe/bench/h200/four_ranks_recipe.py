"""Recipes of part four-ranks of `bench h200`. Their sizes are adjusted to the shares that serial's step must have.

Recipe `covered`: each rank owns an equal part of a batch's rows, and dense compute can just cover their exchange.
Recipe `published`: serial's step has the shares published for 1,536 workers, where lookup and exchange take most of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

LOOKUP_SHARE, EXCHANGE_SHARE = 0.50, 0.20
"""Shares of serial's step, in the middle of what the targets allow."""
DENSE_OVER_EXCHANGE = 1.4
CLOSE = 0.02
"""Deviation of a share that needs no further adjustment."""
MOST_REPEATS = 48
"""Limits the activations that an unsplit batch keeps for backward. Four ranks share the memory."""
FEWEST_REMOTE = 0.02


@dataclass(frozen=True)
class Published:
    """Exposed lookup and exchange of a step at 1,536 accelerators (arXiv 2604.06956), and its speedup."""

    lookup_ms: float
    exchange_ms: float
    speedup: float


PUBLISHED_DENSE_MS = 1712.0
PUBLISHED_STEP_MS = 5793.83


def _sum_of_parts(lookup_ms: float, exchange_ms: float) -> Published:
    """Computes the speedup from the sum of the parts, as only these are published for inter and intra."""
    speedup = PUBLISHED_STEP_MS / (PUBLISHED_DENSE_MS + lookup_ms + exchange_ms)
    return Published(lookup_ms, exchange_ms, round(speedup, 2))


PUBLISHED = {
    "serial": Published(2870.99, 1207.85, 1.0),
    "inter": _sum_of_parts(36.0, 1169.0),
    "intra": _sum_of_parts(2870.0, 160.0),
    "nested": Published(30.19, 154.23, 3.06),
}


@dataclass(frozen=True)
class Recipe:
    """Model, batches and row optimizer of a comparison."""

    name: str
    row_optimizer: str
    """Name of the row optimizer. Wider row state makes lookup slower, but not the exchange."""
    batch_size: int
    """Samples of a rank's batch."""
    remote_share: float
    """Share of a batch's keys that other ranks own."""
    repeats: int
    """Number of times that the dense layer is applied."""
    length: int = 64
    """Keys of a sample."""
    distinct_share: float = 0.8
    """Distinct keys of a batch, relative to all its keys."""
    overlap: float = 0.5
    """Share of a batch's keys that are also in the previous batch."""
    dim: int = 512
    hidden: int = 512
    num_batches: int = 4
    """Number of different batches, which are repeated."""

    @property
    def num_distinct(self) -> int:
        return round(self.batch_size * self.length * self.distinct_share)


COVERED = Recipe("covered", "rowwise_adagrad", batch_size=1024, remote_share=0.75, repeats=22, dim=1024)
AS_PUBLISHED = Recipe("published", "adam", batch_size=2048, remote_share=0.3, repeats=12, hidden=256)


def tiny(recipe: Recipe) -> Recipe:
    return replace(recipe, batch_size=32, length=8, dim=16, hidden=16, num_batches=3, repeats=2)


def serial_shares(parts: Mapping[str, float]) -> tuple[float, float]:
    """Returns lookup and exchange as shares of a step."""
    return parts["exposed_lookup_ms"] / parts["step_ms"], parts["exposed_exchange_ms"] / parts["step_ms"]


def is_close(recipe: Recipe, parts: Mapping[str, float]) -> bool:
    """Returns whether the measured parts of serial's step have the shares that the recipe requires."""
    if recipe.name == COVERED.name:
        return abs(parts["dense_ms"] / parts["exposed_exchange_ms"] / DENSE_OVER_EXCHANGE - 1) < 2 * CLOSE
    lookup, exchange = serial_shares(parts)
    return abs(lookup - LOOKUP_SHARE) < CLOSE and abs(exchange - EXCHANGE_SHARE) < CLOSE


def adjusted(recipe: Recipe, parts: Mapping[str, float]) -> Recipe:
    """Returns the recipe with sizes that bring serial's step closer to the required shares.

    Assumes that exchange is proportional to the remote share, and dense compute to the layers. Lookup stays the same,
    as a rank owns as many rows as before.
    """
    lookup, exchange, dense = (parts[f"{name}_ms"] for name in ("exposed_lookup", "exposed_exchange", "dense"))
    if recipe.name == COVERED.name:
        return _with_dense(recipe, DENSE_OVER_EXCHANGE * exchange / dense)
    step = lookup / LOOKUP_SHARE
    rest = parts["step_ms"] - lookup - exchange - dense
    more_remote = _within(EXCHANGE_SHARE * step / exchange, 0.25, 4.0)
    remote = _within(recipe.remote_share * more_remote, FEWEST_REMOTE, 1.0)
    recipe = replace(recipe, remote_share=round(remote, 3))
    return _with_dense(recipe, ((1 - LOOKUP_SHARE - EXCHANGE_SHARE) * step - rest) / dense)


def _with_dense(recipe: Recipe, factor: float) -> Recipe:
    repeats = round(recipe.repeats * _within(factor, 0.25, 4.0))
    return replace(recipe, repeats=int(_within(repeats, 1, MOST_REPEATS)))


def _within(value: float, least: float, most: float) -> float:
    return min(max(value, least), most)
