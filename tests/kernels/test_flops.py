"""Operations of a forward: what the model asks for, whatever form computes it."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from nestpipe.kernels.flops import counting, counts_as


def test_products_are_counted() -> None:
    """Fails if torch's count is lost, or if something is counted after the end."""
    a, b = torch.ones(3, 5), torch.ones(5, 7)
    with torch.no_grad(), counting() as count:
        a @ b
    a @ b
    assert count.total == 2 * 3 * 5 * 7


def test_functions_of_torch() -> None:
    """Fails if a product is counted by the wrong shapes."""
    x = torch.ones(2, 3, 4)
    cases: list[tuple[int, Callable[[], object]]] = [
        (2 * 6 * 4 * 5, lambda: F.linear(x, torch.ones(5, 4), torch.ones(5))),
        (2 * 2 * 3 * 4 * 6, lambda: x @ torch.ones(2, 4, 6)),
        (2 * 2 * 3 * 4 * 3, lambda: torch.baddbmm(torch.ones(2, 3, 3), x, x.transpose(1, 2))),
        (2 * 3 * 4, lambda: x[0] @ torch.ones(4)),
        (2 * 2 * 3 * 3 * (4 + 4), lambda: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])),
        (2 * (2 * 7 * 2) * (3 * 3), lambda: F.conv1d(x, torch.ones(7, 3, 3))),
        (2 * 2 * 3 * 4 * 7 * 3, lambda: F.conv_transpose1d(x, torch.ones(3, 7, 3))),
        (0, lambda: x + x),
    ]
    for expected, function in cases:
        with torch.no_grad(), counting() as count:
            function()
        assert count.total == expected


def test_a_formula_replaces_what_is_counted_within() -> None:
    """Fails if blocks are counted beside the formula, or the formula is used for what comes later."""
    a, b = torch.ones(3, 5), torch.ones(5, 7)
    with torch.no_grad(), counting() as count:
        a @ b
        with counts_as(lambda: 1000):
            a @ b
            a @ b
        a @ b
    assert count.total == 2 * (2 * 3 * 5 * 7) + 1000


def test_nothing_is_computed_without_a_count() -> None:
    with counts_as(lambda: 1 // 0):
        pass


def test_a_count_ends_with_an_error() -> None:
    """Fails if a model that fails leaves the count on."""
    with pytest.raises(RuntimeError, match="broken"), counting():
        raise RuntimeError("broken")
    with counts_as(lambda: 1 // 0):
        pass
