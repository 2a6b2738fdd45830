"""The gradients of a group's tables in one piece of memory.

Fails, for example, if the memory of a table's gradient is handed out twice, or is not cleared for a table without one.
"""

import torch
from torch import Tensor

from nestpipe.embedding.pooling import Occurrences, pool
from nestpipe.embedding.table_rows import JoinedGradient, split_tables

SIZES = [4, 0, 5, 3]
OCCURRENCES = {0: torch.tensor([0, 3, 3, 4]), 2: torch.tensor([4, 1, 1, 0]), 3: torch.tensor([2, 2, 2, 3])}


def used(rows: Tensor, tables: list[int]) -> tuple[Tensor, Tensor, list[int]]:
    """Returns the rows as a leaf, what a loss of these features makes of it, and the address of the gradient."""
    leaf, addresses = rows.clone().requires_grad_(), []
    leaf.register_hook(lambda gradient: addresses.append(gradient.data_ptr()))
    joined = JoinedGradient(SIZES)
    split = split_tables(leaf, joined)
    features = [Occurrences(OCCURRENCES[t], gradient=(joined, t)) for t in tables]
    return leaf, pool(features, [split[t] for t in tables]), addresses


def expected(rows: Tensor, tables: list[int], weight: Tensor) -> Tensor:
    leaf = rows.clone().requires_grad_()
    split = leaf.split(SIZES)
    (pool([Occurrences(OCCURRENCES[t]) for t in tables], [split[t] for t in tables]) * weight).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def test_gradients_equal_those_of_split() -> None:
    torch.manual_seed(0)
    rows = torch.randn(12, 5)
    for tables in ([0, 2, 3], [3, 0], [2], [0, 2, 0, 3, 3]):  # in any order, some without features, some with several
        weight = torch.randn(4, 5 * len(tables))
        leaf, pooled, addresses = used(rows, tables)
        (pooled * weight).sum().backward()
        assert torch.equal(leaf.grad, expected(rows, tables, weight))
        assert leaf.grad.data_ptr() == addresses[0]  # it was not copied


def test_several_backwards_add_up() -> None:
    torch.manual_seed(1)
    rows, weight = torch.randn(12, 5), torch.randn(4, 15)
    leaf, pooled, _ = used(rows, [0, 2, 3])
    for _ in range(2):
        (pooled * weight).sum().backward(retain_graph=True)
    once = expected(rows, [0, 2, 3], weight)
    assert torch.equal(leaf.grad, once + once)


def test_gradients_made_elsewhere() -> None:
    """A model may use rows of a table itself, and of the same table by pooling."""
    rows = torch.randn(12, 5)
    leaf = rows.clone().requires_grad_()
    joined = JoinedGradient(SIZES)
    split = split_tables(leaf, joined)
    pooled = pool([Occurrences(OCCURRENCES[0], gradient=(joined, 0))], [split[0]])
    (pooled.sum() + 2 * split[0].sum() + 3 * split[3].sum()).backward()
    once = expected(rows, [0], torch.ones(4, 5))
    once[:4] += 2
    once[9:] += 3
    assert torch.equal(leaf.grad, once)


def test_gradients_of_gradients() -> None:
    leaf = torch.randn(12, 5, requires_grad=True)
    split = split_tables(leaf, JoinedGradient(SIZES))
    (gradient,) = torch.autograd.grad((split[0] ** 3).sum(), leaf, create_graph=True)
    gradient.sum().backward()
    assert torch.allclose(leaf.grad[:4], 6 * leaf.detach()[:4])
    assert not leaf.grad[4:].any()
