"""Random words that depend on a seed, a purpose and a number alone: any of them can be made directly."""

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def random_words(purpose: str, seed: int, units: NDArray[np.integer]) -> Words:
    """Of the splitmix64 sequence that begins at a hash of (seed, purpose), the words numbered `units`."""
    start = int.from_bytes(blake2b(f"{seed} {purpose}".encode(), digest_size=8).digest(), "little")
    return _mix(units.astype(np.uint64) * GOLDEN + np.uint64(start))


def following_words(starts: Words, counts: NDArray[np.int64]) -> Words:
    """Of the splitmix64 sequences that begin at `starts`, the first `counts` words of each, one behind the other."""
    ends = np.cumsum(counts)
    numbers = np.arange(1, (ends[-1] if len(ends) else 0) + 1) - np.repeat(ends - counts, counts)
    return _mix(numbers.astype(np.uint64) * GOLDEN + np.repeat(starts, counts))


def _mix(x: Words) -> Words:
    """In place."""
    x ^= x >> 30
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> 27
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> 31
    return x
