"""Random draws by number: each word of a stream is a function of the seed and its number."""

from collections.abc import Sequence
from functools import cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
Floats = NDArray[np.float64]

_GOLDEN = 0x9E3779B97F4A7C15
_CELL_BITS = 16


def stream(purpose: str, seed: int, units: NDArray[np.integer]) -> Words:
    """Returns the words numbered `units` of the splitmix64 sequence that begins at a hash of (seed, purpose)."""
    return _mix(units.astype(np.uint64) * np.uint64(_GOLDEN) + _start(purpose, seed))


def streams(purposes: Sequence[str], seed: int, units: NDArray[np.integer]) -> Words:
    """Returns the words of several streams, [purposes, n]. units: [n] for all, or [purposes, n]."""
    starts = np.array([_start(purpose, seed) for purpose in purposes], dtype=np.uint64)
    return _mix(units.astype(np.uint64) * np.uint64(_GOLDEN) + starts[:, None])


@cache
def _start(purpose: str, seed: int) -> np.uint64:
    return np.uint64(int.from_bytes(blake2b(f"{seed} {purpose}".encode(), digest_size=8).digest(), "little"))


def following(starts: Words, counts: NDArray[np.int64]) -> Words:
    """Returns the first `counts` words of the splitmix64 sequences that begin at `starts`, concatenated."""
    ends = np.cumsum(counts)
    numbers = np.arange(1, (ends[-1] if len(ends) else 0) + 1) - np.repeat(ends - counts, counts)
    return _mix(numbers.astype(np.uint64) * np.uint64(_GOLDEN) + np.repeat(starts, counts))


def zipf_quantiles(num_values: int, skew: float) -> Words:
    """Returns the values at 2^16 + 1 evenly spaced places of the distribution. Value 0 is the most frequent."""
    cumulated = np.cumsum(np.arange(1, num_values + 1) ** -skew)
    places = np.arange(2**_CELL_BITS + 1) * (cumulated[-1] / 2**_CELL_BITS)
    quantiles: Words = np.searchsorted(cumulated, places, side="right").astype(np.uint64)
    return quantiles


def zipf_values(quantiles: Words, words: Words) -> Words:
    """Returns a value for each word, from its highest 16 and its lowest 32 bits. Several distributions [k, places] draw
    from words [k, n]."""
    cell = (words >> (64 - _CELL_BITS)).view(np.int64)
    if quantiles.ndim == 2:
        cell += np.arange(len(quantiles))[:, None] * quantiles.shape[1]
    low = quantiles.take(cell)
    num_in_cell = quantiles.take(cell + 1) - low
    # In the tail a cell has many values, which are taken as equally likely.
    values: Words = low + ((words & 0xFFFFFFFF) * num_in_cell >> 32)
    return values


def normal(words: Words) -> Floats:
    """Returns nearly normal numbers: the standardised sum of four 16-bit numbers."""
    pairs = (words & 0x0000FFFF0000FFFF) + (words >> 16 & 0x0000FFFF0000FFFF)
    total = (pairs & 0xFFFFFFFF) + (pairs >> 32)
    result: Floats = (total.astype(np.float64) - 131070.0) * (3.0**0.5 / 65536.0)
    return result


def uniform(words: Words) -> Floats:
    """Returns numbers in [0, 1) of 53 bits."""
    result: Floats = (words >> 11).astype(np.float64) * 2.0**-53
    return result


def _mix(x: Words) -> Words:
    """Mixes the bits of words in place."""
    x ^= x >> 30
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> 27
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> 31
    return x
