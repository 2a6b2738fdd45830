"""Launches kernels in Triton at a fraction of Triton's own cost in Python.

At every launch Triton inspects every argument to choose a compiled form. That takes 30 to 100 us for the many arguments
of our kernels, and a micro-batch has a hundred launches, which delay the thread on which the device depends. Here the
choice is cached for all arguments that look alike to Triton.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 16
"""Triton compiles a special form for addresses (in bytes) and numbers that are multiples of this."""
LARGEST_INT32 = 2**31 - 1

_compiled: dict[tuple[Any, ...], Any] = {}


def launch(kernel: Any, num_programs: int, *arguments: Any, **named: Any) -> None:
    """Launches a kernel on the device of the first tensor, in its current stream.

    If all tensors are in host memory, the kernel runs in the interpreter. named: further arguments that are numbers,
    constants, and options of the compiler.
    """
    device = next((a.device for a in arguments if isinstance(a, Tensor) and a.is_cuda), None)
    if device is None:
        kernel[(num_programs,)](*arguments, **named)
        return
    is_current = device.index == torch.cuda.current_device()
    with nullcontext() if is_current else torch.cuda.device(device):
        key = (id(kernel), device.index, *map(_specialization, arguments), *named.items())
        compiled = _compiled.get(key)
        if compiled is None:
            _compiled[key] = kernel[(num_programs,)](*arguments, **named)
        else:
            rest = (named.get(name) for name in kernel.arg_names[len(arguments) :])
            compiled[(num_programs, 1, 1)](*arguments, *rest)


def _specialization(argument: Any) -> Any:
    """Returns everything about an argument that Triton's choice of a compiled form depends on."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % ALIGNMENT == 0
    if type(argument) is int:
        return argument == 1, argument % ALIGNMENT == 0, -LARGEST_INT32 - 1 <= argument <= LARGEST_INT32
    return type(argument)
