"""X1 to X5: the rules of the exchange across batches, in a model that plays ranks, lanes and devices in random order.

cross_model.py states the rules. They hold in every order that is played here, and each is needed: with any of the
CROSS_SWITCHES, which break one rule or leave out one wait each, some order gives a wrong row or store, or a deadlock.
Fails if the list of cross_list.py lets early rows go before late_update, or if any of the switches is on.
"""

from collections import Counter
from collections.abc import Iterable

import pytest

from tests.exactness.cross_model import CROSS_SWITCHES
from tests.exactness.cross_run import CrossRun
from tests.exactness.pool_model_time import RuleError

NUM_RUNS = 200
NUM_SLOW_RUNS = 30_000
NUM_CHUNKS = 20
MOST_RUNS = 300
"""Runs among which one has to show that a rule is broken."""
FIRST_SEEDS = {"host_lane_skips_late_update": 440, "outcomes_are_awaited_by_chance": 200}
"""Seeds to begin with, for failures that are rare."""
EVENTS = {
    "early",
    "late",
    "late update",
    "late at a flush",
    "growth",
    "clean victims",
    "dirty victims",
    "failed route",
    "failed retrieve",
    "refused",
    "left",
    "masked",
    "no room",
    "flush",
}


def play(seeds: Iterable[int]) -> Counter[str]:
    """Returns how often each event has happened. Raises RuleError if a rule is broken."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        run = CrossRun(seed)
        try:
            run.play()
        except RuleError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        seen += run.seen
    return seen


def failures(switch: str, seeds: Iterable[int]) -> Iterable[str]:
    for seed in seeds:
        try:
            CrossRun(seed, switch).play()
        except RuleError as error:
            yield str(error)


def test_every_order_gives_the_rows_of_plain_training() -> None:
    """Fails with any of the switches on, for example if operations lets early rows go before late_update."""
    seen = play(range(NUM_RUNS))
    assert all(seen[event] > 0 for event in EVENTS), seen


@pytest.mark.slow
@pytest.mark.timeout(300)  # ten seconds on an idle machine
@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_every_order_gives_the_rows_of_plain_training_in_many_runs(chunk: int) -> None:
    """Fails as the test above does."""
    num_runs = NUM_SLOW_RUNS // NUM_CHUNKS
    play(range(NUM_RUNS + chunk * num_runs, NUM_RUNS + (chunk + 1) * num_runs))


@pytest.mark.parametrize("switch", CROSS_SWITCHES)
def test_a_broken_rule_is_noticed(switch: str) -> None:
    """Fails if the model no longer asks for the switch, or if the check that notices it is left out."""
    _, kind = CROSS_SWITCHES[switch]
    first = FIRST_SEEDS.get(switch, 0)
    assert any(failure.startswith(kind) for failure in failures(switch, range(first, first + MOST_RUNS)))
