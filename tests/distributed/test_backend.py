"""The backend that ranks choose from the devices of all of them."""

import pytest
import torch

from nestpipe import World
from nestpipe.distributed.backend import choose_backend, device_place


@pytest.mark.parametrize(
    ("wanted", "places", "chosen"),
    [
        ("auto", ["a", "b"], "nccl"),
        ("auto", ["a", "b", "a"], "gloo"),
        ("auto", ["a", ""], "gloo"),
        ("auto", ["", ""], "gloo"),
        ("auto", ["a"], "gloo"),
        ("gloo", ["a", "b"], "gloo"),
        ("nccl", ["a", "b"], "nccl"),
        ("nccl", ["a"], "nccl"),
    ],
)
def test_choice(wanted: str, places: list[str], chosen: str) -> None:
    assert choose_backend(wanted, places) == chosen


@pytest.mark.parametrize(
    ("wanted", "places", "text"),
    [
        ("nccl", ["a", "b", "a"], r"ranks 0, 2 are not alone on theirs. Start as many ranks as there are devices"),
        ("nccl", ["a", "", "a"], r"rank 1 is without. Set it to 'auto'"),
        ("ncll", ["a", "b"], r"'ncll', must be one of 'auto', 'gloo', 'nccl'"),
    ],
)
def test_refusals(wanted: str, places: list[str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        choose_backend(wanted, places)


def test_ranks_may_share_a_device_in_tests() -> None:
    assert choose_backend("nccl", ["a", "a"], may_share_device=True) == "nccl"
    with pytest.raises(ValueError, match=r"rank 1 is without"):
        choose_backend("nccl", ["a", ""], may_share_device=True)


def test_nccl_cannot_use_host_memory() -> None:
    assert device_place(torch.device("cpu")) == ""
    with pytest.raises(ValueError, match="needs a CUDA device"):
        World.from_environment(backend="nccl")
