"""For the tests of training: a run changes settings of torch, which later tests must not see."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _torch_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    torch.use_deterministic_algorithms(False)
