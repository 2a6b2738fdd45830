"""Costs from traces: a simulated trace, read back, predicts what the simulation says of the other schedules."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from nestpipe.prediction.result import sum_up
from nestpipe.prediction.ways import SCHEDULE_WAYS
from nestpipe.prediction.work import Way
from nestpipe.report.timeline import draw_timeline
from nestpipe.report.trace import read_trace
from nestpipe.simulator.cluster import Cluster
from nestpipe.simulator.fit import fit, fit_error, fit_summary, predict, predictions
from nestpipe.simulator.overlap import Overlap
from nestpipe.simulator.simulate import play_case
from nestpipe.simulator.trace_out import MOST_WORKERS, write_simulated_trace
from nestpipe.simulator.trace_times import read_trace_times

NUM = 4
WAYS = {way.name: way for way in SCHEDULE_WAYS}
SPLIT = ("intra", "nested", "nested-cross-batch")


def make_cluster(sigma: float) -> Cluster:
    base = Cluster()
    return replace(
        base,
        run=replace(base.run, steps=15),
        batch=replace(base.batch, num_micro_batches=NUM),
        dense=replace(base.dense, split_ms=0.0),
        pool=replace(base.pool, hit_rate=0.0),
        jitter=replace(base.jitter, sigma=sigma),
    )


@pytest.mark.parametrize(("sigma", "limit"), [(0.0, 1e-6), (0.02, 0.03)])
def test_a_trace_predicts_the_other_schedules(tmp_path: Path, sigma: float, limit: float) -> None:
    """Fails if a stage's time is read from the wrong lane, or if collectives count what workers wait for each other."""
    cluster = make_cluster(sigma)
    write_simulated_trace(cluster, 4, WAYS["serial"], tmp_path / "serial.json")
    times = read_trace_times(tmp_path / "serial.json")
    assert (times.way, times.num_ranks, times.num_micro_batches) == (WAYS["serial"], 4, 1)
    fitted = fit(times)
    assert abs(fit_error(fitted)) < limit
    predicted = predictions([fitted], NUM, overlap=cluster.overlap)
    assert {way.name for way, _ in predicted} == {"serial", "inter", "intra", "nested", "nested-cross-batch"}
    for (way, num), result in predicted.items():
        if num == (NUM if way.name in SPLIT else 1):
            simulated = sum_up(play_case(cluster, 4, way))
            allowed = max(limit, 0.01)  # latency is not told from bandwidth, so equal parts are a little too short
            assert result.step_ms == pytest.approx(simulated.step_ms, rel=allowed), way.name


@pytest.mark.parametrize("has_issuer", [False, True])
@pytest.mark.parametrize("name", ["inter", "intra", "nested", "nested-cross-batch"])
def test_the_way_of_a_trace_is_found(tmp_path: Path, name: str, has_issuer: bool) -> None:
    cluster = make_cluster(0.02)
    cluster = replace(cluster, network=replace(cluster.network, has_issuer=has_issuer))
    write_simulated_trace(cluster, 8, WAYS[name], tmp_path / "t.json")
    times = read_trace_times(tmp_path / "t.json")
    assert (times.way, times.num_ranks, times.has_issuer) == (WAYS[name], MOST_WORKERS, has_issuer)
    assert times.num_micro_batches == (NUM if name in SPLIT else 1)
    assert abs(fit_error(fit(times))) < 0.03


def test_a_trace_of_exchange_across_batches_predicts_the_other_ways(tmp_path: Path) -> None:
    """Fails if early rows, late gradients or late updates are lost, or count twice."""
    cluster = make_cluster(0.0)
    write_simulated_trace(cluster, 4, WAYS["nested-cross-batch"], tmp_path / "t.json")
    fitted = fit(read_trace_times(tmp_path / "t.json"))
    assert abs(fit_error(fitted)) < 1e-3
    for name in ("serial", "inter", "intra", "nested"):
        simulated = sum_up(play_case(cluster, 4, WAYS[name]))
        num = NUM if name in SPLIT else 1
        predicted = predict([fitted], WAYS[name], num)
        assert predicted.step_ms == pytest.approx(simulated.step_ms, rel=0.02), name


def test_overlap_of_all_keys_changes_no_prediction() -> None:
    summary = {"schedule": "serial", "num_micro_batches": 4, "step_ms": 100.0, "dense_ms": 60.0, "row_update_ms": 2.0}
    fitted = fit_summary("a run", {**summary, "exposed_lookup_ms": 18.0, "exposed_exchange_ms": 20.0}, 2)
    nested = predict([fitted], WAYS["nested"], 4)
    assert predict([fitted], WAYS["nested-cross-batch"], 4, overlap=Overlap(1.0)) == nested
    # Of no shared keys, what is left is the dense part.
    assert predict([fitted], WAYS["nested-cross-batch"], 4, overlap=Overlap(0.0)).step_ms == pytest.approx(60)


def test_a_simulated_trace_is_like_a_real_one(tmp_path: Path) -> None:
    """`nestpipe report` reads and draws it."""
    path = tmp_path / "nested.json"
    write_simulated_trace(make_cluster(0.02), 1536, WAYS["nested"], path)
    trace = read_trace(path, rank=MOST_WORKERS - 1)
    assert trace.lanes == ["compute", "input", "upload", "route", "host", "rows", "gradients"]
    assert len(trace.step_starts()) >= 15
    assert "dense" in draw_timeline([trace])
    assert json.loads(path.read_text())["otherData"]["simulated"] == 1


def test_traces_that_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match="is not a trace that"):
        read_trace_times(path)
    cluster = make_cluster(0.0)
    write_simulated_trace(replace(cluster, run=replace(cluster.run, steps=2)), 2, Way("serial", "serial"), path)
    with pytest.raises(ValueError, match=r"has 3 steps; to fit costs, trace at least 4: --trace-steps A:B"):
        read_trace_times(path)


def test_a_summary_predicts_too() -> None:
    summary = {
        **{"schedule": "serial", "num_micro_batches": 2, "step_ms": 100.0, "dense_ms": 60.0, "other_ms": 0.0},
        **{"exposed_lookup_ms": 20.0, "exposed_exchange_ms": 16.0, "exposed_input_ms": 2.0, "row_update_ms": 2.0},
    }
    fitted = fit_summary("a run", summary, 2)
    assert abs(fit_error(fitted)) < 1e-9
    assert predict([fitted], WAYS["inter"], 2).step_ms == pytest.approx(78)
    assert predict([fitted], WAYS["intra"], 2).step_ms == pytest.approx(92)
    assert predict([fitted], WAYS["nested"], 2).step_ms == pytest.approx(70)
    many_hits = predict([fit_summary("b", {**summary, "exposed_lookup_ms": 200.0}, 2)], WAYS["nested"], 2, hit_rate=0.9)
    assert many_hits.step_ms == pytest.approx(70)
