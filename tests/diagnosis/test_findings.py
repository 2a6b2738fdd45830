"""Findings from invented measurements: the slow thing is named with its cause, and nothing on a healthy run."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nestpipe.diagnosis.findings import find
from nestpipe.diagnosis.measurements import WAITS, WORK, Links, Measurements

NUM_RANKS = 4
STEP_MS = 100.0
USUAL = {"prefetch": 20.0, "retrieve": 10.0, "dense": 40.0, "update": 5.0}
CPU = {"prefetch": 8.0, "retrieve": 9.0, "dense": 40.0}


def ranks(value: float = 0.0, **others: float) -> np.ndarray:
    """Returns a value for each rank; r2=5.0 sets that of rank 2."""
    return np.array([others.get(f"r{rank}", value) for rank in range(NUM_RANKS)])


def links(rate: float = 100.0, num_hosts: int = NUM_RANKS) -> Links:
    rates = np.full((num_hosts, num_hosts), rate)
    np.fill_diagonal(rates, np.nan)
    return Links(["node"] * num_hosts, list(range(num_hosts)), rates)


def healthy(**changes: Any) -> Measurements:
    return replace(
        Measurements(
            num_ranks=NUM_RANKS,
            num_steps=50,
            step_ms=STEP_MS,
            late_ms={name: ranks() for name in WAITS},
            wait_ms={name: ranks(10.0) for name in WAITS},
            work_ms={stage: ranks(USUAL.get(stage, 0.0)) for stage in WORK},
            cpu_ms={stage: ranks(milliseconds) for stage, milliseconds in CPU.items()},
            owned_keys=ranks(1000.0),
            links=links(),
        ),
        **changes,
    )


def late(channel: str, milliseconds: float, work: dict[str, float], cpu: dict[str, float], **more: Any) -> Measurements:
    """Rank 2 enters a channel late, and its stages have this work."""
    base = healthy()
    return healthy(
        late_ms={**base.late_ms, channel: ranks(r2=milliseconds)},
        wait_ms={**base.wait_ms, channel: ranks(50.0, r2=5.0)},
        work_ms={**base.work_ms, **{stage: ranks(USUAL[stage], r2=value) for stage, value in work.items()}},
        cpu_ms={**base.cpu_ms, **{stage: ranks(CPU[stage], r2=value) for stage, value in cpu.items()}},
        **more,
    )


def test_a_healthy_run_names_nothing() -> None:
    assert find(healthy()) == []


def test_a_slow_stage_is_named() -> None:
    """Fails if the stage with the largest time is taken instead of the one that takes longer than on the others."""
    found = find(late("row exchange", 41.0, {"retrieve": 52.0}, {"retrieve": 50.0}))
    assert [(each.kind, each.ranks) for each in found] == [("stage", (2,))]
    text = "rank 2 enters the row exchange at least 41.0 ms after the others: its retrieve is slow (52.0 ms a step"
    assert found[0].text.startswith(text)
    assert found[0].cost_ms == 41.0


def test_a_slow_disk_is_named() -> None:
    """Fails if _computes returns True for all: then it is a slow stage."""
    found = find(late("route", 60.0, {"prefetch": 90.0}, {}))
    assert [(each.kind, each.ranks) for each in found] == [("disk", (2,))]


def test_a_slow_disk_on_a_busy_host() -> None:
    """Its other stages are slow, too, but far less. Fails if STANDS_OUT is 10."""
    found = find(late("route", 180.0, {"prefetch": 200.0, "dense": 56.0, "retrieve": 14.0, "update": 7.0}, {}))
    assert [(each.kind, each.ranks) for each in found] == [("disk", (2,))]


def test_prefetch_that_computes_is_no_disk() -> None:
    found = find(late("route", 60.0, {"prefetch": 90.0}, {"prefetch": 78.0}))
    assert [each.kind for each in found] == ["stage"]


@pytest.mark.parametrize("cpu", [{}, {"dense": 80.0, "retrieve": 18.0, "prefetch": 16.0}])
def test_less_cpu_is_named(cpu: dict[str, float]) -> None:
    """A thread that waits for a core needs no more CPU time; on a slower core, all of its stages do.

    Fails if either of the two signs is left out.
    """
    work = {"dense": 80.0, "retrieve": 20.0, "prefetch": 40.0 if cpu else 24.0, "update": 10.0}
    found = find(late("gradient return", 40.0, work, cpu))
    assert [(each.kind, each.ranks) for each in found] == [("cpu", (2,))]


def test_what_is_hidden_is_not_named() -> None:
    """The rank is late, but the others do not wait for it. Fails if lateness alone is the cost."""
    hidden = late("route", 60.0, {"prefetch": 90.0}, {})
    assert find(replace(hidden, wait_ms=healthy().wait_ms | {"route": ranks(0.0)})) == []


@pytest.mark.parametrize(("late_ms", "is_named"), [(4.9, False), (5.1, True)])
def test_the_least_that_is_named(late_ms: float, is_named: bool) -> None:
    """Fails if LEAST_SHARE is 0.04 or 0.06."""
    found = find(late("row exchange", late_ms, {"retrieve": 10.0 + 5.0}, {"retrieve": 14.0}))
    assert len(found) == is_named


def test_a_late_rank_without_a_cause() -> None:
    """It is named only if it costs much."""
    assert [(each.kind, each.ranks) for each in find(late("commit", 30.0, {}, {}))] == [("rank", (2,))]
    assert find(late("commit", 10.0, {}, {})) == []


def test_a_hot_owner_is_named_alone() -> None:
    """Its retrieve is slow, and so are the links that carry its rows. Fails if either is named, too."""
    rates = links()
    rates.mb_per_second[2, :] = rates.mb_per_second[:, 2] = 40.0
    hot = late("row exchange", 41.0, {"retrieve": 52.0}, {}, owned_keys=ranks(1000.0, r2=3000.0), links=rates)
    found = find(hot)
    assert [(each.kind, each.ranks) for each in found] == [("owner", (2,))]
    assert "owns 3.0 times as many" in found[0].text


def test_more_keys_that_cost_nothing_are_not_named() -> None:
    quiet = healthy(owned_keys=ranks(1000.0, r2=3000.0), wait_ms={name: ranks(0.5) for name in WAITS})
    assert find(quiet) == []


def with_rates(*slow: tuple[Any, Any], num_hosts: int = NUM_RANKS, wait_ms: float = 20.0) -> Measurements:
    rates = links(num_hosts=num_hosts)
    for source, target in slow:
        rates.mb_per_second[source, target] *= 0.5
    return healthy(links=rates, wait_ms={name: ranks(wait_ms) for name in WAITS})


ALL = slice(None)


@pytest.mark.parametrize(
    ("measured", "text", "named"),
    [
        (with_rates((1, ALL), (ALL, 1)), "the link of the host of rank 1 (node) is slow: 50.0 MB/s, 100.0", (1,)),
        (with_rates((1, ALL)), "the link out of the host of rank 1", (1,)),
        (with_rates((ALL, 1)), "the link into the host of rank 1", (1,)),
        (with_rates((1, 3)), "the link from the host of rank 1 (node) to the host of rank 3 (node)", (1, 3)),
        (
            with_rates((1, 0), num_hosts=2),
            "the link from the host of rank 1 (node) to the host of rank 0 (node) is slow: 50.0 MB/s, 100.0",
            (1, 0),
        ),
    ],
)
def test_a_slow_link_is_named(measured: Measurements, text: str, named: tuple[int, ...]) -> None:
    """Fails if a link is compared with a median that it belongs to, or if only rows of the matrix are looked at."""
    found = find(measured)
    assert [(each.kind, each.ranks) for each in found] == [("link", named)]
    assert found[0].text.startswith(text)


def test_a_slow_link_that_nobody_waits_for_is_not_named() -> None:
    assert find(with_rates((1, ALL), (ALL, 1), wait_ms=1.0)) == []


def test_two_hosts_without_a_slower_direction() -> None:
    """With two hosts both directions may be slow: there is nothing to compare them with."""
    assert find(with_rates((0, 1), (1, 0), num_hosts=2)) == []
    assert find(with_rates(num_hosts=1)) == []


def test_a_rank_without_cpu_has_no_slow_link() -> None:
    """Fails if the ranks that are explained are left out of the links."""
    rates = links()
    rates.mb_per_second[2, :] = rates.mb_per_second[:, 2] = 50.0
    work = {"dense": 80.0, "retrieve": 20.0, "update": 10.0}
    assert [each.kind for each in find(late("gradient return", 40.0, work, {}, links=rates))] == ["cpu"]


def test_a_slow_link_makes_its_rank_late() -> None:
    """Fails if a rank without a cause is named although its link is."""
    rates = links()
    rates.mb_per_second[2, :] = rates.mb_per_second[:, 2] = 50.0
    found = find(late("gradient return", 30.0, {}, {}, links=rates))
    assert [(each.kind, each.ranks) for each in found] == [("link", (2,))]


def test_noise_names_nothing() -> None:
    """Times that differ by a fifth between ranks, which are late by up to 14% of a step.

    Fails if SLOW_STAGE is 1.05, or LEAST_UNEXPLAINED 0.1.
    """
    for seed in range(200):
        random = np.random.default_rng(seed)
        base, spread = healthy(), lambda values, random=random: values * random.uniform(0.9, 1.1, values.shape)
        noisy = healthy(
            late_ms={name: random.uniform(0, 14.0, NUM_RANKS) for name in WAITS},
            wait_ms={name: spread(values) for name, values in base.wait_ms.items()},
            work_ms={stage: spread(values) for stage, values in base.work_ms.items()},
            owned_keys=spread(base.owned_keys),
            links=replace(base.links, mb_per_second=spread(base.links.mb_per_second)),
        )
        assert find(noisy) == []
