"""Faults: what hits which run when. A kind and a seed determine a fault, so it can be repeated alone."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from nestpipe.bench.faults.damage import CLASSES
from nestpipe.bench.faults.disk import TROUBLES
from nestpipe.bench.faults.moments import LOAD_MOMENTS, REMOVAL_MOMENTS, SAVE_MOMENTS, STAGE_MOMENTS, Moment
from nestpipe.bench.faults.recipe import Setting
from nestpipe.pipelining.schedule import SCHEDULES

MOMENTS_OF: dict[str, tuple[Moment, ...]] = {
    "kill-stage": STAGE_MOMENTS,
    "kill-save": SAVE_MOMENTS,
    "kill-removal": REMOVAL_MOMENTS,
    "kill-load": LOAD_MOMENTS,
}
"""Kinds that kill a rank at a named moment."""
DAMAGES = (*(f"damage-{name}" for name in CLASSES), "missing-file", "cut-file")
DISK_KINDS = tuple(f"disk-{trouble}-{then}" for trouble in TROUBLES for then in ("stop", "continue"))
"""Trouble with the disk, and what the run is told to do when a save fails."""
WEIGHTS = {
    "kill-clock": 4,
    "kill-launcher": 2,
    "kill-stage": 6,
    "kill-save": 6,
    "kill-removal": 3,
    "kill-load": 4,
    "kill-overlap": 1,
    "sigterm": 3,
    "sigterm-kill": 1,
    **dict.fromkeys(DISK_KINDS, 1),
    **dict.fromkeys(DAMAGES, 1),
}
"""How often each kind occurs."""
KINDS = tuple(WEIGHTS)
POOLS = ("minimum", "12000", "1000000000")
"""Values of memory.resident_bytes: only what a batch needs, some rows more, and all rows."""


@dataclass(frozen=True)
class Fault:
    kind: str
    seed: int

    def random(self) -> Random:
        return Random(f"{self.kind} {self.seed}")

    def setting(self, settings: Sequence[Setting]) -> Setting:
        """Returns the run that it hits."""
        needs_ranks = self.kind in ("kill-launcher", "kill-overlap")
        usable = [setting for setting in settings if setting.num_ranks > 1 or not needs_ranks]
        return self.random().choice(usable)

    def moment(self) -> tuple[Moment, bool]:
        """Returns the moment, and whether it hits after it. Seeds in a row go through all moments."""
        moments = MOMENTS_OF[self.kind]
        return moments[self.seed % len(moments)], bool(self.seed // len(moments) % 2)


def trouble_of(kind: str) -> str | None:
    """Returns the trouble with the disk that a kind makes; None if it makes none."""
    return kind.removeprefix("disk-").rpartition("-")[0] if kind in DISK_KINDS else None


def all_settings() -> list[Setting]:
    return [
        Setting(schedule, num_ranks, POOLS[(i + num_ranks) % len(POOLS)])
        for i, schedule in enumerate(SCHEDULES)
        for num_ranks in (1, 2, 3)
    ]


def deal(count: int, seed: int, kinds: Sequence[str] = KINDS) -> list[Fault]:
    """Returns faults of these kinds, each kind as often as its weight says. Every kind comes once before any twice."""
    deck = [kind for turn in range(max(WEIGHTS.values())) for kind in kinds if WEIGHTS[kind] > turn]
    dealt: dict[str, int] = dict.fromkeys(kinds, 0)
    faults = []
    for number in range(count):
        kind = deck[number % len(deck)]
        faults.append(Fault(kind, seed + dealt[kind]))
        dealt[kind] += 1
    return faults


@dataclass
class Outcome:
    """What became of a run that a fault hit."""

    fault: Fault
    setting: Setting
    lost_steps: int = 0
    is_mismatch: bool = False
    """Whether its digest is not that of the run that was left alone."""
    seconds_to_resume: list[float] = field(default_factory=list)
    """From each start to the first step after the load."""
    texts: list[str] = field(default_factory=list)
    """What happened, in order."""
    num_missed: int = 0
    """Attempts that ended before the fault hit."""
    was_refused: bool = False
    """Whether no good checkpoint was left, so that the run had to begin anew."""

    @property
    def is_good(self) -> bool:
        return self.lost_steps == 0 and not self.is_mismatch

    def __str__(self) -> str:
        return f"{self.fault.kind} seed {self.fault.seed} ({self.setting}): {'; '.join(self.texts)}"
