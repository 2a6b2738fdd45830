"""`bench scale --quick`: its cases, and the fields of each."""

import pytest
import torch

from nestpipe.bench import scale
from nestpipe.bench.scale import records

ALWAYS = {"ranks", "tables", "num_micro_batches", "threads", "dim", "num_keys", "seed", "host_ms"}
STAGES = {f"{stage}_ms" for stage in ("dedup", "route", "plan", "send", "return", "sums")}


def fields_of(name: str) -> set[str]:
    return {name, f"{name}_low", f"{name}_high"}


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_fields_and_cases() -> None:
    """Fails if a growth is given for other cases than its target is for, or a stage is left out of host_ms."""
    made = list(records(quick=True))
    cases = {(r["ranks"], r["tables"], r["num_micro_batches"]) for r in made}
    assert len(cases) == len(made)
    assert cases == {(r, t, n) for r in (2, 16, 1536) for t in (1, 200) for n in (1, 8)}
    for record in made:
        expected = ALWAYS | STAGES
        expected |= fields_of("host_growth") if record["ranks"] == 1536 else set()
        expected |= fields_of("table_growth") if (record["ranks"], record["tables"]) == (16, 200) else set()
        assert record.keys() == expected
        assert min(record[name] for name in STAGES) > 0
        assert 0.5 < sum(record[name] for name in STAGES) / record["host_ms"] < 2  # medians of few rounds
        for name in ("host_growth", "table_growth"):
            if name in record:
                assert record[f"{name}_low"] <= record[name] <= record[f"{name}_high"]


def test_growth_compares_a_case_with_16_ranks_and_with_one_table() -> None:
    """Round by round. Fails if _record divides by the case of 2 ranks, or the other way round."""
    rounds = {
        scale.Case(ranks, tables, 8): [dict.fromkeys(scale.STAGES, ms), dict.fromkeys(scale.STAGES, 2 * ms)]
        for ranks, tables, ms in ((2, 1, 1.0), (16, 1, 2.0), (1536, 1, 6.0), (16, 200, 5.0), (1536, 200, 20.0))
    }
    by_case = {(case.ranks, case.tables): scale._record(case, rounds, 100) for case in rounds}
    assert by_case[1536, 1]["host_growth"] == 3.0
    assert by_case[1536, 200]["host_growth"] == 4.0
    assert by_case[16, 200]["table_growth"] == 2.5
    assert by_case[16, 1]["host_ms"] == 6 * 3.0
    assert not any(name in by_case[2, 1] or name in by_case[16, 1] for name in ("host_growth", "table_growth"))


def test_two_ranks_request_every_owned_key() -> None:
    """For any number of ranks a rank owns half as many keys as it requests, so the work with rows does not grow."""
    features = scale.group_features(scale.make_features(3))
    batch = scale.make_batch(3, 600)
    for ranks in (2, 16):
        rank = scale.Rank(scale.Case(ranks, 3, 2), features, batch)
        assert rank.step().keys() == set(scale.STAGES)
        (rows,) = rank._resident
        assert 200 < len(rows.keys) < 400
