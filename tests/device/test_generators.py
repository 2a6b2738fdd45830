"""Tests that forked generators continue as if nothing had been drawn inside."""

import torch

from nestpipe.device.generators import forked_generators
from nestpipe.device.streams import default_device, full_device


def test_draws_within_are_not_seen_outside() -> None:
    """Tries the host and, if there is one, the accelerator. Fails if forked_generators does not fork one of them."""
    device = full_device(default_device())
    places = {torch.device("cpu"), device}
    torch.manual_seed(0)
    expected = {place: torch.rand(4, device=place) for place in places}
    torch.manual_seed(0)
    with forked_generators(device):
        for place in places:
            torch.rand(9, device=place)
    assert all(torch.equal(torch.rand(4, device=place), expected[place]) for place in places)
