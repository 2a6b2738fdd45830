"""Tests the choice of a device by name, and that streams do nothing on a CPU."""

import numpy as np
import pytest
import torch

from nestpipe import World
from nestpipe.device.streams import Streams, default_device, device_of_rank, full_device, mark, use_here, wait_for
from nestpipe.device.transfer import download, upload, uploaded
from nestpipe.embedding.travel import TravelList

CPU = torch.device("cpu")


def test_a_device_that_torch_does_not_know() -> None:
    with pytest.raises(
        ValueError, match="'gpu' is not a device that torch knows; give cpu, cuda or cuda:1, for example"
    ):
        World(device="gpu")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="runs on machines without an accelerator")
@pytest.mark.parametrize("make", [full_device, lambda name: device_of_rank(name, 1)])
def test_a_missing_device(make) -> None:
    with pytest.raises(ValueError, match=r"there is no cuda here, torch finds no accelerator; set runtime\.device"):
        make("cuda")


def test_the_default_exists() -> None:
    assert full_device(default_device()).type == default_device()


def test_a_cpu_has_no_streams() -> None:
    moment = mark(CPU)
    assert moment is None
    wait_for(moment)
    use_here(torch.zeros(2), None)
    with Streams(CPU).on_lane("rows"):
        assert torch.zeros(2).device == CPU


def test_tensors_on_the_device_are_not_copied() -> None:
    """Fails if upload copies tensors that are on the device."""
    tensor = torch.arange(5)
    assert upload([tensor], CPU)(tensor) is tensor
    assert download(tensor) is tensor
    travel = TravelList(tensor, [0, 3, 5], np.array([[3, 0]]))
    assert uploaded(travel, CPU) is travel
