"""Decides when each stage of a batch runs, and runs it."""

from nestpipe.pipelining.commit import NonFiniteError
from nestpipe.pipelining.step import Step

__all__ = ["NonFiniteError", "Step"]
