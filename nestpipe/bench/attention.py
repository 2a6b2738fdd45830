"""`bench attention`: the blocked form of attention against the plain one, forward and backward.

Memory is the peak growth of resident memory in a fresh process. A first run on a short sequence loads what any run
needs, and the inputs exist before; outputs and gradients count. The figure is the median of several processes, because
the allocator behaves differently in each. Time is measured in pairs, both forms in one process. All lengths have the
same number of tokens, in sequences of full length.
"""

import statistics
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from nestpipe.bench.harness.benchmark import Benchmark
from nestpipe.bench.harness.memory import in_fresh_process
from nestpipe.bench.harness.pairs import compare, spread
from nestpipe.bench.harness.report import Record
from nestpipe.ops.attention import fuxi_attention, hstu_attention
from nestpipe.ops.sequences import BLOCK, NUM_TIME_BUCKETS, Sequences
from nestpipe.store.process_memory import peak_bytes, reset_peak, resident_bytes

SEED = 1
NUM_TOKENS = 4096
LENGTHS = (512, 1024, 2048)
NUM_HEADS, DIM_QK, DIM_V = 4, 32, 32
NUM_PAIRS = 15
NUM_PROCESSES = 5
"""Processes that measure memory."""
LARGEST_GAP_SECONDS = 100_000
FORMS = ("blocked", "plain")
OPS = {"hstu": hstu_attention, "fuxi": fuxi_attention}


def records(quick: bool) -> Iterator[Record]:
    """Yields a record per method, length and form. A quick run has fewer: a fresh process takes seconds to start."""
    scale, num_pairs = (8, 2) if quick else (1, NUM_PAIRS)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for method in ("hstu",) if quick else OPS:
        yield from _records_of(method, (LENGTHS[0], LENGTHS[-1]) if quick else LENGTHS, scale, num_pairs)


BENCHMARK = Benchmark(
    "attention", records, "The blocked form of attention against the plain one: memory per token by length, and time."
)


def _records_of(method: str, lengths: tuple[int, ...], scale: int, num_pairs: int) -> Iterator[Record]:
    num_tokens = NUM_TOKENS // scale
    per_token: dict[tuple[str, int], float] = {}
    for length in lengths:
        times = _milliseconds(method, length // scale, num_tokens, num_pairs)
        for form in FORMS:
            work = (method, form, length // scale, num_tokens)
            peaks = [in_fresh_process(_peak_bytes, *work) for _ in range(NUM_PROCESSES if scale == 1 else 1)]
            peak = spread("peak_bytes_per_token", [peak / num_tokens for peak in peaks])
            per_token[form, length] = peak["peak_bytes_per_token"]
            yield {
                **_identity(*work, num_pairs),
                **peak,
                **(_growth(per_token, length) if form == "blocked" else {}),
                **times[form],
            }


def _identity(method: str, form: str, length: int, num_tokens: int, num_pairs: int) -> Record:
    return {
        "method": method,
        "form": form,
        "length": length,
        "num_tokens": num_tokens,
        "num_heads": NUM_HEADS,
        "dim_qk": DIM_QK,
        "dim_v": DIM_V,
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        "deterministic": True,
        "num_pairs": num_pairs,
        "seed": SEED,
    }


def _growth(per_token: dict[tuple[str, int], float], length: int) -> Record:
    """Compares the memory per token of the longest sequences with that of the shortest."""
    if length != LENGTHS[-1]:
        return {}
    return {"peak_bytes_per_token_vs_512": per_token["blocked", length] / per_token["blocked", LENGTHS[0]]}


class _Work:
    """Forward and backward of one form, on inputs that exist before."""

    def __init__(self, method: str, length: int, num_tokens: int) -> None:
        generator = torch.Generator().manual_seed(SEED)
        num_samples = num_tokens // length
        gaps = torch.randint(LARGEST_GAP_SECONDS, (num_samples, length + 1), generator=generator)
        self.offsets, self.times = torch.arange(num_samples + 1) * length, gaps.cumsum(1)
        self.op: Callable[..., Tensor] = OPS[method]
        dims = (DIM_QK, DIM_QK, DIM_V)
        shapes = [*((num_tokens, NUM_HEADS, dim) for dim in dims), (2 * length - 1,), (NUM_TIME_BUCKETS,)]
        self.arguments = [torch.randn(shape, generator=generator).mul_(0.1).requires_grad_() for shape in shapes]
        width = DIM_V if method == "hstu" else 3 * DIM_V
        self.gradient = torch.randn(num_tokens, NUM_HEADS, width, generator=generator)

    def __call__(self, form: str) -> None:
        for argument in self.arguments:
            argument.grad = None
        self.op(*self.arguments, Sequences(self.offsets, self.times), form).backward(self.gradient)


def _peak_bytes(method: str, form: str, length: int, num_tokens: int) -> int:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    _Work(method, BLOCK, BLOCK)(form)
    work = _Work(method, length, num_tokens)
    before = resident_bytes()
    reset_peak()
    work(form)
    return peak_bytes() - before


def _milliseconds(method: str, length: int, num_tokens: int, num_pairs: int) -> dict[str, Record]:
    """Returns the fields of time for each form. The blocked form's speed is the median of the pairs."""
    work = _Work(method, length, num_tokens)
    comparison = compare(lambda: work("blocked"), lambda: work("plain"), num_pairs)
    return {
        "plain": {"forward_backward_ms": statistics.median(comparison.baseline) * 1e3},
        "blocked": {
            "forward_backward_ms": statistics.median(comparison.ours) * 1e3,
            **comparison.fields("speed_vs_plain"),
        },
    }
