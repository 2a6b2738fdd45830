"""Inputs for the kernels of attention, which run on CUDA or else in Triton's interpreter."""

import numpy as np
import pytest
import torch
from torch import Tensor

from nestpipe.ops.sequences import Sequences

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def import_triton() -> None:
    """Imports Triton, which interprets its own functions only if TRITON_INTERPRET is set at the first import."""
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE.type == "cpu":
            patch.setenv("TRITON_INTERPRET", "1")
        pytest.importorskip("triton", reason="the kernels need Triton")


def repair_interpreter(patch: pytest.MonkeyPatch) -> None:
    """Works around two bugs of the interpreter of Triton 3.6.

    Loops with bounds from memory fail under numpy 2.4, and products of bfloat16 take the bits for numbers.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    patch_tensor, create_dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patched(tensor, scope) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def as_float(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def dot(self, a, b, *others):
        return create_dot(self, as_float(a), as_float(b), *others)

    patch.setattr(interpreter, "_patch_lang_tensor", patched)
    patch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        repair_interpreter(monkeypatch)


def make_sequences(lengths: list[int], max_length: int, device: torch.device = DEVICE) -> Sequences:
    """Makes times with gaps of seconds and clocks set back: few buckets, since the interpreter is slow for each."""
    generator = torch.Generator().manual_seed(max_length)
    counts = torch.tensor(lengths, dtype=torch.int64)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    times = torch.randint(4, (len(lengths), max_length + 1), generator=generator).cumsum(1)
    times[:, 1:] -= torch.randint(3, (len(lengths), max_length), generator=generator)
    return Sequences(offsets.to(device), times.to(device), lengths)


def make_arrays(num_tokens: int, max_length: int, heads: int, dim_qk: int, dim_v: int) -> dict[str, Tensor]:
    """Makes arrays in float64 on the CPU. All values except the weights are exact in bfloat16."""
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = {"q": dim_qk, "k": dim_qk, "v": dim_v}
    arrays = {
        name: torch.randn(num_tokens, heads, dim, generator=generator).bfloat16().double()
        for name, dim in shapes.items()
    }
    weights = {"w_pos": 2 * max_length - 1, "w_ts": 129}
    return arrays | {name: torch.randn(n, generator=generator).double() for name, n in weights.items()}
