"""The order of samples: every row once in an epoch, shuffled within windows of row groups, new in each epoch.

Fails, for example, if the permutations do not depend on the epoch, or if a window's rows are numbered from
0 instead of through all row groups.
"""

import numpy as np
import pytest

from nestpipe.data.order import SampleOrder

SIZES = [7, 3, 0, 10, 1, 10, 4]


def rows_of_epoch(order: SampleOrder, epoch: int) -> list[int]:
    """Returns row numbers through all row groups, window by window."""
    first = np.concatenate([[0], np.cumsum(order.group_rows)])
    position, rows = epoch * order.num_rows, []
    while position < (epoch + 1) * order.num_rows:
        window = order.window_at(position)
        assert window.first == position
        assert all(order.window_at(p) == window for p in range(window.first, window.end))
        numbers = np.concatenate([np.arange(first[group], first[group + 1]) for group in window.groups])
        rows += numbers[order.rows(window)].tolist()
        position = window.end
    return rows


@pytest.mark.parametrize("window", [1, 2, 3, 6, 100])
def test_every_row_once_an_epoch_and_another_order_each(window: int) -> None:
    order = SampleOrder(SIZES, seed=5, window=window)
    epochs = [rows_of_epoch(order, epoch) for epoch in range(3)]
    assert all(sorted(rows) == list(range(35)) for rows in epochs)
    assert len({tuple(rows) for rows in epochs}) == 3
    assert rows_of_epoch(SampleOrder(SIZES, seed=5, window=window), 1) == epochs[1]
    assert rows_of_epoch(SampleOrder(SIZES, seed=6, window=window), 1) != epochs[1]


def test_row_groups_and_the_rows_of_a_window_are_permuted() -> None:
    order = SampleOrder([10] * 8, seed=1, window=2)
    rows = rows_of_epoch(order, 0)
    groups = [sorted({row // 10 for row in rows[first : first + 20]}) for first in range(0, 80, 20)]
    assert [len(window_groups) for window_groups in groups] == [2] * 4
    assert groups != sorted(groups)
    assert len({row // 10 for row in rows[:10]}) == 2  # both row groups from the beginning


def test_without_shuffle_rows_are_as_they_are() -> None:
    order = SampleOrder(SIZES, seed=3, window=2, shuffle=False)
    assert [rows_of_epoch(order, epoch) for epoch in range(2)] == [list(range(35))] * 2


def test_the_order_stays_the_same() -> None:
    """A checkpoint of an older version must continue with the samples that it has not seen."""
    assert rows_of_epoch(SampleOrder([4, 4, 4], seed=7, window=2), 1) == [11, 7, 6, 4, 8, 5, 9, 10, 2, 1, 0, 3]


def test_refuses_a_window_of_nothing() -> None:
    with pytest.raises(ValueError, match="window is 0, must be at least 1 row group"):
        SampleOrder(SIZES, window=0)
