"""The precision of operations under autocast: that which it asks for, or their own."""

import torch
from torch import Tensor


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of products with x, as autocast has it."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def without_autocast(x: Tensor) -> torch.autocast:
    """A context in which operations on x, and on what lies beside it, keep the dtype of their arguments."""
    return torch.autocast(x.device.type, enabled=False)
