"""Counts the floating-point operations of a forward that the model asks for.

Products of matrices, convolutions and torch's attention are counted by the shapes of their arrays. Arrays do not show
what a kernel of ours does, and they contain what blocks and padding add. So operations that work in blocks say by a
formula what they stand for (`counts_as`), and nothing within them is counted. Other kernels count as nothing.

torch has a counter, too, but importing it imports Triton, which `import nestpipe` must not do (kernels/dispatch.py).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

LEFT_FACTOR = {"mm": 0, "bmm": 0, "mv": 0, "dot": 0, "addmm": 1, "baddbmm": 1, "addmv": 1, "addbmm": 1}
"""Products of torch: the place of the left factor among the arguments."""


class FlopCount(TorchDispatchMode):
    """The operations counted so far."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.total += _flops(func._schema.name.partition("::")[2], args, out)
        return out


def _flops(name: str, args: Any, out: Any) -> int:
    """Returns the operations of a function of torch: two, a product and a sum, for each pair of factors."""
    if name in LEFT_FACTOR:
        left = args[LEFT_FACTOR[name]]
        batch = left.shape[0] if name == "addbmm" else 1
        return int(2 * batch * out.numel() * left.shape[-1])
    if name.startswith("_scaled_dot_product") and not name.endswith("backward"):
        q, k, v = args[:3]
        return int(2 * prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1]))
    if name == "convolution":
        is_transposed = args[6]
        return int(2 * (args[0] if is_transposed else out).numel() * args[1].shape[1:].numel())
    return 0


_current: FlopCount | None = None
"""The count under way. One thread counts, before a training, so that no other one runs a model meanwhile."""


@contextmanager
def counting() -> Iterator[FlopCount]:
    """Counts the operations of this thread. It slows them down."""
    global _current
    count = FlopCount()
    _current = count
    try:
        with count:
            yield count
    finally:
        _current = None


@contextmanager
def counts_as(flops: Callable[[], int]) -> Iterator[None]:
    """Counts the work within as `flops()`, whatever it does. Costs a comparison if nothing is counted."""
    count = _current
    before = 0 if count is None else count.total
    yield
    if count is not None:
        count.total = before + flops()
