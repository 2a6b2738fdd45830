"""Ratios between schedules: each against its definition, on made-up rounds.

Fails, for example, if exposed_exchange_end_to_end of nested compares with serial instead of inter, or if least_step_ms
leaves out the head.
"""

import pytest

from nestpipe.bench.harness.ways import EXCHANGES, FIELDS, Shares, Values, Way, least_step_ms, ratios, shares_of

SHARES = Shares(head=0.1, tail=0.2)
SERIAL, SERIAL_8, INTER = Way("serial", 1), Way("serial", 8), Way("inter", 1)
INTRA, NESTED = Way("intra", 8), Way("nested", 8)


def values(**given: float) -> Values:
    return dict.fromkeys((*FIELDS, *EXCHANGES), 0.0) | given


ROUND = {
    SERIAL: values(
        step_ms=800,
        dense_ms=400,
        exposed_exchange_ms=300,
        send_rows_ms=100,
        return_gradients_ms=200,
        exposed_lookup_ms=50,
    ),
    SERIAL_8: values(step_ms=900, dense_ms=420, exposed_exchange_ms=350),
    INTER: values(step_ms=750, dense_ms=404),
    INTRA: values(step_ms=530, dense_ms=441, exposed_exchange_ms=60, row_update_ms=10, exposed_reduce_ms=5),
    NESTED: values(step_ms=500, dense_ms=441, exposed_exchange_ms=45, overlap_sync_ms=3, busy_exchange_ms=330),
}
ROUNDS = {way: [fields] * 3 for way, fields in ROUND.items()}


def test_nested() -> None:
    fields = ratios(NESTED, ROUNDS, SHARES, "paced")
    assert fields["speedup_vs_serial"] == 800 / 500
    assert fields["dense_slowdown"] == 441 / 420
    assert fields["exposed_exchange_fraction"] == 45 / 300
    assert fields["exposed_exchange_end_to_end"] == pytest.approx(1 - (750 - 500) / 300)
    assert fields["allowed_speedup"] == pytest.approx(800 / (420 + 3 + 0.1 * 100 + 0.2 * 200))
    assert fields["speedup_vs_allowed"] == pytest.approx(fields["speedup_vs_serial"] / fields["allowed_speedup"])


def test_intra() -> None:
    fields = ratios(INTRA, ROUNDS, SHARES, "paced")
    assert fields["exposed_exchange_end_to_end"] == pytest.approx(1 - (800 - 530) / 300)
    assert fields["allowed_speedup"] == pytest.approx(800 / (420 + 10 + 5 + 10 + 40 + 50))


def test_inter_and_serial() -> None:
    assert ratios(SERIAL, ROUNDS, SHARES, "paced") == {}
    fields = ratios(INTER, ROUNDS, SHARES, "paced")
    assert (fields["speedup_vs_serial"], fields["dense_slowdown"]) == (800 / 750, 404 / 400)
    assert "exposed_exchange_fraction" not in fields  # its target is for intra and nested only


def test_real_compute_has_other_names() -> None:
    fields = ratios(NESTED, ROUNDS, SHARES, "real")
    assert fields["real_speedup_vs_serial"] == 800 / 500
    assert fields["waiting_exchange_fraction"] == 45 / 300
    assert not {"speedup_vs_serial", "exposed_exchange_fraction", "allowed_speedup"} & set(fields)


@pytest.mark.parametrize("busy", ["busy_host_ms", "busy_exchange_ms"])
def test_no_step_is_shorter_than_its_busiest_lane(busy: str) -> None:
    mine = dict(ROUND[NESTED]) | {busy: 700.0}
    assert least_step_ms(NESTED, mine, ROUND[SERIAL], ROUND[SERIAL_8], SHARES) == 700


def test_the_median_of_the_rounds_counts() -> None:
    rounds = {way: [values, values, dict(values) | {"exposed_exchange_ms": 150.0}] for way, values in ROUND.items()}
    fields = ratios(NESTED, rounds, SHARES, "paced")
    assert fields["exposed_exchange_fraction"] == 45 / 300
    assert fields["exposed_exchange_fraction_high"] == 1.0


def test_shares() -> None:
    """Fails if head and tail change places."""
    assert shares_of([10.0, 20.0, 100.0]) == Shares(head=0.1, tail=0.2)
