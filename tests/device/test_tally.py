"""Tests that a tally counts memory once, from when a tensor is added until it is freed."""

import pytest
import torch

from nestpipe.device.tally import Tally, whole_device_peak

CPU = torch.device("cpu")


@pytest.fixture
def tally() -> Tally:
    tally = Tally()
    tally.start(CPU)
    return tally


def held(tally: Tally) -> int:
    return tally._total()


def test_memory_counts_until_it_is_free(tally: Tally) -> None:
    first, second = torch.empty(100), torch.empty(50)
    tally.add(first, second, first, None)
    part = first[:10]
    del first
    assert held(tally) == 600
    del part
    assert held(tally) == 200


def test_the_peak_is_kept(tally: Tally) -> None:
    """Fails if add compares with the peak before it has added."""
    for size in (10, 1000, 10):
        tally.add(torch.empty(size))
    assert tally.peak_bytes == 4000
    assert held(tally) == 0


def test_a_view_counts_as_itself(tally: Tally) -> None:
    data = torch.empty(1000)
    tally.add(*data[:100].split(50))
    assert held(tally) == 400


def test_what_autograd_holds_counts(tally: Tally) -> None:
    array = torch.ones(100, requires_grad=True)
    tally.add(array)
    loss = array.square().sum()
    del array
    assert held(tally) == 400
    del loss
    assert held(tally) == 0


def test_other_devices_and_stopped_tallies(tally: Tally) -> None:
    elsewhere = torch.empty(100, device="meta")
    tally.add(elsewhere)
    tally.stop()
    later = torch.empty(100)
    tally.add(later)
    assert held(tally) == 0


def test_a_cpu_has_no_device_peak() -> None:
    assert whole_device_peak(CPU) is None
