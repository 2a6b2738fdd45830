"""Host maps: which ranks are on one host. All ranks agree on the map when they make their world."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

AUTO = "auto"

HostSetting = int | str | None
"""AUTO finds the hosts; a number is that of hosts with equally many consecutive ranks; None knows no hosts."""


@dataclass(frozen=True)
class HostMap:
    """The ranks of each host. All hosts have equally many."""

    hosts: tuple[tuple[int, ...], ...]
    """Ranks of each host, ascending; hosts in order of their first rank."""

    @property
    def has_two_hops(self) -> bool:
        """Returns whether there are several hosts of several ranks; otherwise one hop does the same."""
        return len(self.hosts) > 1 and len(self.hosts[0]) > 1

    @property
    def by_place(self) -> list[int]:
        """Returns the ranks in order of (place in their host, rank)."""
        return [rank for ranks in zip(*self.hosts, strict=True) for rank in sorted(ranks)]

    def inside(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks of a rank's host."""
        return next(ranks for ranks in self.hosts if rank in ranks)

    def between(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks at a rank's place in all hosts, ascending, as a process group numbers them."""
        place = self.inside(rank).index(rank)
        return tuple(sorted(ranks[place] for ranks in self.hosts))

    def __str__(self) -> str:
        return " | ".join(_listed(ranks) for ranks in self.hosts)


def check_hosts(setting: HostSetting) -> None:
    is_number = isinstance(setting, int) and not isinstance(setting, bool) and setting > 0
    if not (setting is None or setting == AUTO or is_number):
        raise ValueError(f"exchange.hosts is {setting!r}, must be {AUTO!r} or a number of hosts, at least 1")


def told_hosts(setting: HostSetting, identity: str) -> str:
    """Returns what a rank tells all ranks, from which they make the map. identity: equal on the ranks of one host."""
    return json.dumps([setting, identity])


def agreed_map(texts: Sequence[str]) -> HostMap | None:
    """Returns the map that all ranks make from what they told each other; None if they know no hosts. Raises on all
    ranks alike."""
    told = [json.loads(text) for text in texts]
    settings = [setting for setting, _ in told]
    if (other := next((r for r, setting in enumerate(settings) if setting != settings[0]), None)) is not None:
        raise ValueError(
            f"exchange.hosts is {_shown(settings[0])} on rank 0 and {_shown(settings[other])} on rank {other}; "
            "give all ranks the same"
        )
    if settings[0] is None:
        return None
    identities = [identity for _, identity in told]
    return _found(identities) if settings[0] == AUTO else _given(settings[0], identities)


def _found(identities: Sequence[str]) -> HostMap:
    names = dict.fromkeys(identities)
    hosts = HostMap(tuple(tuple(r for r, other in enumerate(identities) if other == name) for name in names))
    if len({len(ranks) for ranks in hosts.hosts}) > 1:
        raise ValueError(
            f"exchange.hosts = {AUTO!r} needs equally many ranks on each host, but the ranks of the hosts are {hosts}; "
            "start as many on each, or leave exchange.hosts out: rows then cross the network once for each rank"
        )
    return hosts


def _given(num_hosts: int, identities: Sequence[str]) -> HostMap:
    num_ranks = len(identities)
    if num_ranks % num_hosts != 0:
        raise ValueError(
            f"exchange.hosts = {num_hosts} does not divide {num_ranks} ranks; start equally many ranks on each host"
        )
    each = num_ranks // num_hosts
    hosts = HostMap(tuple(tuple(range(first, first + each)) for first in range(0, num_ranks, each)))
    for ranks in hosts.hosts:
        if len({identities[rank] for rank in ranks}) > 1:
            raise ValueError(
                f"exchange.hosts = {num_hosts} has ranks {_listed(ranks)} on one host, but they cannot share memory; "
                f"set it to {AUTO!r}"
            )
    return hosts


def _listed(ranks: Sequence[int]) -> str:
    return " ".join(map(str, ranks))


def _shown(setting: HostSetting) -> str:
    return "not set" if setting is None else repr(setting)
