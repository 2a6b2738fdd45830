"""Whole simulations: costs of stages, determinism, and what must make a step longer or shorter."""

from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest

from nestpipe.pipelining.schedule import Op
from nestpipe.pipelining.stage import STAGES
from nestpipe.prediction.ways import CROSSING, SCHEDULE_WAYS, all_ways, in_groups, operations_of
from nestpipe.prediction.work import TWO_HOPS, Way
from nestpipe.simulator.cluster import Cluster
from nestpipe.simulator.costs import STAGE_COSTS, Case, costs_on
from nestpipe.simulator.jitter import Jitter
from nestpipe.simulator.network import all_reduce, all_to_all
from nestpipe.simulator.simulate import Record, simulate

SMALL = replace(Cluster(), run=replace(Cluster().run, steps=15))
QUIET = replace(SMALL, jitter=replace(SMALL.jitter, sigma=0.0))
NESTED = Way("nested", "nested")


def changed(cluster: Cluster, section: str, **values: Any) -> Cluster:
    return replace(cluster, **{section: replace(getattr(cluster, section), **values)})


def by_way(cluster: Cluster, *workers: int) -> dict[tuple[str, int], Record]:
    return {(str(r["way"]), int(r["workers"])): r for r in simulate(cluster, workers)}


def test_the_same_seed_gives_the_same_records() -> None:
    assert list(simulate(SMALL, (64,))) == list(simulate(SMALL, (64,)))
    assert list(simulate(SMALL, (64,))) != list(simulate(changed(SMALL, "run", seed=2), (64,)))


def test_parts_add_up_and_schedules_rank() -> None:
    records = by_way(QUIET, 16, 256)
    for record in records.values():
        assert sum(float(value) for name, value in record.items() if name in _parts()) == pytest.approx(
            record["step_ms"]
        )
        assert 0 < record["busy_share_compute"] <= 1
    for workers in (16, 256):
        step = {way.name: float(records[way.name, workers]["step_ms"]) for way in all_ways(4)}
        assert step["nested"] < step["inter"] < step["serial"]
        assert step["nested"] < step["intra"] < step["serial"]
        assert step["stale"] <= step["inter"]
    assert records["serial", 16]["scaling_efficiency"] == 1


def _parts() -> set[str]:
    return {stage.time_field for stage in STAGES.values()}


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("network", {"between_gb_per_second": 5.0}),
        ("network", {"between_latency_us": 50.0}),
        ("network", {"incast": 0.01}),
        ("host", {"gather_gb_per_second": 0.5}),
        ("dense", {"ms": 120.0}),
        ("dense", {"split_ms": 5.0}),
        ("batch", {"keys": 400_000}),
        ("batch", {"head_share": 0.4}),
        ("batch", {"window": "resend", "resend_growth": 1.5}),
        ("jitter", {"sigma": 0.2}),
        ("jitter", {"straggler_probability": 0.05}),
    ],
)
def test_what_makes_a_step_longer(section: str, values: dict[str, float]) -> None:
    before = by_way(SMALL, 128)["nested", 128]
    after = by_way(changed(SMALL, section, **values), 128)["nested", 128]
    assert after["step_ms"] > before["step_ms"]


def test_more_workers_take_longer() -> None:
    records = by_way(SMALL, 16, 128, 1024)
    for way in SCHEDULE_WAYS:
        steps = [float(records[way.name, workers]["step_ms"]) for workers in (16, 128, 1024)]
        assert steps == sorted(steps)


def test_hits_take_work_from_the_host_lane() -> None:
    cold, warm = (by_way(changed(QUIET, "pool", hit_rate=rate), 64) for rate in (0.0, 0.5))
    assert warm["nested", 64]["busy_share_host"] == pytest.approx(cold["nested", 64]["busy_share_host"] / 2, rel=0.01)
    assert warm["serial", 64]["exposed_lookup_ms"] == cold["serial", 64]["exposed_lookup_ms"]


def test_a_world_of_one_exchanges_nothing() -> None:
    records = by_way(QUIET, 1)
    assert all(records[way.name, 1]["exposed_exchange_ms"] == 0 for way in SCHEDULE_WAYS)


