"""Models: plain modules that return loss sums. Each registers the name by which a recipe finds it."""

from nestpipe.models.dlrm import DLRM
from nestpipe.models.fuxi import FuXi
from nestpipe.models.hstu import HSTU

__all__ = ["DLRM", "HSTU", "FuXi"]
