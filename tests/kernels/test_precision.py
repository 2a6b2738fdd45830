"""What autocast asks of operations, and how they are exempt from it."""

import torch

from nestpipe.kernels.precision import product_dtype, without_autocast


def test_products_have_the_dtype_that_autocast_makes_them_have() -> None:
    """Fails if product_dtype does not ask whether autocast is on, or if without_autocast leaves it on."""
    x = torch.ones(2, 2)
    assert product_dtype(x) == (x @ x).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert product_dtype(x) == (x @ x).dtype == torch.bfloat16
        with without_autocast(x):
            assert product_dtype(x) == (x @ x).dtype == torch.float32
        assert product_dtype(x) == torch.bfloat16