def test_collectives_by_hand() -> None:
    network = replace(
        Cluster().network,
        devices_per_node=4,
        inside_gb_per_second=100.0,
        between_gb_per_second=10.0,
        inside_latency_us=1.0,
        between_latency_us=10.0,
        incast=0.1,
    )
    direct = all_to_all(network, 16, 16e6)
    assert direct.latency_ms == pytest.approx((3 * 1 + 12 * 10) / 1e3)
    assert direct.transfer_ms == pytest.approx(12e6 / 10e6 * (1 + 0.1 * 12))  # 3 MB inside take less
    hops = all_to_all(network, 16, 16e6, TWO_HOPS)
    assert hops.latency_ms == pytest.approx((3 * 1 + 3 * 10) / 1e3)
    assert hops.transfer_ms == pytest.approx(12e6 / 100e6 + 12e6 / 10e6 * (1 + 0.1 * 3))
    shared = all_to_all(network, 16, 16e6, TWO_HOPS, node_share=0.5)
    assert shared.transfer_ms == pytest.approx(12e6 / 100e6 + 6e6 / 10e6 * (1 + 0.1 * 3))
    assert all_reduce(network, 16, 16e6).latency_ms == pytest.approx(2 * 4 * 10 / 1e3)
    assert all_reduce(network, 16, 16e6).transfer_ms == pytest.approx(2 * 15e6 / 10e6)
    assert all_reduce(network, 1, 16e6).transfer_ms == 0


def test_groups_that_exchange_sums() -> None:
    """By hand: 2 groups of 8 workers, each on a node. Fails if sums travel as in a group of neighbours, or if a worker
    retrieves and updates the keys of its own group only."""
    cluster = changed(QUIET, "network", devices_per_node=8, incast=0.0)
    batch, network = cluster.batch, cluster.network
    way = in_groups(CROSSING, 2)
    flat, groups = (costs_on(Case(cluster, 16, one, 1)) for one in (CROSSING, way))
    rows, sums, late = (
        Op(name, "rows", 1, i) for name, i in (("send_rows", 0), ("share_sums", -1), ("late_update", -1))
    )
    row_bytes = batch.keys * batch.dim * 4
    own_bytes = row_bytes * min(1, 2 * batch.owned_share)
    blocked_bytes, urgent_bytes = batch.key_overlap * row_bytes, batch.key_overlap * own_bytes
    assert groups(rows).transfer_ms == pytest.approx(blocked_bytes * 7 / 8 / network.inside_gb_per_second / 1e6)
    assert flat(rows).transfer_ms == pytest.approx(blocked_bytes / 2 / network.between_gb_per_second / 1e6)
    assert groups(sums).transfer_ms == pytest.approx(urgent_bytes / network.between_gb_per_second / 1e6)
    assert groups(late).local_ms == pytest.approx(2 * float(flat(late).local_ms))
    retrieve = Op("retrieve", "host", 1)
    assert groups(retrieve).local_ms == pytest.approx(2 * float(flat(retrieve).local_ms))
    assert any(op.stage == "share_sums" for op in islice(operations_of(way, 1, 16), 100))
    assert in_groups(CROSSING, 1) == CROSSING


def test_every_stage_has_a_cost() -> None:
    """Fails if a stage is added to the table of stages, and not to STAGE_COSTS."""
    assert STAGES.keys() - {""} <= STAGE_COSTS.keys()
    with pytest.raises(ValueError, match="there is no cost of stage 'teleport'; add it to STAGE_COSTS"):
        costs_on(Case(Cluster(), 2, NESTED, 1))(Op("teleport", "compute", 0))


def test_jitter_depends_on_the_operation_and_the_seed_alone() -> None:
    section = replace(Cluster().jitter, sigma=0.1)
    op = Op("dense", "compute", 3, 1)
    one, same, other = (Jitter(section, seed, 1000).factors(op) for seed in (1, 1, 2))
    assert (one == same).all()
    assert not (one == other).all()
    assert float(np.mean(one)) == pytest.approx(1, abs=0.02)
    slow = Jitter(replace(section, sigma=0.0, straggler_probability=0.1, straggler_factor=3.0), 1, 1000).factors(op)
    assert set(slow.tolist()) == {1.0, 3.0}
    assert 50 < (slow == 3.0).sum() < 150


