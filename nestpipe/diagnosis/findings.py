"""Names what makes a run slow: a rank, one of its stages, or a link.

Nothing is named that costs less than a twentieth of a step, or that all ranks share.

A rank is slow if it enters the collectives of some channel after the others, and they wait for it. Then the stages in
which ranks wait for no other show why. A rank that owns more keys than the others is a cause of its own, since its
exchanges are longer, too. A link is slow if what it carries takes longer than on the other links.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from nestpipe.diagnosis.links import SlowLink, slow_links
from nestpipe.diagnosis.measurements import Measurements, others

LEAST_SHARE = 0.05
"""Share of a step that something must cost to be named."""
LEAST_MS = 1.0
SLOW_STAGE = 1.3
"""A stage of a rank is slow if it takes this many times as long as on the others."""
BROAD = 0.5
"""Share of a rank's work apart from its slowest stage that must be slow, too, to show that it has less CPU."""
MANY_KEYS = 1.4
"""Keys that a hot owner owns, relative to the others."""
LEAST_UNEXPLAINED = 0.15
"""Share of a step that a rank must cost to be named without a cause."""
STANDS_OUT = 2.0
"""A disk is slow, and not the whole rank, if prefetch takes this many times as much longer as the other stages do."""
LEAST_COMPUTED = 0.5
"""Share of the time that a stage takes longer in which its thread must compute, if it has more work to do."""
LEAST_CAUSE = 0.4
"""Share of the time that a rank is late which its slowest stage must explain."""


@dataclass(frozen=True)
class Finding:
    kind: str
    """cpu, disk, stage or rank: of a rank; owner: a rank with too many keys; link."""
    ranks: tuple[int, ...]
    """The slow rank, or the ranks at the slow end of the link; for a link between two hosts, those of both."""
    cost_ms: float
    """Milliseconds of a step that it costs, at most."""
    text: str


@dataclass(frozen=True)
class _Late:
    rank: int
    channel: str
    late_ms: float
    cost_ms: float

    def __str__(self) -> str:
        return f"rank {self.rank} enters the {self.channel} at least {self.late_ms:.1f} ms after the others"


def find(measured: Measurements) -> list[Finding]:
    """Returns what is slow, the most expensive first; an empty list if nothing is."""
    least = max(LEAST_MS, LEAST_SHARE * measured.step_ms)
    found = [each for each in _hot_owners(measured) if each.cost_ms >= least]
    explained = {rank for each in found for rank in each.ranks}
    late = [each for each in _late_ranks(measured) if each.cost_ms >= least and each.rank not in explained]
    causes = [(each, cause) for each in late if (cause := _cause(measured, each)) is not None]
    found += [cause for _, cause in causes]
    explained |= {each.rank for each, _ in causes}
    # A rank without CPU reads its connections slowly, and links of a hot owner carry more: neither is a slow link.
    links = [each for each in _links(measured) if each.cost_ms >= least and not explained & set(each.ranks)]
    found += links
    if not links:  # a slow link makes the ranks at its ends late
        least = max(LEAST_MS, LEAST_UNEXPLAINED * measured.step_ms)
        found += [_unexplained(each) for each in late if each.cost_ms >= least and each.rank not in explained]
    return sorted(found, key=lambda each: -each.cost_ms)


def _hot_owners(measured: Measurements) -> Iterator[Finding]:
    usual = others(measured.owned_keys)
    waits = others(np.sum(list(measured.wait_ms.values()), axis=0))
    for rank, (own, other) in enumerate(zip(measured.owned_keys, usual, strict=True)):
        if own >= MANY_KEYS * max(other, 1.0):
            text = (
                f"rank {rank} owns {own / max(other, 1.0):.1f} times as many of a batch's keys as the others "
                f"({own:,.0f}, {other:,.0f} on the others): its rows take longer to retrieve, send and update"
            )
            yield Finding("owner", (rank,), float(waits[rank] * (1 - other / own)), text)


def _late_ranks(measured: Measurements) -> Iterator[_Late]:
    """Yields each rank with the channel at which the others wait longest for it."""
    channels = list(measured.late_ms)
    late = np.array([measured.late_ms[name] for name in channels])
    cost = np.minimum(late, np.array([others(measured.wait_ms[name]) for name in channels]))
    for rank, most in enumerate(cost.argmax(axis=0)):
        yield _Late(rank, channels[most], float(late[most, rank]), float(cost[most, rank]))


def _cause(measured: Measurements, late: _Late) -> Finding | None:
    """Returns which of a rank's stages make it late; None if none does."""
    stages, rank = list(measured.work_ms), late.rank
    own = np.array([measured.work_ms[stage][rank] for stage in stages])
    usual = np.array([others(measured.work_ms[stage])[rank] for stage in stages])
    excess, is_slow = own - usual, own >= SLOW_STAGE * usual
    worst = int(np.where(is_slow, excess, 0.0).argmax())
    if not is_slow[worst] or excess[is_slow].sum() < LEAST_CAUSE * late.late_ms:
        return None
    stage, rest = stages[worst], np.arange(len(stages)) != worst
    is_broad = usual[rest & is_slow].sum() >= BROAD * usual[rest].sum()
    computes = _computes(measured, rank, stage, float(excess[worst]))
    times = f"its {_named(stage)} is slow ({own[worst]:.1f} ms a step, {usual[worst]:.1f} on the others)"
    stands_out = own[worst] * usual[rest].sum() >= STANDS_OUT * usual[worst] * own[rest].sum()
    if stage == "prefetch" and not computes and (stands_out or not is_broad):
        why = "and does not compute meanwhile: it waits for its data, on a slow disk for example"
        return Finding("disk", (rank,), late.cost_ms, f"{late}: {times}, {why}")
    if is_broad or not computes:
        why = "and computes no longer" if not computes else "and so is most of its other work"
        return Finding("cpu", (rank,), late.cost_ms, f"{late}: {times}, {why}: it has less CPU than the others")
    return Finding("stage", (rank,), late.cost_ms, f"{late}: {times}")


def _computes(measured: Measurements, rank: int, stage: str, excess_ms: float) -> bool:
    """Returns whether a rank needs more CPU time for a stage than the others, as far as that is known."""
    cpu_ms = measured.cpu_ms.get(stage)
    return cpu_ms is None or float(cpu_ms[rank] - others(cpu_ms)[rank]) >= LEAST_COMPUTED * excess_ms


def _named(stage: str) -> str:
    return {"other": "work outside of the stages", "": "code between the stages"}.get(stage, stage)


def _links(measured: Measurements) -> Iterator[Finding]:
    exchange = measured.wait_ms["row exchange"] + measured.wait_ms["gradient return"]
    exchange = exchange + measured.wait_ms["dense reduction"]
    for link in slow_links(measured.links):
        yield Finding("link", link.ranks, float(np.median(exchange)) * (1 - link.ratio), _link_text(link))


def _link_text(link: SlowLink) -> str:
    return f"{link.name} is slow: {link.mb_per_second:.1f} MB/s, {link.usual:.1f} on the other links"


def _unexplained(late: _Late) -> Finding:
    return Finding("rank", (late.rank,), late.cost_ms, f"{late}; none of its stages takes longer than theirs")
