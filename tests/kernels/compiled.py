"""Prints, as JSON, the machine code of each kernel for an H100 or H200, as the product would launch it.

This needs no accelerator. It runs in a separate process, where Triton does not interpret.
"""

import json
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from nestpipe.kernels.attention.tiles import Tiles
from nestpipe.kernels.keys import triton_runs
from nestpipe.kernels.keys.runs import Blocks, Runs, SortedKeys
from nestpipe.kernels.rows import triton_copy, triton_pieces, triton_segments, triton_updates
from nestpipe.kernels.softmax import triton_sampled_softmax
from nestpipe.kernels.softmax.sampled_softmax import Work

TYPES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
    torch.uint8: "*u8",
}
codes: dict[str, str] = {}


def type_of(argument: Any) -> str:
    if isinstance(argument, Tensor):
        return TYPES[argument.dtype]
    return {int: "i32", float: "fp64", type(None): "constexpr"}[type(argument)]


def compile_only(kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> None:
    """Compiles a kernel as a launch does, without launching it."""
    options = {name: constants.pop(name) for name in ("num_warps", "enable_fp_fusion") if name in constants}
    names = kernel.arg_names
    values = dict(zip(names, arguments, strict=False)) | constants
    signature = {name: "constexpr" if name in constants else type_of(values[name]) for name in names}
    constexprs = {(i,): values[name] for i, name in enumerate(names) if signature[name] == "constexpr"}
    aligned = [isinstance(values[name], Tensor) and values[name].data_ptr() % 16 == 0 for name in names]
    attributes = {(i,): [["tt.divisibility", 16]] for i, is_aligned in enumerate(aligned) if is_aligned}
    source = ASTSource(kernel, signature, constexprs, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with_slots = "with slots " if isinstance(values.get("slots"), Tensor) else ""
    in_groups = "in groups " if kernel.__name__ == "sum_kernel" and values["SIZE"] is not None else ""
    codes[f"{kernel.__name__} {with_slots}{in_groups}{signature[names[0]]}"] = compiled.asm["ptx"]


JITFunction.run = compile_only
places, mask = torch.arange(8), torch.tensor(False)
for dtype in (torch.float32, torch.float64):
    records, gradient = torch.zeros(8, 400, dtype=dtype), torch.zeros(8, 100, dtype=dtype)
    rows, state, both = records[:, :100], records[:, 100:200], records[:, 100:300]
    entries = gradient, places, gradient[0], places, (places, places), rows, 8
    triton_segments.sum_runs(*entries, (1, 128), None)
    triton_segments.sum_runs(*entries, (0, None), (26, 27))
    triton_updates.adam(rows, both, gradient, None, mask, 0.9, 0.99, 0.1, 1e-8)
    triton_updates.rowwise_adagrad(rows, state[:, :1], gradient, None, mask, 0.1, 1e-8)
    if dtype == torch.float32:
        triton_copy.copy_rows(rows, places, gradient, places, 8)
        triton_copy.add_rows(rows, places, gradient, places > 3, 1e38, places.int()[:1])
        triton_updates.sgd(rows, gradient, None, mask, 0.1)
        triton_updates.adagrad(rows, state, gradient, None, mask, 0.1, 1e-8)
        triton_updates.adagrad(rows, state, gradient, places, mask, 0.1, 1e-8)
        triton_updates.rowwise_adagrad(rows, state[:, :1], gradient, places, mask, 0.1, 1e-8)
tiles = Tiles([2], torch.zeros(1, 4, dtype=torch.int64), places, 64)
for dtype in (torch.float32, torch.bfloat16):
    values = torch.zeros(2, 100, dtype=dtype), *(torch.zeros(n, 100) for n in (2, 1, 132))
    work = Work(values, (places, places, places), tiles, 20.0, 132, 100, 64, torch.zeros(4, 64), gradient)
    x, unit_negatives, products = torch.zeros(1, 64, 100), torch.zeros(1, 132, 100), torch.zeros(1, 64, 132)
    triton_sampled_softmax.place(work, 0, 1, x, unit_negatives)
triton_sampled_softmax.softmax(work, 0, 1, products)
triton_sampled_softmax.gradients(work, 0, 1, x, x, unit_negatives)
keys, marks = SortedKeys(places, places, places.short(), places, 3), Runs(places, places.int(), places.int())
triton_runs.mark_runs(keys, marks)
triton_runs.number_runs(keys, marks, marks.is_start, marks.is_start, places, places, places)
triton_runs.describe(places, places, Blocks(*(torch.arange(n) for n in (8, 7, 7, 7, 7))), places, places)
triton_pieces.count_pieces(places, places, 128, places)
triton_pieces.find_pieces(places, places, torch.arange(9), 128, torch.stack([places, places]))
print(json.dumps(codes))
