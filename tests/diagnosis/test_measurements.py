"""Clock offsets, lateness and rates of links, from stamps that are made up."""

from typing import Any

import numpy as np
import pytest

from nestpipe.diagnosis.measurements import clock_offsets, lateness, links_of, others

MS = 1_000_000


def test_others() -> None:
    """Fails if a rank is compared with a median that it belongs to."""
    assert others(np.array([1.0, 5.0])).tolist() == [5.0, 1.0]
    assert others(np.array([1.0, 2.0, 9.0])).tolist() == [5.5, 5.0, 1.5]
    assert others(np.array([[1.0, 0.0], [2.0, 0.0], [9.0, 6.0]]))[0].tolist() == [5.5, 3.0]
    many = np.arange(100.0)
    assert (others(many) == 49.5).all()


@pytest.mark.parametrize("seed", range(5))
def test_clock_offsets(seed: int) -> None:
    """Fails if `there + back` is halved, or if the exchanges are averaged: a rank is late in most of them."""
    random = np.random.default_rng(seed)
    ahead = np.array([0, -3_000 * MS, 7 * MS])
    entered = random.integers(0, 20 * MS, (3, 15)) + np.arange(15) * 100 * MS
    left = entered.max(axis=0) + MS // 5 + random.integers(0, MS // 10, (3, 15))
    entered[:, 0] = 0  # in one exchange all enter at once
    left[:, 0] = MS // 5
    clocks = [
        [(int(e), int(x)) for e, x in zip(entered[r] + ahead[r], left[r] + ahead[r], strict=True)] for r in range(3)
    ]
    assert clock_offsets(clocks) == pytest.approx(ahead, abs=MS // 10)


def stamps(entered_ms: Any, first: int = 0) -> dict[str, Any]:
    return {"first": first, "entered_ns": [round(float(ms) * MS) for ms in entered_ms]}


def test_a_rank_is_late_in_each_step() -> None:
    """A step has three collectives, and the rank enters the first one 40 ms late. Fails if collectives count instead of
    steps."""
    steps = np.repeat(np.arange(20) * 100.0, 3) + np.tile([0.0, 1.0, 2.0], 20)
    late = steps + np.tile([40.0, 0.0, 0.0], 20)
    found = lateness([stamps(steps), stamps(late), stamps(steps)], np.zeros(3), 20)
    assert found.tolist() == [0.0, 40.0, 0.0]


def test_clocks_are_compared() -> None:
    """Fails if the offsets are left out, or added."""
    times = np.arange(20) * 10.0
    found = lateness([stamps(times), stamps(times + 105.0)], np.array([0.0, 100.0 * MS]), 20)
    assert found.tolist() == pytest.approx([0.0, 5.0])


def test_only_collectives_that_all_have_count() -> None:
    """Fails if lists are compared from their beginnings, though one rank has stamped two collectives more."""
    times = np.arange(22) * 10.0
    assert lateness([stamps(times), stamps(times[2:], first=2)], np.zeros(2), 20).tolist() == [0.0, 0.0]


def test_few_common_collectives_show_nothing() -> None:
    times = np.arange(20) * 10.0
    assert lateness([stamps(times), stamps(times, first=15)], np.zeros(2), 20).tolist() == [0.0, 0.0]


def test_ranks_that_are_late_by_turns_are_not_late() -> None:
    """Fails if NUM_DEVIATIONS is 0, so that the median counts."""
    named = 0
    for seed in range(200):
        random = np.random.default_rng(seed)
        entered = np.arange(40) * 100.0 + random.exponential(20.0, (3, 40))
        named += int(lateness([stamps(each) for each in entered], np.zeros(3), 40).max() > 1.0)
    assert named <= 4


def test_rates_of_links() -> None:
    """The fastest message counts, from when both have entered. Fails if a wait for the sender counts."""
    probes = [
        {"host": "a", "senders": [0, 2], "messages": [[2, 10**6, 0, 10 * MS], [2, 10**6, 100 * MS, 120 * MS]]},
        {"host": "a", "senders": [0, 2], "messages": []},
        {"host": "b", "senders": [0, 2], "messages": [[0, 10**6, 0, 50 * MS], [0, 10**6, 80 * MS, 140 * MS]]},
    ]
    links = links_of(probes, np.zeros(3))
    assert (links.names, links.ranks) == (["a", "b"], [0, 2])
    assert links.mb_per_second[1, 0] == pytest.approx(100.0)
    assert links.mb_per_second[0, 1] == pytest.approx(25.0)
    assert np.isnan(np.diag(links.mb_per_second)).all()
