"""Maps of hosts: what ranks find, and what they refuse, all alike.

Fails if the ranks of a host are compared with those of the first host only, or if agreed_map leaves out settings.
"""

import pytest

from nestpipe.distributed import World
from nestpipe.distributed.host_map import AUTO, HostMap, HostSetting, agreed_map, check_hosts, told_hosts
from tests.ranks import run_fragile_ranks, run_ranks


def agreed(setting: HostSetting, identities: str) -> HostMap | None:
    return agreed_map([told_hosts(setting, identity) for identity in identities])


@pytest.mark.parametrize(
    ("setting", "identities", "expected"),
    [
        (AUTO, "aabb", "0 1 | 2 3"),
        (AUTO, "abab", "0 2 | 1 3"),
        (AUTO, "bbaacc", "0 1 | 2 3 | 4 5"),
        (AUTO, "aaa", "0 1 2"),
        (2, "aaaa", "0 1 | 2 3"),
        (3, "aaaaaa", "0 1 | 2 3 | 4 5"),
        (4, "abcd", "0 | 1 | 2 | 3"),
    ],
)
def test_maps(setting: HostSetting, identities: str, expected: str) -> None:
    hosts = agreed(setting, identities)
    assert str(hosts) == expected
    sizes = [len(ranks.split()) for ranks in expected.split("|")]
    assert hosts.has_two_hops == (len(sizes) > 1 and sizes[0] > 1)


def test_groups_between_hosts_are_ascending() -> None:
    """As process groups number their ranks. Fails if `between` takes the order of hosts."""
    hosts = agreed(AUTO, "abba")
    assert hosts.by_place == [0, 1, 2, 3]
    assert [hosts.between(rank) for rank in range(4)] == [(0, 1), (0, 1), (2, 3), (2, 3)]


def test_places() -> None:
    hosts = agreed(AUTO, "abab")
    assert hosts.by_place == [0, 1, 2, 3]
    assert [hosts.inside(rank) for rank in range(4)] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [hosts.between(rank) for rank in range(4)] == [(0, 1), (0, 1), (2, 3), (2, 3)]


@pytest.mark.parametrize(
    ("setting", "identities", "message"),
    [
        (AUTO, "aab", r"equally many ranks on each host, but the ranks of the hosts are 0 1 \| 2; start as many"),
        (3, "aaaa", r"exchange.hosts = 3 does not divide 4 ranks"),
        (2, "abab", r"exchange.hosts = 2 has ranks 0 1 on one host, but they cannot share memory; set it to 'auto'"),
    ],
)
def test_refused_maps(setting: HostSetting, identities: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        agreed(setting, identities)


@pytest.mark.parametrize("setting", ["all", 0, -1, True, 2.0, [[0, 1]]])
def test_refused_settings(setting: object) -> None:
    with pytest.raises(ValueError, match=r"must be 'auto' or a number of hosts, at least 1"):
        check_hosts(setting)


def refusal(world: World, settings: list[HostSetting]) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        World(world.rank, world.size, hosts=settings[world.rank])
    return str(caught.value)


def test_ranks_with_other_settings_are_refused_on_all() -> None:
    """Fails if a rank without hosts does not tell the others."""
    expected = "exchange.hosts is 2 on rank 0 and not set on rank 2; give all ranks the same"
    assert run_ranks(4, refusal, [2, 2, None, 2]) == [expected] * 4


def made(world: World) -> tuple[str | None, list[tuple[int, int]]]:
    hops = [] if world.hosts is None else [world.hosts.inside, world.hosts.between]
    return None if world.host_map is None else str(world.host_map), [(hop.rank, hop.size) for hop in hops]


def test_worlds() -> None:
    """Ranks on one host, or one on each, need one hop."""
    expected = [
        ("0 1 | 2 3", places) for places in ([(0, 2), (0, 2)], [(1, 2), (0, 2)], [(0, 2), (1, 2)], [(1, 2), (1, 2)])
    ]
    assert run_ranks(4, made, hosts=2) == expected
    for hosts in (AUTO, 1, 2):
        assert run_ranks(2, made, hosts=hosts) == [(None, [])] * 2


def test_nccl_is_refused() -> None:
    refused = run_fragile_ranks(4, issued, num_results=4, device="cpu")
    assert all("exchange.hosts does not combine with NCCL" in text for text in refused.values())


def issued(world: World) -> str:
    with pytest.raises(ValueError, match=r"NCCL") as caught:
        World(world.rank, world.size, has_issuer=True, hosts=2)
    return str(caught.value)
