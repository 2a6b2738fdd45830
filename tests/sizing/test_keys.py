"""Distinct keys of batches and of a training, against sets of plain Python."""

import math

import pytest
import torch

from nestpipe.data.batch import Batch, Jagged
from nestpipe.embedding.table import Pooled, Table
from nestpipe.sizing import keys as counted
from nestpipe.sizing.keys import count_rows, key_growth

FEATURES = {name: Pooled(Table(name, 4)) for name in ("a", "b")}


class Squares:
    """Sample s has key s * s mod 1009 of table a, and key s mod 50 of table b."""

    def __init__(self, num_samples: int | None = None) -> None:
        self.num_samples = num_samples

    def samples(self, first: int, count: int) -> Batch:
        numbers = torch.arange(first, first + count)
        return Batch({"a": Jagged.one_each(numbers * numbers % 1009), "b": Jagged.one_each(numbers % 50)})


def expected(first: int, count: int) -> set[tuple[str, int]]:
    numbers = range(first, first + count)
    return {("a", s * s % 1009) for s in numbers} | {("b", s % 50) for s in numbers}


def test_growth_and_overlap() -> None:
    growth = key_growth(Squares(), FEATURES, 100, 4)
    own, first, after = expected(0, 100), expected(0, 400), expected(400, 400)
    assert growth.of_batch == len(own)
    assert growth.by_table == {"a": len(own) - 50, "b": 50}
    assert growth.exponent == pytest.approx(math.log(len(first) / len(own)) / math.log(4))
    assert growth.owned(4) == pytest.approx(len(first) / len(own) / 4)
    assert growth.overlap == pytest.approx(len(first & after) / len(after))


def test_short_data() -> None:
    """Data of one batch: nothing is known of others, so no keys are shared."""
    growth = key_growth(Squares(60), FEATURES, 100, 4)
    assert growth.of_batch == len(expected(0, 60))
    assert (growth.exponent, growth.overlap) == (1.0, 0.0)


def test_rows_are_counted_exactly_if_there_are_few() -> None:
    rows = count_rows(Squares(), FEATURES, 100, 950)
    both = expected(0, 950)
    assert {name: row.num_rows for name, row in rows.items()} == {"a": len(both) - 50, "b": 50}
    assert rows["a"].origin == "counted in 950 samples of training"
    assert count_rows(Squares(300), FEATURES, 100, 950)["a"].origin == "counted in 300 samples of training"


def test_rows_beyond_the_limit_follow_from_their_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if `_grown` in keys.py returns `last`."""
    monkeypatch.setattr(counted, "MOST_OCCURRENCES", 400)
    rows = count_rows(Squares(), FEATURES, 50, 400)
    half, whole = (len(expected(0, n)) - 50 for n in (100, 200))
    assert rows["a"].num_rows == round(whole * 2 ** math.log2(whole / half))
    assert rows["b"].num_rows == 50
    assert rows["a"].origin == "counted in 200 of 400 samples, the rest by their growth"
