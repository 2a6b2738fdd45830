"""The formula of a worker's memory, its limits, and the changes that make a recipe fit."""

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from nestpipe.embedding.budget import DeviceBytes
from nestpipe.embedding.table import Table
from nestpipe.prediction.split_costs import BACKWARD, FORWARD, ExchangeCost, Line, SplitCosts, Traffic
from nestpipe.prediction.work import Way
from nestpipe.recipe.build import Run
from nestpipe.recipe.config import Config, TableSection
from nestpipe.recipe.text import change_config
from nestpipe.recipe.value import ConfigError
from nestpipe.sizing.keys import KeyGrowth
from nestpipe.sizing.limits import Limits, fits, most_rows, problems, remedies
from nestpipe.sizing.need import DEVICE, HOST, Case, TableSize
from nestpipe.sizing.plan import plan, table_sizes
from nestpipe.sizing.step import expected_step
from nestpipe.sizing.trial import Trial
from nestpipe.store.interface import MOST_ROWS

STAGES = ("prefetch", "upload", "retrieve", "write_back", "sum_gradients", "update")


def case_of(num_workers: int = 4, is_on_device: bool = False, **changes: object) -> Case:
    costs = SplitCosts(
        way=Way("nested", "nested"),
        num_ranks=1,
        has_issuer=False,
        stages={FORWARD: Line(20.0, 1.0), BACKWARD: Line(20.0, 1.0), **{stage: Line(1.0) for stage in STAGES}},
        collectives={},
        rows=ExchangeCost(0.0, 0.0),
        gradients=ExchangeCost(0.0, 0.0),
        traffic={n: Traffic((0.0,) * n, (0.0,) * n) for n in (1, 2, 4, 8, 16)},
    )
    trial = Trial(
        config=change_config(Config(), ["pipeline.num_micro_batches=2", "train.batch_size=100", "model.dim=8"]),
        is_on_device=is_on_device,
        crosses_batches=True,
        program_bytes=1000,
        dense_bytes=200,
        activation_bytes=300,
        embeddings=DeviceBytes(records=9999, lists=50, rows=32, gradients=64, staging=7),
        micro_batch_keys=(60, 70),
        costs=costs,
        optimizer_ms=1.0,
        parameter_bytes=100,
        input_bytes=10,
    )
    keys = KeyGrowth({"a": 80, "b": 20}, exponent=0.5, overlap=0.75)
    tables = (TableSize("a", 4000, 8, 8, 4), TableSize("b", 400, 8, 0, 4))
    return replace(Case(trial, keys, tables, num_workers), **changes)  # type: ignore[arg-type]


def bytes_of(case: Case) -> dict[str, float]:
    return {part.name: part.num_bytes for part in case.parts}


def test_the_formula_on_several_workers() -> None:
    """By hand: rows of 32 bytes, records of 64 and 32, so 57.6 on average; a worker owns 100 * 4 ** -0.5 = 50 keys.

    Fails if need.py counts one batch fewer for exchange across batches (`2 if crosses` -> `1 if crosses`)."""
    assert bytes_of(case_of()) == pytest.approx(
        {
            "program": 1000,
            "store": 1000 * 64 + 100 * 32,
            "overhead": 1100 * 32,
            "dense": 200,
            "pool": 50 * (1 + 2 * 0.25) * 57.6 * 9 / 8,
            "lists": 50 + 5 * 48 * 100,
            # kept and summed 200, ahead 130, across 100, widest 70, entries 100, messages 2 * 50 * 3/4
            "messages": (200 + 130 + 100 + 70 + 100 + 75) * 32,
            "activations": 300,
        }
    )


def test_the_formula_on_one_worker_and_on_a_device() -> None:
    alone = bytes_of(case_of(1))
    assert alone["pool"] == pytest.approx(100 * 1.25 * 57.6 * 9 / 8)  # two batches in flight
    assert alone["lists"] == 50
    assert alone["messages"] == 96  # as in the trial
    case = case_of(is_on_device=True)
    places = {part.name: part.place for part in case.parts}
    assert {name for name, place in places.items() if place == HOST} == {"program", "store", "overhead", "staging"}
    assert case.total(HOST) + case.total(DEVICE) == pytest.approx(sum(bytes_of(case).values()))
    # A number of resident bytes is taken, but not more than there are rows, and not less than what is in flight.
    least, rows = case.least_pool_bytes, 1000 * 64 + 100 * 32
    for given, pool in ((least + 1, least + 1), (10**9, rows), (1, least)):
        assert replace(case, resident_bytes=given).pool_bytes == pytest.approx(pool)


def test_the_formula_with_replicas() -> None:
    """By hand: 2 groups of 2 workers. A worker of 4 has 25 keys of 100 * 4 ** 0.5 = 200 distinct ones as one group has
    50; now each has 100. Its own group of two has 100 * 2 ** -0.5 keys of each shard.

    Fails if the rows of a worker are those of one of num_workers."""
    flat, groups = bytes_of(case_of()), bytes_of(case_of(replicas=2))
    for name in ("store", "overhead", "pool"):
        assert groups[name] == pytest.approx(2 * flat[name])
    assert groups["replica sums"] == pytest.approx((5 * 100 * 2**-0.5 + 100) * 32)
    assert groups["messages"] == pytest.approx((200 + 130 + 100 + 70 + 100 + 50) * 32)
    assert "replica sums" not in flat
    limits = Limits(case_of().total(HOST) + 1)
    assert fits(case_of(), limits)
    assert "exchange.replicas = 1 instead of 2" in remedies(case_of(replicas=2), limits)
    assert any(remedy.startswith("--workers ") for remedy in remedies(case_of(replicas=2), limits))
    assert expected_step(case_of(replicas=2), case_of().trial.config, 1.0).result.step_ms > 0
    with pytest.raises(ValueError, match="does not divide the 3 ranks"):
        plan(change_config(Config(), ["exchange.replicas=2"]), 3, limits)