@pytest.mark.parametrize("has_issuer", [False, True])
def test_exchange_across_batches(has_issuer: bool) -> None:
    """Only rows and gradients that neighbouring batches share have to wait for the boundary between them."""
    cluster = changed(QUIET, "network", has_issuer=has_issuer)
    records = by_way(cluster, 1, 256)
    plain, crossed = records["nested", 256], records["nested-cross-batch", 256]
    assert crossed["step_ms"] < plain["step_ms"]
    assert records["nested", 1]["step_ms"] == records["nested-cross-batch", 1]["step_ms"]
    cost = costs_on(Case(cluster, 256, CROSSING, 8))
    shared = cluster.batch.key_overlap
    whole = costs_on(Case(cluster, 256, NESTED, 8))(Op("send_rows", "rows", 1, 0)).transfer_ms * 8
    assert sum(cost(Op("send_rows", "rows", 1, i)).transfer_ms for i in range(8)) == pytest.approx(shared * whole)
    assert cost(Op("send_early_rows", "rows", 1)).transfer_ms == pytest.approx((1 - shared) * whole)
    updates = cost(Op("update", "compute", 1)), cost(Op("late_update", "gradients", 1))
    assert sum(float(np.sum(work.local_ms)) for work in updates) == pytest.approx(cluster.dense.row_update_ms)


@pytest.mark.parametrize("has_issuer", [False, True])
def test_batches_that_share_all_keys_have_nothing_to_exchange_across(has_issuer: bool) -> None:
    """Then a step is that of nested, apart from the latency of empty exchanges: early, late, and the owners' reply."""
    for num in (1, 8):
        cluster = changed(
            changed(QUIET, "batch", key_overlap=1.0, num_micro_batches=num), "network", has_issuer=has_issuer
        )
        records = by_way(cluster, 256)
        empty = all_to_all(cluster.network, 256, 0)
        assert empty.transfer_ms == 0
        added_ms = float(records["nested-cross-batch", 256]["step_ms"]) - float(records["nested", 256]["step_ms"])
        assert -1e-9 <= added_ms <= 3 * empty.latency_ms


def test_batches_that_share_no_keys_hide_all_rows() -> None:
    cluster = changed(changed(QUIET, "batch", key_overlap=0.0, num_micro_batches=1), "dense", ms=1000.0)
    record = by_way(cluster, 256)["nested-cross-batch", 256]
    empty = all_to_all(cluster.network, 256, 0)
    assert record["exposed_exchange_ms"] == pytest.approx(2 * empty.latency_ms)


def test_overlap_of_the_first_and_last_micro_batch() -> None:
    cluster = changed(
        QUIET, "batch", key_overlap=0.4, head_overlap=0.2, tail_overlap=0.8, head_share=0.1, tail_share=0.1
    )
    cost, plain = (costs_on(Case(cluster, 64, way, 4)) for way in (CROSSING, NESTED))
    whole = sum(plain(Op("send_rows", "rows", 1, i)).transfer_ms for i in range(4))
    sent = [cost(Op("send_rows", "rows", 1, i)).transfer_ms / whole for i in range(4)]
    returned = [cost(Op("return_gradients", "gradients", 1, i)).transfer_ms / whole for i in range(4)]
    assert sent == pytest.approx([0.1 * 0.2, *[(0.4 - 0.02) / 3] * 3])
    assert returned == pytest.approx([*[(0.4 - 0.08) / 3] * 3, 0.1 * 0.8])


def test_with_resend_the_first_use_of_a_row_crosses() -> None:
    cluster = changed(QUIET, "batch", window="resend", resend_growth=1.5, key_overlap=0.4)
    cost = costs_on(Case(cluster, 64, CROSSING, 5))
    whole = cost(Op("send_early_rows", "rows", 1)).transfer_ms / 0.6
    assert cost(Op("send_rows", "rows", 1, 0)).transfer_ms / whole == pytest.approx((1.5 - 0.6) / 5)


