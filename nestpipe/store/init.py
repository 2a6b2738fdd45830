"""Distributions of initial rows; the public `nestpipe.init`.

A row's initial value depends on (seed, table name, key) alone: not on when it is created, nor on which rank.
"""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Constant:
    """Every element is `value`."""

    value: float = 0.0
    code: ClassVar[int] = 0

    @property
    def parameters(self) -> tuple[float, float]:
        return self.value, 0.0


@dataclass(frozen=True)
class Uniform:
    """Uniform between `low` and `high`. After rounding to the table's dtype, a value may equal either bound."""

    low: float
    high: float
    code: ClassVar[int] = 1

    @property
    def parameters(self) -> tuple[float, float]:
        return self.low, self.high


@dataclass(frozen=True)
class Normal:
    """Normal with standard deviation `std`."""

    std: float
    mean: float = 0.0
    code: ClassVar[int] = 2

    @property
    def parameters(self) -> tuple[float, float]:
        return self.mean, self.std


@dataclass(frozen=True)
class TruncatedNormal:
    """Normal with standard deviation `std`, truncated at two standard deviations on either side."""

    std: float
    mean: float = 0.0
    code: ClassVar[int] = 3

    @property
    def parameters(self) -> tuple[float, float]:
        return self.mean, self.std


Distribution = Constant | Uniform | Normal | TruncatedNormal
