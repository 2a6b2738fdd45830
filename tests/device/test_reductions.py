"""One check of all dense gradients.

Fails if all_finite asks torch for the norm of an empty list, which torch returns in host memory. A rank without samples
has no gradients, and its result must be on the device all the same.
"""

import pytest
import torch

from nestpipe.device.numerics import all_finite

CPU = torch.device("cpu")


@pytest.mark.parametrize("number", [1.0, float("inf"), float("-inf"), float("nan"), 3e38])
def test_one_number_of_many(number: float) -> None:
    tensors = [torch.zeros(3, 4), torch.empty(0), torch.tensor([0.0, number])]
    assert bool(all_finite(tensors, CPU)) == bool(torch.tensor(number).isfinite())


@pytest.mark.parametrize("tensors", [[], [torch.empty(0, 4)]])
def test_none_at_all(tensors: list[torch.Tensor]) -> None:
    assert bool(all_finite(tensors, CPU))
    assert all_finite(tensors, torch.device("meta")).device.type == "meta"