def test_replicated_tables() -> None:
    """Their gradients travel twice, to owners and as sums to all ranks, and their rows not at all. Fails if
    _return_gradients or _share_sums leaves them out, or if the list has no share_sums."""
    with_replicas = changed(QUIET, "batch", replicated_keys=100_000, gradient_dtype="bfloat16")
    ways = [Case(changed(QUIET, "batch", gradient_dtype="bfloat16"), 64, NESTED, 4), Case(with_replicas, 64, NESTED, 4)]
    plain, replicated = map(costs_on, ways)

    def ratio(stage: str) -> float:
        ops = [Op(stage, "lane", 1, i) for i in range(4)]
        return sum(replicated(op).transfer_ms for op in ops) / sum(plain(op).transfer_ms for op in ops)

    assert ratio("send_rows") == 1
    assert ratio("return_gradients") == pytest.approx(1.5)
    shared, gradients = (replicated(Op(stage, "gradients", 1, 0)) for stage in ("share_sums", "return_gradients"))
    assert shared.transfer_ms == pytest.approx(gradients.transfer_ms * 2 * 4 / 3)  # 100,000 float32, 300,000 / 4 halves
    fewer = changed(with_replicas, "batch", replicated_keys=1)
    added = [by_way(cluster, 64)["serial", 64]["exposed_exchange_ms"] for cluster in (with_replicas, fewer)]
    sent = replicated(Op("return_gradients", "gradients", 1, 0)).transfer_ms * 4 / 3
    assert added[0] - added[1] == pytest.approx(sent + shared.transfer_ms, rel=1e-3)


def test_bags() -> None:
    """Each owner of some of a bag's keys sends a sum, and gets its gradient; the first micro-batch has no more of them.
    Fails if _send_rows or _return_gradients leaves them out, if _route leaves out their keys, or if all owners send a
    sum of a bag with one key."""
    few = changed(QUIET, "batch", keys=100_000, head_share=0.0, key_overlap=0.0)
    plain, many = (costs_on(Case(c, 64, CROSSING, 4)) for c in (few, changed(few, "batch", bags=10_000)))
    one = costs_on(Case(changed(few, "batch", bags=10_000, keys_per_bag=1), 64, CROSSING, 4))
    early = plain(Op("send_early_rows", "rows", 1)).transfer_ms
    assert many(Op("send_early_rows", "rows", 1)).transfer_ms == early
    for stage in ("send_rows", "return_gradients"):
        for i in range(4):
            assert plain(Op(stage, "lane", 1, i)).transfer_ms == 0
            expected = 10_000 * 64 * (1 - (63 / 64) ** 20) / 4 / 100_000
            assert many(Op(stage, "lane", 1, i)).transfer_ms / early == pytest.approx(expected)
            assert one(Op(stage, "lane", 1, i)).transfer_ms / early == pytest.approx(10_000 / 4 / 100_000)
    with_keys = costs_on(Case(changed(few, "batch", bag_keys=100_000), 64, CROSSING, 4))
    assert with_keys(Op("route", "route", 1)).transfer_ms > plain(Op("route", "route", 1)).transfer_ms
    assert with_keys(Op("retrieve", "host", 1)).local_ms == pytest.approx(2 * plain(Op("retrieve", "host", 1)).local_ms)


def test_head_and_tail_shares() -> None:
    cluster = changed(QUIET, "batch", head_share=0.1, tail_share=0.3)
    cost = costs_on(Case(cluster, 64, NESTED, 4))
    sent = [cost(Op("send_rows", "rows", 1, i)).transfer_ms for i in range(4)]
    returned = [cost(Op("return_gradients", "gradients", 1, i)).transfer_ms for i in range(4)]
    assert [ms / sum(sent) for ms in sent] == pytest.approx([0.1, 0.3, 0.3, 0.3])
    assert [ms / sum(returned) for ms in returned] == pytest.approx([0.7 / 3, 0.7 / 3, 0.7 / 3, 0.3])
