"""Interleaved comparisons: order, count, ratio."""

import pytest
import torch

from nestpipe.bench.harness.memory import in_fresh_process
from nestpipe.bench.harness.pairs import Comparison, alternate, compare, median_interval, one_thread
from nestpipe.store.process_memory import peak_bytes, reset_peak, resident_bytes


def test_pairs_alternate_and_the_first_does_not_count() -> None:
    calls: list[str] = []
    comparison = compare(lambda: calls.append("o"), lambda: calls.append("b"), 3, lambda: calls.append("-"))
    assert "".join(calls) == "-bo-ob-bo-ob"
    assert len(comparison.ours) == len(comparison.baseline) == 3


def test_ratio_is_the_median_of_the_pairs() -> None:
    fields = Comparison(ours=[1.0, 2.0, 4.0], baseline=[2.0, 2.0, 12.0]).fields("speed")
    assert fields == {"speed": 2.0, "speed_low": 1.0, "speed_high": 3.0}


def _resident_growth(num_bytes: int) -> tuple[int, int]:
    before = resident_bytes()
    data = bytearray(b"x") * num_bytes
    grown = resident_bytes() - before
    del data
    reset_peak()
    data = bytearray(b"x") * (num_bytes // 2)
    del data
    return grown, peak_bytes() - before


def test_memory_is_measured() -> None:
    grown, peak = in_fresh_process(_resident_growth, 200_000_000)
    assert grown == pytest.approx(200_000_000, rel=0.05)
    assert peak == pytest.approx(100_000_000, rel=0.1)


def test_interval_of_a_median() -> None:
    """With 40 values, it spans the 14th from either end; with few values, all of them."""
    assert median_interval([float(i) for i in range(1, 41)][::-1]) == (14.0, 27.0)
    assert median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)


def test_rounds_alternate_and_the_first_does_not_count() -> None:
    """Fails if alternate counts its warm-up, or begins every round with the same work."""
    calls: list[str] = []
    works = {name: (lambda name=name: calls.append(name) or len(calls)) for name in "ab"}
    assert alternate(works, 2) == {"a": [3, 6], "b": [4, 5]}
    assert "".join(calls) == "baabba"
    assert alternate(works, 1, warm_up_rounds=0) == {"a": [8], "b": [7]}


def test_one_thread() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
