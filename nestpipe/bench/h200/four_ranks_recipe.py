"""What part four-ranks of `bench h200` trains, and how its sizes are found: by the shares of serial's step.

Two recipes. `covered`: rows come from all ranks alike, and dense compute could just cover their exchange. `published`:
serial spends its time as published of 1,536 workers, where lookup and exchange together take most of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

LOOKUP_SHARE, EXCHANGE_SHARE = 0.50, 0.20
"""of serial's step, in the middle of what is asked for"""
DENSE_OVER_EXCHANGE = 1.4
CLOSE = 0.02
"""shares that are this near are left as they are"""
MOST_REPEATS = 48
"""layers whose values a batch that is not split has to keep for its backward; four ranks share the memory"""
FEWEST_REMOTE = 0.02


@dataclass(frozen=True)
class Published:
    """Milliseconds of a step at 1,536 accelerators (arXiv 2604.06956): what is exposed of lookup and of exchange."""

    lookup_ms: float
    exchange_ms: float
    speedup: float


PUBLISHED_DENSE_MS = 1712.0
PUBLISHED_STEP_MS = 5793.83


def _sum_of_parts(lookup_ms: float, exchange_ms: float) -> Published:
    """Of the single pipelines only the parts are published: their speedup is that of the parts' sum."""
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
    name: str
    row_optimizer: str
    """the wider its row state, the more a row costs to look up, and no more to exchange"""
    batch_size: int
    """of a rank"""
    remote_share: float
    """of the keys of a batch: those that other ranks own"""
    repeats: int
    """of the dense layer"""
    length: int = 64
    """keys of a sample"""
    distinct_share: float = 0.8
    """distinct keys of a batch over all its keys"""
    overlap: float = 0.5
    """share of a batch's keys that the batch before it has, too"""
    dim: int = 512
    hidden: int = 512
    num_batches: int = 4
    """after which they begin again"""

    @property
    def num_distinct(self) -> int:
        return round(self.batch_size * self.length * self.distinct_share)


COVERED = Recipe("covered", "rowwise_adagrad", batch_size=1024, remote_share=0.75, repeats=22, dim=1024)
AS_PUBLISHED = Recipe("published", "adam", batch_size=2048, remote_share=0.3, repeats=12, hidden=256)


def tiny(recipe: Recipe) -> Recipe:
    return replace(recipe, batch_size=32, length=8, dim=16, hidden=16, num_batches=3, repeats=2)


def serial_shares(parts: Mapping[str, float]) -> tuple[float, float]:
    """Lookup and exchange as shares of a step."""
    return parts["exposed_lookup_ms"] / parts["step_ms"], parts["exposed_exchange_ms"] / parts["step_ms"]


def is_close(recipe: Recipe, parts: Mapping[str, float]) -> bool:
    """Whether serial's step, measured in these parts, has the shares that the recipe is meant to have."""
    if recipe.name == COVERED.name:
        return abs(parts["dense_ms"] / parts["exposed_exchange_ms"] / DENSE_OVER_EXCHANGE - 1) < 2 * CLOSE
    lookup, exchange = serial_shares(parts)
    return abs(lookup - LOOKUP_SHARE) < CLOSE and abs(exchange - EXCHANGE_SHARE) < CLOSE


def adjusted(recipe: Recipe, parts: Mapping[str, float]) -> Recipe:
    """Nearer to it, if exchange grows with the remote rows and dense compute with the layers. Lookup stays: the rows
    that a rank owns are as many as before."""
    lookup, exchange, dense = (parts[f"{name}_ms"] for name in ("exposed_lookup", "exposed_exchange", "dense"))
    if recipe.name == COVERED.name:
        return _with_dense(recipe, DENSE_OVER_EXCHANGE * exchange / dense)
    step = lookup / LOOKUP_SHARE
    rest = parts["step_ms"] - lookup - exchange - dense
    more_remote = _within(EXCHANGE_SHARE * step / exchange, 0.25, 4.0)
    remote = _within(recipe.remote_share * more_remote, FEWEST_REMOTE, 1.0)
    recipe = replace(recipe, remote_share=round(remote, 3))
    return _with_dense(recipe, ((1 - LOOKUP_SHARE - EXCHANGE_SHARE) * step - rest) / dense)


def _with_dense(recipe: Recipe, more: float) -> Recipe:
    repeats = round(recipe.repeats * _within(more, 0.25, 4.0))
    return replace(recipe, repeats=int(_within(repeats, 1, MOST_REPEATS)))


def _within(value: float, least: float, most: float) -> float:
    return min(max(value, least), most)
