"""The number of slots of each group. Fails if growth forgets the spare eighth, or expansion the reserve."""

import pytest
import torch

from nestpipe.embedding import capacity as capacity_module
from nestpipe.embedding.capacity import Capacity, PoolSize

CPU = torch.device("cpu")


def test_the_minimum_grows_with_the_batches() -> None:
    capacity = Capacity("minimum", CPU)
    assert capacity.growth([80, 10], [PoolSize(0, 0, 4), PoolSize(20, 0, 8)]).num_slots == (90, 20)
    assert capacity.expansion([PoolSize(90, 0, 4), PoolSize(20, 0, 8)], None) == [0, 0]
    exact = Capacity("minimum", CPU, has_spare=False)
    assert exact.growth([80], [PoolSize(0, 0, 4)]).num_slots == (80,)


def test_a_number_is_a_limit_that_groups_share() -> None:
    """After the first step a tenth of what is left stays in reserve, the rest goes by need."""
    capacity, sizes = Capacity(2000, CPU), [PoolSize(100, 0, 4), PoolSize(50, 0, 8)]
    growth = capacity.growth([100, 50], sizes)
    assert (growth.num_slots, growth.num_bytes, growth.error) == ((100, 50), 800, None)
    assert "need 2,400 bytes" in str(capacity.growth([500, 50], sizes).error)
    capacity = Capacity(2000, CPU)
    capacity.growth([100, 50], sizes)
    assert capacity.expansion(sizes, None) == [100 + 540 // 4, 50 + 540 // 8]
    assert capacity.expansion([PoolSize(100, 7, 4), PoolSize(50, 9, 8)], None) == [7, 9]  # once


def test_auto_takes_a_share_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity_module, "is_accelerator", lambda device: True)
    monkeypatch.setattr(capacity_module, "free_bytes", lambda device: 8000)
    for num_sharing, most_bytes, expected in ((1, None, 1000 + 100), (4, None, 250 + 100), (1, 1200, 300)):
        capacity = Capacity(None, CPU, num_sharing)
        capacity.growth([80], [PoolSize(100, 0, 4)])
        assert capacity.expansion([PoolSize(100, 0, 4)], most_bytes) == [expected]
