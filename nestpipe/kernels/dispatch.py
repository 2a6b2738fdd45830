"""Chooses the form of an operation for an array: kernels in Triton, or torch, and how torch does it there."""

import os
from importlib.util import find_spec

from torch import Tensor

HAS_TRITON = find_spec("triton") is not None
ELEMENTS_ON_DEVICE = 2**26
"""elements that torch works on at a time in device memory: enough to make each launch worth while"""


def runs_triton(*arrays: Tensor) -> bool:
    """Says whether kernels run there: on CUDA where Triton is installed; on a CPU only if Triton's interpreter is asked
    for, with TRITON_INTERPRET=1.

    Triton reads that variable when a kernel is defined. So modules with kernels are imported where they are first used,
    never by `import nestpipe`.
    """
    return compiles_triton(*arrays) or (interprets_triton() and arrays[0].is_cpu)


def compiles_triton(*arrays: Tensor) -> bool:
    """Says whether kernels run there as machine code, so that they are the fastest form."""
    return HAS_TRITON and any(array.is_cuda for array in arrays)


def interprets_triton() -> bool:
    """Says whether Triton's interpreter is asked for; it runs anywhere, and slowly."""
    return HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"


def adds_in_order(target: Tensor) -> bool:
    """Says whether index_add_ adds one row after another there: on an accelerator its additions are atomic, which come
    in any order."""
    return target.is_cpu


def elements_at_a_time(array: Tensor, in_host_memory: int) -> int:
    """The number of elements that an operation in torch works on at a time. In host memory it is the operation's own,
    few enough for a core's caches."""
    return in_host_memory if array.is_cpu else ELEMENTS_ON_DEVICE
