"""Distributions of initial rows, for `Table(init=...)`."""

from nestpipe.store.init import Constant, Distribution, Normal, TruncatedNormal, Uniform

__all__ = ["Constant", "Distribution", "Normal", "TruncatedNormal", "Uniform"]
