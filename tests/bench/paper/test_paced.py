"""Work and figures of `bench paper` with paced compute."""

import time

import pytest
import torch

from nestpipe.bench.harness.ways import FIELDS, Way
from nestpipe.bench.network.loop import FEATURE, make_features
from nestpipe.bench.paper.paced import SERIAL_WAY, STALE_WAY, UNSPLIT, Paces, end_to_end_figures, split_figures
from nestpipe.bench.paper.paced import Bench as PacedBench
from nestpipe.bench.paper.run import _scaled
from nestpipe.bench.paper.workload import (
    QUICK,
    RealSize,
    SlowStore,
    model_size,
    overlap_of,
    real_cases,
    sliding_batches,
)
from nestpipe.distributed import World
from nestpipe.embedding.table import make_store, tables_of

ZEROS = dict.fromkeys(FIELDS, 0.0)
NESTED = Way("nested", 8)
SERIAL_FIELDS = {"step_ms": 1000.0, "exposed_lookup_ms": 500.0, "exposed_exchange_ms": 200.0}
NESTED_FIELDS = {"step_ms": 400.0, "exposed_lookup_ms": 5.0, "exposed_exchange_ms": 25.0}
ROUNDS = {
    SERIAL_WAY: [ZEROS | SERIAL_FIELDS] * 2,
    STALE_WAY: [ZEROS | {"step_ms": 500.0}] * 2,
    NESTED: [ZEROS | NESTED_FIELDS, ZEROS | NESTED_FIELDS | {"step_ms": 200.0}],
}


def test_half_of_the_samples_are_in_the_previous_batch() -> None:
    """The first follows the last. Fails if both halves of a batch are new ones."""
    batches = sliding_batches(QUICK, rank=0, world_size=2)
    for number, batch in enumerate(batches):
        mine, before = batch.keys[FEATURE], batches[number - 1].keys[FEATURE]
        half = QUICK.batch_size // 2
        assert len(mine) == QUICK.batch_size
        assert torch.equal(mine.take(torch.arange(half)).values, before.take(torch.arange(half, 2 * half)).values)
        assert float(batch.inputs["share"].sum()) == pytest.approx(1.0)
    assert 0.3 < overlap_of(batches) < 0.9


def test_a_slow_store_takes_its_time_for_every_key() -> None:
    """Fails if the time does not depend on the number of keys."""
    features = make_features(4)
    store = make_store(tables_of(features), 1, 1, SlowStore)
    assert isinstance(store, SlowStore)
    store.ms_per_key = 2.0
    seconds = []
    for number in (1, 50):
        keys, out = torch.arange(number), torch.empty(number, store.spec("item").num_columns)
        began = time.perf_counter()
        store.gather_tables(["item"], torch.tensor([0, number]), keys, out, None)
        seconds.append(time.perf_counter() - began)
    assert seconds[1] > 0.1
    assert seconds[0] < seconds[1]
    assert store.num_read == 51


def test_figures_are_compared_with_serial_round_by_round() -> None:
    """Fails if the exposed parts are divided by the step, or the published row is that of another system."""
    nested = end_to_end_figures(NESTED, ROUNDS, dense_ms=300.0)
    assert (nested["speedup_vs_serial"], nested["speedup_vs_serial_low"]) == (3.75, 2.5)
    assert (nested["exposed_lookup_fraction"], nested["exposed_exchange_fraction"]) == (0.01, 0.125)
    assert nested["published_system"] == "NestPipe"
    serial = end_to_end_figures(SERIAL_WAY, ROUNDS, dense_ms=250.0)
    assert (serial["lookup_share"], serial["exchange_share"], serial["step_over_dense"]) == (0.5, 0.2, 4.0)
    assert "speedup_vs_serial" not in serial
    assert end_to_end_figures(STALE_WAY, ROUNDS, 1.0)["published_system"] == "UniEmb, stale prefetch"


def test_a_split_is_compared_with_the_unsplit_batch() -> None:
    """The published figure belongs to the naive split alone."""
    bytes_of = {name: 100.0 for name in FIELDS if name.startswith("exchanged_")}
    times = {"step_ms": 300.0, "busy_exchange_ms": 100.0, "exposed_exchange_ms": 100.0}
    more = dict.fromkeys(bytes_of, 150.0) | {"step_ms": 200.0, "busy_exchange_ms": 120.0, "exposed_exchange_ms": 10}
    naive, once = Way("nested", 32, "resend", "none"), Way("nested", 32)
    rounds = {UNSPLIT: [ZEROS | bytes_of | times], naive: [ZEROS | more], once: [ZEROS | more | bytes_of]}
    figures = split_figures(naive, rounds, batch_size=512)
    assert figures["micro_batch_size"] == 16
    assert figures["exchanged_bytes_vs_unsplit"] == 1.5
    assert (figures["speedup_vs_unsplit"], figures["busy_exchange_vs_unsplit"]) == (1.5, 1.2)
    assert figures["exposed_exchange_fraction"] == 0.1
    assert figures["published_exchange_vs_unsplit"] == pytest.approx(1331 / 1185)
    assert split_figures(once, rounds, batch_size=512)["exchanged_bytes_vs_unsplit"] == 1.0
    assert "published_exchange_vs_unsplit" not in split_figures(once, rounds, batch_size=512)


def test_efficiency_is_against_one_rank() -> None:
    bench = PacedBench(QUICK, World())
    record = bench.identity("end_to_end", NESTED, Paces(1.0, 1.0), 1) | NESTED_FIELDS | {"rate": "1gbit", "other": 1}
    scaled = _scaled({**record, "table": "ranks", "ranks": 4}, step_ms_of_one=300.0)
    assert (scaled["scaling_efficiency"], scaled["published_scaling_efficiency"]) == (0.75, 0.9407)
    assert (scaled["table"], scaled["ranks"]) == ("ranks", 4)
    assert "other" not in scaled


def test_every_real_case_changes_one_size() -> None:
    """Batches keep their tokens. Fails if a case changes two sizes."""
    base, *others = real_cases(RealSize())
    assert len(others) == 6
    sizes = ("dim", "num_layers", "length")
    for case in others:
        assert [name for name in sizes if getattr(case, name) != getattr(base, name)] == [case.varied]
        shape = model_size(RealSize(), case)[1]
        assert shape.batch_size * shape.length == RealSize().tokens
