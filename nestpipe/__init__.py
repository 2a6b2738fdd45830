"""Synchronous training of recommendation models whose embedding tables live in host memory."""

from nestpipe.store import init

__all__ = ["__version__", "init"]

__version__ = "0.1.0"
