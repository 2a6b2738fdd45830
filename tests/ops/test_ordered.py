"""Sums in order: the way of accelerators against the CPU's, in sums where the order shows."""

import torch

from nestpipe.ops.ordered import add_in_order, add_sorted


def test_the_order_is_that_of_the_index() -> None:
    """Fails if the sorted sums run from the last entry to the first."""
    source = torch.tensor([1e8, 1.0, -1e8, 1.0]).repeat(50).repeat(3, 1).t().contiguous()
    index = torch.tensor([4, 1, 4, 4, 1, 0, 0]).repeat(29)[: len(source)]
    expected, got = torch.zeros(6, 3), torch.zeros(6, 3)
    add_in_order(expected, index, source)
    add_sorted(got, index, source)
    assert torch.equal(got, expected)
    backwards = torch.zeros(6, 3)
    add_in_order(backwards, index.flip(0), source.flip(0))
    assert not torch.equal(backwards, expected)


def test_added_to_what_is_there() -> None:
    target = torch.tensor([[1.0], [2.0], [3.0]])
    add_sorted(target, torch.tensor([2, 2, 0]), torch.tensor([[0.5], [0.25], [4.0]]))
    assert target.tolist() == [[5.0], [2.0], [3.75]]
    add_sorted(target, torch.tensor([], dtype=torch.int64), torch.zeros(0, 1))
    assert target.tolist() == [[5.0], [2.0], [3.75]]
