"""Models that return loss sums."""

from nestpipe.models.dlrm import DLRM

__all__ = ["DLRM"]
