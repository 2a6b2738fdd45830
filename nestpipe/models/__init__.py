"""Models that return loss sums."""

from nestpipe.models.dlrm import DLRM
from nestpipe.models.fuxi import FuXi
from nestpipe.models.hstu import HSTU

__all__ = ["DLRM", "HSTU", "FuXi"]
