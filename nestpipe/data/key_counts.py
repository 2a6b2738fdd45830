"""Counts of keys in bounded memory: exact for few keys, estimated from a sample and the hottest for many."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nestpipe.data.synthetic.draws import stream

MOST_KEYS = 2**18
HOTTEST = (0.001, 0.01, 0.1)


class KeyCounts:
    """Counts every key until there are too many; then only keys whose hash is below a bound, and the hottest keys.

    Results are exact up to most_keys distinct keys. Beyond that, a hot key stands for itself, and each other counted
    key for 2^k keys, where the bound keeps one key in 2^k. The count of a single key is exact, unless the key was
    dropped before it became hot.
    """

    def __init__(self, most_keys: int = MOST_KEYS) -> None:
        self._most_keys = most_keys
        self._keys = np.empty(0, np.int64)
        self._counts = np.empty(0, np.int64)
        self._is_hot = np.empty(0, np.bool_)
        self._shift = 0
        self.num_occurrences = 0

    @property
    def is_exact(self) -> bool:
        return self._shift == 0

    @property
    def num_distinct(self) -> int:
        return int(self._weights().sum())

    def add(self, keys: NDArray[np.int64]) -> None:
        self.num_occurrences += len(keys)
        new, counts = np.unique(keys, return_counts=True)
        is_counted = self._is_sampled(new) | np.isin(new, self._keys[self._is_hot])
        together = np.concatenate([self._keys, new[is_counted]])
        self._keys, where = np.unique(together, return_inverse=True)
        is_hot = np.zeros(len(self._keys), np.bool_)
        is_hot[where[: len(self._is_hot)]] = self._is_hot
        added = np.bincount(where, np.concatenate([self._counts, counts[is_counted]]), len(self._keys))
        self._counts, self._is_hot = added.astype(np.int64), is_hot
        while len(self._keys) > self._most_keys:
            self._drop()

    def _drop(self) -> None:
        """Drops half of the keys that are not among the hottest."""
        self._shift += 1
        num_hot = self._most_keys // 4
        self._is_hot = np.zeros(len(self._keys), np.bool_)
        self._is_hot[np.argpartition(self._counts, -num_hot)[-num_hot:]] = True
        is_kept = self._is_hot | self._is_sampled(self._keys)
        self._keys, self._counts, self._is_hot = self._keys[is_kept], self._counts[is_kept], self._is_hot[is_kept]

    def _is_sampled(self, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        if self._shift == 0:
            return np.ones(len(keys), np.bool_)
        return np.asarray(stream("sample of keys", 0, keys) >> np.uint64(64 - self._shift) == 0)

    def _weights(self) -> NDArray[np.int64]:
        """Returns the number of keys that each one stands for."""
        return np.where(self._is_hot, 1, 2**self._shift)

    def shares(self, hottest: Sequence[float] = HOTTEST) -> list[float]:
        """Returns, for each share of the distinct keys, the share of all occurrences that the hottest of them have."""
        if len(self._keys) == 0:
            return [0.0] * len(hottest)
        order = np.argsort(-self._counts, kind="stable")
        weights = self._weights()[order]
        num_keys = np.concatenate([[0], weights.cumsum()])
        occurrences = np.concatenate([[0], (weights * self._counts[order]).cumsum()])
        return [float(np.interp(share * num_keys[-1], num_keys, occurrences) / occurrences[-1]) for share in hottest]
