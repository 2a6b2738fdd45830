"""Seeded jitter: how much longer a worker's own work takes than it should."""

from zlib import crc32

import numpy as np

from nestpipe.pipelining.schedule import Op
from nestpipe.prediction.work import Times
from nestpipe.simulator.cluster import JitterSection


class Jitter:
    """Draws a factor for each worker. The draws of an operation depend on the seed and its name, not on the schedule,
    so schedules are compared under the same jitter."""

    def __init__(self, section: JitterSection, seed: int, num_workers: int) -> None:
        self._section = section
        self._seed = seed
        self._num_workers = num_workers
        self._slow: dict[int, Times] = {}

    @property
    def is_none(self) -> bool:
        """Returns whether all workers take the same time."""
        return self._section.sigma == 0 and self._section.straggler_probability == 0

    def factors(self, op: Op) -> Times:
        """Returns the factor of each worker's own work in an operation; 1 on average, stragglers left aside."""
        factors = np.ones(self._num_workers)
        sigma = self._section.sigma
        if sigma > 0:
            draws = self._generator(op.batch, crc32(op.stage.encode()), op.micro_batch + 1)
            factors = np.exp(sigma * draws.standard_normal(self._num_workers) - sigma**2 / 2)
        if self._section.straggler_probability > 0:
            factors = factors * self._stragglers(op.batch)
        return factors

    def _stragglers(self, batch: int) -> Times:
        if batch not in self._slow:
            drawn = self._generator(batch, 0, 0).random(self._num_workers)
            is_slow = drawn < self._section.straggler_probability
            self._slow[batch] = np.where(is_slow, self._section.straggler_factor, 1.0)
        return self._slow[batch]

    def _generator(self, *purpose: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, *purpose])
