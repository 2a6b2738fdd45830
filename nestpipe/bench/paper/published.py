"""Published figures of arXiv 2604.06956: HSTU on industrial data, 1,536 accelerators, batches of 512.

The step of every published system is the sum of its dense compute (about 1,712 ms), its exposed lookup and its exposed
exchange. For the two halves of the method alone only the exposed times are published; their steps are that sum.
"""

from collections.abc import Mapping
from dataclasses import dataclass

DENSE_MS = 1712.0
SERIAL_STEP_MS = 5793.83


@dataclass(frozen=True)
class System:
    """A published row, and the way of training here that is its counterpart."""

    name: str
    step_ms: float
    lookup_ms: float | None = None
    """Exposed lookup. None if it is not published."""
    exchange_ms: float | None = None
    efficiency: float | None = None
    """Scaling efficiency of 1,536 workers against 128."""
    schedule: str = ""
    """Schedule of the counterpart; "" if there is none."""
    stale: bool = False
    differs: str = ""

    @property
    def speedup(self) -> float:
        return SERIAL_STEP_MS / self.step_ms

    def fields(self) -> dict[str, float | str]:
        """Returns fields of the counterpart's record. What is not published is left out."""
        figures = {
            "published_step_ms": self.step_ms,
            "published_exposed_lookup_ms": self.lookup_ms,
            "published_exposed_exchange_ms": self.exchange_ms,
            "published_speedup": self.speedup,
            "published_scaling_efficiency": self.efficiency,
        }
        known = {name: value for name, value in figures.items() if value is not None}
        return {"published_system": self.name, **known}


SERIAL = System(
    *("TorchRec", SERIAL_STEP_MS, 2870.99, 1207.85, 0.4434, "serial"),
    differs="Ours is nestpipe without overlap, not TorchRec; docs/benchmarks.md compares with TorchRec itself.",
)
STALE = System(
    *("UniEmb, stale prefetch", 2919.76, 23.49, 1185.0, 0.6762, "inter"),
    stale=True,
    differs="Ours is the schedule inter with `pipeline.stale`: rows that the last step changed arrive one step late.",
)
INTER = System(
    *("inter-batch pipeline alone", DENSE_MS + 36.0 + 1169.0, 36.0, 1169.0, None, "inter"),
    differs="The published step is the sum of published parts.",
)
INTRA = System(
    *("intra-batch pipeline alone", DENSE_MS + 2870.0 + 160.0, 2870.0, 160.0, None, "intra"),
    differs="The published step is the sum of published parts.",
)
NESTED = System(
    *("NestPipe", 1895.98, 30.19, 154.23, 0.9407, "nested"),
    differs="Ours sends a row once a batch, and keeps rows that the next batch uses on the device.",
)
COUNTERPARTS = (SERIAL, STALE, INTER, INTRA, NESTED)
NO_COUNTERPART = (
    System("2D sparse parallel", 4914.01, None, 438.36, 0.4932, differs="nestpipe has no second dimension."),
    System("NestPipe + 2D sparse parallel", SERIAL_STEP_MS / 3.18, None, 55.64, 0.9717, differs="The same."),
)

UNSPLIT_EXCHANGE_MS = 1185.0
SPLIT_EXCHANGE_MS = {16: 1331.0}
"""All2All of a batch that is split naively, by samples of a micro-batch."""

VARIED: Mapping[str, tuple[int, ...]] = {
    "dim": (512, 768, 1024),
    "num_layers": (2, 4, 8),
    "length": (512, 1024, 2048),
}
"""Values over which the paper calls the method robust; it gives the ends of the ranges."""


def counterpart(schedule: str, stale: bool) -> System:
    return next(system for system in COUNTERPARTS if (system.schedule, system.stale) == (schedule, stale))
