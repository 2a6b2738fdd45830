"""Tests when graphs are recorded, and under which autocast. tests/gpu tests the graphs themselves."""

import torch

from nestpipe.device.graphs import autocast_while_recording, can_record


def test_nothing_is_recorded_in_host_memory() -> None:
    assert not can_record(torch.zeros(1))


def test_autocast_stays_as_it_is_without_its_cache() -> None:
    """Fails if autocast_while_recording turns autocast on, or leaves its cache on."""
    x = torch.ones(2, 2)
    for is_on in (False, True):
        dtype = torch.bfloat16 if is_on else torch.float32
        with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
            with autocast_while_recording(x, dtype):
                assert (x @ x).dtype == dtype
                assert torch.is_autocast_enabled("cpu") == is_on
                assert not torch.is_autocast_cache_enabled()
            assert torch.is_autocast_cache_enabled()
