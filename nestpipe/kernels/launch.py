"""Launches of kernels in Triton, at a fraction of what the launch itself costs in Python.

Triton looks at every argument of every launch to find out which compiled form fits, 30 to 100 us for the many arguments
of our kernels; a micro-batch has a hundred launches, and they delay the thread on which the device depends. Here the
question is put once for all arguments that look alike, and asked again from what was found.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 16
"""bytes, and elements: what Triton compiles for, where an address or a number is a multiple of it"""
LARGEST_INT32 = 2**31 - 1

_compiled: dict[tuple[Any, ...], Any] = {}


def launch(kernel: Any, num_programs: int, *arguments: Any, **named: Any) -> None:
    """On the device of the first tensor, on its current stream; of tensors in host memory, in the interpreter.

    named: further arguments, numbers all, constants and options of the compiler.
    """
    device = next((a.device for a in arguments if isinstance(a, Tensor) and a.is_cuda), None)
    if device is None:
        kernel[(num_programs,)](*arguments, **named)
        return
    here = device.index == torch.cuda.current_device()
    with nullcontext() if here else torch.cuda.device(device):
        key = (id(kernel), device.index, *map(_looks, arguments), *named.items())
        compiled = _compiled.get(key)
        if compiled is None:
            _compiled[key] = kernel[(num_programs,)](*arguments, **named)
        else:
            rest = (named.get(name) for name in kernel.arg_names[len(arguments) :])
            compiled[(num_programs, 1, 1)](*arguments, *rest)


def _looks(argument: Any) -> Any:
    """All that Triton's choice depends on."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % ALIGNMENT == 0
    if type(argument) is int:
        return argument == 1, argument % ALIGNMENT == 0, -LARGEST_INT32 - 1 <= argument <= LARGEST_INT32
    return type(argument)
