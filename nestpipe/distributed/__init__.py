"""Ranks and what they exchange."""

from nestpipe.distributed.world import World

__all__ = ["World"]
