"""Finds links between hosts that are slower than the others."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from nestpipe.diagnosis.measurements import Array, Links

SLOW = 0.7
"""A link is slow if its rate is below this share of the others'."""


@dataclass(frozen=True)
class SlowLink:
    name: str
    ranks: tuple[int, ...]
    mb_per_second: float
    usual: float
    """Rate of the other links."""

    @property
    def ratio(self) -> float:
        return self.mb_per_second / self.usual


def slow_links(links: Links) -> list[SlowLink]:
    """Returns the slowest host's link, or the single slow direction between two hosts; an empty list if none is slow.

    With two hosts there are two directions, and only one that is slower than the other can be known.
    """
    hosts = [] if len(links.ranks) == 2 else list(_slow_hosts(links))
    found = hosts or list(_slow_pairs(links))
    return sorted(found, key=lambda link: link.ratio)[:1]


def _slow_hosts(links: Links) -> Iterator[SlowLink]:
    """Yields hosts whose links to all others are slow, compared with links between other hosts."""
    rates = links.mb_per_second
    for host, rank in enumerate(links.ranks):
        usual = _median(np.delete(np.delete(rates, host, axis=0), host, axis=1))
        sent, received = _median(rates[host]), _median(rates[:, host])
        slow = [name for name, rate in (("out of", sent), ("into", received)) if rate < SLOW * usual]
        if len(slow) == 2:
            yield SlowLink(f"the link of {_host(links, host)}", (rank,), (sent + received) / 2, usual)
        elif slow:
            rate = sent if slow == ["out of"] else received
            yield SlowLink(f"the link {slow[0]} {_host(links, host)}", (rank,), rate, usual)


def _slow_pairs(links: Links) -> Iterator[SlowLink]:
    rates = links.mb_per_second
    for source, target in zip(*np.nonzero(~np.isnan(rates)), strict=True):
        rest = rates.copy()
        rest[source, target] = np.nan
        usual = _median(rest)
        if rates[source, target] < SLOW * usual:
            name = f"the link from {_host(links, source)} to {_host(links, target)}"
            ranks = links.ranks[source], links.ranks[target]
            yield SlowLink(name, ranks, float(rates[source, target]), usual)


def _host(links: Links, host: int) -> str:
    return f"the host of rank {links.ranks[host]} ({links.names[host]})"


def _median(rates: Array) -> float:
    """Returns the median of the rates that are known; nan, which is less than nothing and not slow, without any."""
    known = rates[~np.isnan(rates)]
    return float(np.median(known)) if len(known) else float("nan")
