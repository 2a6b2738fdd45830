"""Which of the two forms runs: the kernels in Triton, or the reference in torch."""

import os
from importlib.util import find_spec

from torch import Tensor

HAS_TRITON = find_spec("triton") is not None


def runs_triton(*arrays: Tensor) -> bool:
    """On CUDA where Triton is installed; on a CPU only if Triton's interpreter is asked for, with TRITON_INTERPRET=1.

    Triton reads that variable when a kernel is defined. So modules with kernels are imported where they are first used,
    never by `import nestpipe`.
    """
    if any(array.is_cuda for array in arrays):
        return HAS_TRITON
    return HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1" and arrays[0].device.type == "cpu"