def test_rows_that_are_given_at_most_the_keys() -> None:
    tables = [Table("a", 4, num_keys=500), Table("b", 4)]
    run = cast(Run, SimpleNamespace(trainer=SimpleNamespace(tables=tables)))
    config = replace(Config(), tables=(TableSection("b", max_rows=30),))
    sizes = table_sizes(config, run, 2, {"a": 1000})
    assert [(size.num_rows, size.origin) for size in sizes] == [(500, "num_keys"), (60, "max_rows of 2 workers")]
    with pytest.raises(ConfigError, match="no table of the recipe"):
        table_sizes(config, run, 2, {"c": 1})


def test_what_fits_and_what_does_not() -> None:
    case = case_of()
    total = case.total(HOST)
    assert fits(case, Limits(total))
    (problem,) = problems(case, Limits(total - 1))
    assert "GB of host memory" in problem
    assert "most of it is store" in problem
    assert "memory.resident_bytes" in problems(replace(case, resident_bytes=10), Limits(1e9))[0]
    assert "memory.device_budget_bytes" in problems(replace(case, device_budget_bytes=10), Limits(1e9))[0]
    assert "holds at most" in problems(case.with_rows("a", MOST_ROWS * 4 + 1), Limits(1e20))[0]
    # The device's limit does not count without one.
    assert fits(case, Limits(total, 1.0))
    assert not fits(case_of(is_on_device=True), Limits(total, 1.0))


def test_the_largest_table_just_fits() -> None:
    """Fails if `_most` in limits.py returns one more."""
    case, limits = case_of(), Limits(100_000.0)
    rows = most_rows(case, limits)
    assert fits(case.with_rows("a", rows), limits)
    assert not fits(case.with_rows("a", rows + 1), limits)
    assert most_rows(case, Limits(10.0)) == 0
    assert most_rows(case, Limits(1e20)) == 4 * MOST_ROWS


def test_each_remedy_makes_it_fit_and_is_the_least_change() -> None:
    case = case_of()
    limits = Limits(0.9 * case.total(HOST))
    texts = remedies(case, limits)
    named = {text.split(" ")[0]: text for text in texts}
    assert set(named) == {"--workers", "max_rows", "model.dim", "row_optimizer.kind", "train.batch_size", "workers"}
    workers = int(named["--workers"].split(" ")[1])
    assert fits(replace(case, num_workers=workers), limits)
    assert not fits(replace(case, num_workers=workers - 1), limits)
    rows = int(named["max_rows"].split(" ")[2]) * 4
    assert fits(case.with_rows("a", rows), limits)
    assert not fits(case.with_rows("a", rows + 4), limits)
    assert '"rowwise_adagrad", with 1 numbers' in named["row_optimizer.kind"]  # the one with the most state that fits
    size = int(named["train.batch_size"].split(" ")[2])
    assert fits(replace(case, batch_scale=size / 100), limits)
    assert not fits(replace(case, batch_scale=(size + 1) / 100), limits)
    # Nothing but memory helps if the program alone is too large.
    assert [text.split(" ")[0] for text in remedies(case, Limits(900.0))] == ["workers"]


def test_remedies_of_the_pool_and_of_the_budget() -> None:
    case = case_of()
    limits = Limits(case.total(HOST) + 1000)
    greedy = replace(case, resident_bytes=60_000)
    (text,) = [text for text in remedies(greedy, limits) if text.startswith("memory.resident_bytes")]
    most = int(text.split(" = ")[1])
    assert fits(replace(case, resident_bytes=most), limits)
    assert not fits(replace(case, resident_bytes=most + 1), limits)
    tight = replace(case, device_budget_bytes=10)
    (text,) = [text for text in remedies(tight, limits) if text.startswith("memory.device_budget_bytes")]
    assert fits(replace(case, device_budget_bytes=int(text.split(" = ")[1])), limits)


def test_the_expected_step_is_limited_by_a_slow_network() -> None:
    case, recipe = case_of(16), Config()
    fast, slow = (expected_step(case, recipe, rate) for rate in (1000.0, 1e-5))
    assert fast.limit[0] == "dense_ms"
    assert slow.limit[0] == "exposed_exchange_ms"
    assert slow.result.step_ms > 2 * fast.result.step_ms
    assert fast.samples_per_second == pytest.approx(1600 / fast.result.step_ms * 1e3)
    chosen = expected_step(case, change_config(recipe, ["pipeline.num_micro_batches=auto"]), 1e-4)
    assert chosen.num_micro_batches in (1, 2, 4, 8, 16)
    assert expected_step(case_of(1), recipe, None).limit[0] == "dense_ms"
