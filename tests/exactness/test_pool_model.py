"""R1 to R10: the rules of the row pool, in a model that plays lanes and a late device in random order.

pool_model.py states the rules. They hold in every order that is played here, and each is needed: with any of the
SWITCHES, which break one rule each, some order gives a wrong row, a wrong store, a wrong count or no progress.
"""

from collections import Counter
from collections.abc import Iterable

import pytest

from tests.exactness.pool_model import SWITCHES
from tests.exactness.pool_model_run import Run
from tests.exactness.pool_model_time import RuleError

NUM_RUNS = 2000
MOST_RUNS = 400
"""Runs among which one has to show that a rule is broken."""
EVENTS = {
    "growth",
    "clean victims",
    "dirty victims",
    "failed retrieve",
    "masked",
    "no room",
    "flush",
    "writes by others",
}


def play(seeds: Iterable[int]) -> Counter[str]:
    """Returns how often each event has happened. Raises RuleError if a rule is broken."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        run = Run(seed)
        try:
            run.play()
        except RuleError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        seen += run.pool.seen
    return seen


def failures(switch: str, seeds: Iterable[int]) -> Iterable[str]:
    for seed in seeds:
        try:
            Run(seed, switch).play()
        except RuleError as error:
            yield str(error)


def test_every_order_gives_the_rows_of_plain_training() -> None:
    """Fails with any of the switches on, for example if RowPool._victims omits the batch in training."""
    seen = play(range(NUM_RUNS))
    assert min(seen[event] for event in EVENTS) > NUM_RUNS // 20, seen


@pytest.mark.slow
@pytest.mark.timeout(300)  # half a minute on an idle machine
def test_every_order_gives_the_rows_of_plain_training_in_many_runs() -> None:
    """Fails as the test above does."""
    play(range(NUM_RUNS, 21 * NUM_RUNS))


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_broken_rule_is_noticed(switch: str) -> None:
    """Fails if the model no longer asks for the switch, or if the check that notices it is left out."""
    _, kind = SWITCHES[switch]
    assert any(failure.startswith(kind) for failure in failures(switch, range(MOST_RUNS)))
