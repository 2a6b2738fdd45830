"""Arrays that grow in place, in host memory."""

import pytest
import torch

from nestpipe.device import growing
from nestpipe.device.growing import GrowingArray
from nestpipe.device.tally import Tally
from nestpipe.store.process_memory import resident_bytes

CPU = torch.device("cpu")


def test_rows_stay_where_they_are() -> None:
    """Fails if grow makes a new array, or if unused address space costs memory."""
    before = resident_bytes()
    array = GrowingArray(8, torch.float64, CPU)
    view, address = array.rows[:5], array.rows.data_ptr()
    for num_rows in (5, 100_000):
        array.grow(num_rows)
        array.rows[num_rows - 5 : num_rows] = num_rows
    assert array.rows.data_ptr() == address
    assert view.unique().tolist() == [5.0]
    assert (array.num_rows, array.num_bytes, array.row_bytes) == (100_000, 6_400_000, 64)
    assert resident_bytes() - before < 50_000_000


def test_no_more_than_there_is() -> None:
    array = GrowingArray(4, torch.float32, CPU, most_bytes=1600)
    array.grow(100)
    array.grow(3)
    assert array.num_rows == 100
    with pytest.raises(MemoryError, match=r"cannot grow to .* GB: take a smaller batch"):
        array.grow(101)


def test_the_tally_counts_what_has_grown() -> None:
    """Fails if Tally.start keeps arrays of earlier runs, or Tally.resize those that are gone."""
    tally, array, other = Tally(), GrowingArray(4, torch.float32, CPU), GrowingArray(4, torch.float32, CPU)
    tally.resize(other, CPU, 50)
    tally.start(CPU)
    tally.resize(other, CPU, 70)
    tally.start(CPU)
    assert tally.peak_bytes == 0
    tally.resize(array, CPU, 100)
    tally.resize(array, CPU, 300)
    tally.resize(other, torch.device("meta"), 1000)
    assert tally.peak_bytes == 300
    del array
    assert tally._total() == 0


def test_memory_that_cannot_grow_is_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if an accelerator without virtual memory functions needs a size that nobody gives."""
    monkeypatch.setattr(growing, "is_accelerator", lambda device: True)
    monkeypatch.setattr(growing, "free_bytes", lambda device: 8 * 1600)
    array = GrowingArray(4, torch.float32, CPU)
    array.grow(100)
    with pytest.raises(MemoryError, match="cannot grow"):
        array.grow(101)
