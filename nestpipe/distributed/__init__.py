"""Ranks, and the channels between them."""

from nestpipe.distributed.channel import Channel
from nestpipe.distributed.lane import Lane
from nestpipe.distributed.notice import Notice
from nestpipe.distributed.watch import RankError
from nestpipe.distributed.world import World

__all__ = ["Channel", "Lane", "Notice", "RankError", "World"]
