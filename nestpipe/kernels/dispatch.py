"""Chooses how an operation on an array runs: by kernels in Triton or by torch, and in which precision."""

import os
import warnings
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

HAS_TRITON = find_spec("triton") is not None
INSTALL_TRITON = "Triton is not installed; install it with: pip install 'nestpipe[cuda]'"
ELEMENTS_ON_DEVICE = 2**26
"""Elements that torch works on at a time in device memory: enough to be worth a launch."""


def runs_triton(*arrays: Tensor) -> bool:
    """Returns whether kernels run on these arrays.

    They run on CUDA if Triton is installed, and on a CPU if TRITON_INTERPRET=1 asks for Triton's interpreter. Triton
    reads that variable when a kernel is defined. So modules with kernels are imported where they are first used, never
    by `import nestpipe`.
    """
    return compiles_triton(*arrays) or (interprets_triton() and arrays[0].is_cpu)


def compiles_triton(*arrays: Tensor) -> bool:
    """Returns whether kernels run on these arrays as machine code, so that they are the fastest form."""
    is_cuda = any(array.is_cuda for array in arrays)
    if is_cuda and not HAS_TRITON:
        _warn_of_slow_forms()
    return is_cuda and HAS_TRITON


def interprets_triton() -> bool:
    """Returns whether Triton's interpreter is asked for. It is slow, and runs on any machine."""
    return HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _warn_of_slow_forms() -> None:
    warnings.warn(f"operations on CUDA run in plain torch, which is much slower: {INSTALL_TRITON}", stacklevel=4)


def kernels_cannot_run(name: str) -> ValueError:
    """Returns the error for an option that demands kernels where they cannot run."""
    remedy = "use 'blocked', which runs everywhere"
    if not HAS_TRITON:
        remedy = f"{INSTALL_TRITON}, or {remedy}"
    return ValueError(f"{name} needs a CUDA device and Triton; {remedy}")


def adds_in_order(target: Tensor) -> bool:
    """Returns whether index_add_ adds rows one after another. On an accelerator it uses atomic additions."""
    return target.is_cpu


def elements_at_a_time(array: Tensor, in_host_memory: int) -> int:
    """Returns how many elements an operation in torch works on at a time.

    In host memory this is the operation's own number, small enough for a core's cache.
    """
    return in_host_memory if array.is_cpu else ELEMENTS_ON_DEVICE


def product_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype that a product with x has under the current autocast."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def without_autocast(x: Tensor) -> torch.autocast:
    """Returns a context in which operations on the device of x keep the dtypes of their arguments."""
    return torch.autocast(x.device.type, enabled=False)
