"""Part four-ranks of `bench h200`: its batches, sizes and figures, and a small run on CPUs."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nestpipe.bench.h200 import four_ranks
from nestpipe.bench.h200.digests import digest_records
from nestpipe.bench.h200.four_ranks_data import counts_of_owners, keys_by_owner, make_batches
from nestpipe.bench.h200.four_ranks_figures import counted_steps, figures
from nestpipe.bench.h200.four_ranks_recipe import (
    AS_PUBLISHED,
    COVERED,
    DENSE_OVER_EXCHANGE,
    PUBLISHED,
    Recipe,
    adjusted,
    is_close,
    serial_shares,
    tiny,
)
from nestpipe.bench.harness.ranks import records_of_ranks
from nestpipe.bench.harness.report import Record
from nestpipe.bench.harness.targets import find_misses, load_targets
from nestpipe.bench.harness.ways import EXCHANGES, FIELDS, Shares, Way, least_step_ms
from nestpipe.bench.simulate import recorded
from nestpipe.data import Batch
from nestpipe.distributed import World
from nestpipe.pipelining.schedule import SCHEDULES
from nestpipe.store import group_by_owner
from tests.ranks import run_ranks

RECIPE = replace(tiny(AS_PUBLISHED), remote_share=0.3, num_batches=3)
NUM_RANKS = 4


def batches_of_ranks() -> list[list[Batch]]:
    pools = keys_by_owner(1000, NUM_RANKS)
    return [make_batches(RECIPE, pools, rank) for rank in range(NUM_RANKS)]


def keys_of(batch: Batch) -> set[int]:
    return set(batch.keys["history"].values.tolist())


def test_other_ranks_own_the_remote_share() -> None:
    """Fails if counts_of_owners forgets the other ranks, or if requesters draw from the same part of a pool."""
    for batches in zip(*batches_of_ranks(), strict=True):
        owned = torch.zeros(NUM_RANKS, dtype=torch.int64)
        for rank, batch in enumerate(batches):
            keys = torch.tensor(sorted(keys_of(batch)))
            counts = group_by_owner("item", keys, NUM_RANKS)[1]
            assert len(keys) == RECIPE.num_distinct
            assert 1 - int(counts[rank]) / len(keys) == pytest.approx(0.3, abs=0.03)
            owned += counts
        assert len(set().union(*map(keys_of, batches))) == NUM_RANKS * RECIPE.num_distinct
        assert int(owned.max() - owned.min()) <= 8  # shared keys are random


def test_batches_share_keys_with_the_previous_one() -> None:
    """The first shares with the last. Fails if the shared keys are new ones of the same batch."""
    for batches in batches_of_ranks():
        for number, batch in enumerate(batches):
            shared = keys_of(batch) & keys_of(batches[number - 1])
            assert len(shared) == RECIPE.num_distinct // 2


@pytest.mark.parametrize("remote_share", [0.0, 0.02, 0.5, 1.0])
def test_counts_add_up(remote_share: float) -> None:
    for rank in range(3):
        counts = counts_of_owners(100, remote_share, rank, 3)
        assert sum(counts) == 100
        assert min(counts) >= 0
        assert 100 - counts[rank] == pytest.approx(100 * remote_share, abs=2)


def test_batches_that_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="must be at most a half"):
        make_batches(replace(RECIPE, overlap=0.6), keys_by_owner(1000, 2), 0)
    with pytest.raises(ValueError, match="new ones need"):
        make_batches(RECIPE, keys_by_owner(100, 2), 0)


def machine(recipe: Recipe) -> Mapping[str, float]:
    """Returns a step of serial on a machine with fixed and proportional costs."""
    parts = {
        "exposed_lookup_ms": 180.0,
        "exposed_exchange_ms": 6.0 + 240.0 * recipe.remote_share,
        "dense_ms": 9.0 + 11.0 * recipe.repeats,
    }
    return parts | {"step_ms": sum(parts.values()) + 25.0}


@pytest.mark.parametrize("remote_share", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("repeats", [1, 8, 40])
def test_calibration_converges(remote_share: float, repeats: int) -> None:
    """Within the allowed attempts. Fails, for example, if `adjusted` swaps the shares of lookup and exchange."""
    recipe = replace(AS_PUBLISHED, remote_share=remote_share, repeats=repeats)
    for _ in range(four_ranks.Size().num_calibrations):
        recipe = adjusted(recipe, machine(recipe))
    lookup, exchange = serial_shares(machine(recipe))
    assert 0.47 < lookup < 0.53
    assert 0.18 < exchange < 0.22
    assert is_close(recipe, machine(recipe))
    assert not is_close(replace(recipe, repeats=3 * recipe.repeats), machine(replace(recipe, repeats=40)))


def test_dense_compute_covers_the_exchange() -> None:
    recipe = COVERED
    for _ in range(3):
        recipe = adjusted(recipe, machine(recipe))
    parts = machine(recipe)
    assert recipe.remote_share == COVERED.remote_share
    assert parts["dense_ms"] / parts["exposed_exchange_ms"] == pytest.approx(DENSE_OVER_EXCHANGE, abs=0.06)


def test_sizes_have_limits() -> None:
    slow = {"step_ms": 1000.0, "exposed_lookup_ms": 10.0, "exposed_exchange_ms": 900.0, "dense_ms": 80.0}
    recipe = AS_PUBLISHED
    for _ in range(5):
        recipe = adjusted(recipe, slow)
    assert (recipe.remote_share, recipe.repeats) == (0.02, 1)


@pytest.mark.parametrize(("serial_ms", "steps"), [(100.0, 5), (260.0, 3), (10_000.0, 2)])
def test_rounds_are_short_enough(serial_ms: float, steps: int) -> None:
    assert counted_steps(20.0, 7, 5, serial_ms) == steps


SERIAL, SERIAL_8, NESTED = Way("serial", 1), Way("serial", 8), Way("nested", 8)
ZEROS = dict.fromkeys((*FIELDS, *EXCHANGES), 0.0)
ROUND = {
    SERIAL: ZEROS
    | {
        "step_ms": 800.0,
        "exposed_lookup_ms": 400.0,
        "exposed_exchange_ms": 160.0,
        "send_rows_ms": 60.0,
        "return_gradients_ms": 100.0,
    },
    SERIAL_8: ZEROS | {"step_ms": 900.0, "dense_ms": 200.0, "exposed_lookup_ms": 420.0},
    Way("inter", 1): ZEROS | {"step_ms": 450.0},
    NESTED: ZEROS | {"step_ms": 250.0, "exposed_lookup_ms": 21.0, "row_update_ms": 5.0, "exposed_exchange_ms": 24.0},
}
ROUNDS = {way: [values] * 3 for way, values in ROUND.items()}
SHARES = Shares(0.2, 0.1)


def test_figures_of_serial() -> None:
    """Shares are fields only of the records that their targets are for."""
    fields = figures(SERIAL, ROUNDS, SHARES, AS_PUBLISHED)
    assert (fields["lookup_share"], fields["exchange_share"]) == (0.5, 0.2)
    assert fields["published_speedup"] == 1.0
    others = figures(SERIAL_8, ROUNDS, SHARES, AS_PUBLISHED) | figures(NESTED, ROUNDS, SHARES, AS_PUBLISHED)
    assert not {"lookup_share", "exchange_share", "dense_over_exchange"} & set(others)
    assert "lookup_share" not in figures(SERIAL, ROUNDS, SHARES, COVERED)


def test_figures_of_nested() -> None:
    """Fails if _allowed_parts uses the exchange of serial with 8 micro-batches, or swaps head and tail."""
    fields = figures(NESTED, ROUNDS, SHARES, AS_PUBLISHED)
    assert fields["speedup_vs_serial"] == 800 / 250
    assert fields["exposed_exchange_fraction"] == 24 / 160
    assert fields["lookup_hidden_fraction"] == 1 - 21 / 420
    parts = fields["allowed_dense_ms"], fields["allowed_head_ms"], fields["allowed_tail_ms"]
    assert parts == (200, pytest.approx(12), pytest.approx(10))
    assert fields["allowed_step_ms"] == pytest.approx(sum(parts) + 5)
    assert fields["allowed_step_ms"] == least_step_ms(NESTED, ROUND[NESTED], ROUND[SERIAL], ROUND[SERIAL_8], SHARES)
    assert fields["speedup_vs_allowed"] == pytest.approx(fields["speedup_vs_serial"] / fields["allowed_speedup"])
    assert fields["published_speedup"] == 3.06


def test_published_parts_make_the_published_steps() -> None:
    assert PUBLISHED["inter"].speedup == pytest.approx(1.98, abs=0.02)
    assert PUBLISHED["nested"].speedup == pytest.approx(5793.83 / 1895.98, abs=0.01)


def run_small(world: World, traces: Path) -> list[Record]:
    return list(four_ranks._on_rank(world, four_ranks.QUICK, traces))


@pytest.mark.slow
def test_small_run(tmp_path: Path) -> None:
    """Both ranks choose the same sizes, a record answers every target, and digests are equal. The traces of serial
    predict the other schedules."""
    (tmp_path / "traces").mkdir()
    made, made_by_other = run_ranks(2, run_small, tmp_path / "traces")
    identity = ("recipe", "schedule", "num_micro_batches", "remote_share", "repeats", "num_steps", "head_share")
    assert [[r.get(name) for name in identity] for r in made] == [
        [r.get(name) for name in identity] for r in made_by_other
    ]
    misses = find_misses(load_targets("h200-four-ranks"), made)
    assert not [miss for miss in misses if "no record answers it" in miss or "digests_equal" in miss]
    compared = [r for r in made if "exchanged_row_bytes_per_step" in r]
    ways = [(r["recipe"], r["schedule"], r["num_micro_batches"], r["cross_batch"]) for r in compared]
    plain = [("serial", 1), ("serial", 4), ("inter", 1), ("intra", 4), ("nested", 4)]
    schedules = [*((*way, False) for way in plain), ("nested", 1, True), ("nested", 4, True)]
    assert ways == [(recipe, *way) for recipe in ("covered", "published") for way in schedules]
    for recipe in ("covered", "published"):
        sent = {r["exchanged_row_bytes_per_step"] for r in compared if r["recipe"] == recipe}
        assert len(sent) == 1  # the same batches in every schedule
    assert all(isinstance(value, int | float | str) for record in made for value in record.values())
    assert [r["dense_dtype"] for r in made if "digests_equal" in r] == ["float32"] * 3 + ["bfloat16"] * 3
    assert len(list((tmp_path / "traces").iterdir())) == len(schedules)
    for name in recorded.FILES:
        records = compared if name == "h200-four-ranks" else []
        (tmp_path / f"{name}.json").write_text(json.dumps({"records": records}))
    predicted = [r for r in recorded.recorded_records(tmp_path) if r["recipe"] == "covered"]
    assert [(r["schedule"], r["num_micro_batches"], r["cross_batch"]) for r in predicted] == schedules[2:]
    assert all("step_error" in r for r in predicted)


def run_digests(world: World) -> tuple[list[Record], bool]:
    return list(digest_records(world, quick=True)), torch.are_deterministic_algorithms_enabled()


def test_digests_of_one_rank() -> None:
    """Fails if digest_records gives a schedule another number of steps."""
    ((made, is_deterministic),) = run_ranks(1, run_digests)
    assert [(r["ranks"], r["digests_equal"]) for r in made] == [(1, 1)] * 2 * (len(SCHEDULES) - 1)
    assert len({r["digest"] for r in made}) == 2
    assert not is_deterministic  # as before


def fail_on_one(world: World) -> Iterator[Record]:
    with world.watch.reporting():
        if world.rank == 1:
            raise MemoryError("no room on rank 1")
        world.control.all_reduce_sum(torch.zeros(1))
        yield {}


@pytest.mark.slow
def test_an_error_of_a_rank_is_raised() -> None:
    """Fails if records_of_ranks does not check its ranks while it waits for records."""
    with pytest.raises(Exception, match="no room on rank 1"):
        list(records_of_ranks(2, fail_on_one, timeout_seconds=20.0))
