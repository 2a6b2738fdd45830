"""A kernel that reads pinned host memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nestpipe.kernels.launch import launch

_SIZE = 1024
"""words of a program: few enough that a list of some thousand has several programs, which wait for the link together"""


@triton.jit(do_not_specialize=["num_words"])
def fetch_kernel(source, target, num_words, SIZE: tl.constexpr):
    words = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = words < num_words
    tl.store(target + words, tl.load(source + words, mask=inside), mask=inside)


def fetch(source: Tensor, target: Tensor) -> None:
    """All of source, int32 or int64 and contiguous, to target of the same shape."""
    words = source.view(-1).view(torch.int32)
    launch(fetch_kernel, -(-len(words) // _SIZE), words, target.view(-1).view(torch.int32), len(words), SIZE=_SIZE)
