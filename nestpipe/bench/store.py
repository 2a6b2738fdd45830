"""`bench store`: the host store against torch's operations by position, on a tensor with the same page advice."""

import mmap
import statistics
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from nestpipe.bench.harness.benchmark import Benchmark
from nestpipe.bench.harness.keys import zipf_ranks
from nestpipe.bench.harness.memory import in_fresh_process
from nestpipe.bench.harness.pairs import compare
from nestpipe.bench.harness.report import Record
from nestpipe.store import HostStore, TableSpec, group_by_owner, unique
from nestpipe.store.process_memory import peak_bytes, reset_peak, resident_bytes

SEED = 1
NUM_PAIRS = 25
KEYS_A_CALL = 200_000
TABLE = "item"
MEGA = 1_000_000


def records(quick: bool) -> Iterator[Record]:
    scale = 50 if quick else 1
    num_pairs = 3 if quick else NUM_PAIRS
    for dim, ranks in ((64, 1), (128, 1), (64, 8)):
        yield from _gather_and_scatter(4 * MEGA // scale, dim, ranks, KEYS_A_CALL // scale, num_pairs)
    for name, keys in (("zipf_1.05", spread_zipf_keys(MEGA // scale)), ("random", random_keys(MEGA // scale))):
        for threads in (1, 2):
            yield _unique(name, keys, threads, num_pairs)
    yield _growth(MEGA // scale, 20 * MEGA // scale, 32, KEYS_A_CALL // scale, num_pairs)
    yield in_fresh_process(_overhead, MEGA // scale, 16)


BENCHMARK = Benchmark(
    "store", records, "The host store against torch: gather, scatter, unique, memory per row, and growth."
)


def random_keys(num_keys: int) -> Tensor:
    generator = np.random.default_rng(SEED)
    return torch.from_numpy(generator.integers(-(2**63), 2**63, num_keys, dtype=np.int64))


def owned_keys(num_keys: int, ranks: int) -> Tensor:
    """Returns random keys that the last rank owns."""
    if ranks == 1:
        return random_keys(num_keys)
    keys = random_keys(num_keys * ranks * 21 // 20)
    order, counts = group_by_owner(TABLE, keys, ranks)
    return keys[order[-int(counts[-1]) :]][:num_keys].contiguous()


def spread_zipf_keys(num_keys: int) -> Tensor:
    """Returns Zipf-distributed keys, spread over all int64 values."""
    drawn = zipf_ranks(10 * MEGA, num_keys, np.random.default_rng(SEED))
    return torch.from_numpy(drawn * 0x9E3779B97F4A7C1)


def _huge_page_tensor(num_rows: int, dim: int) -> Tensor:
    """Returns a float32 tensor with the page advice that the store gives its own memory. Every page is touched."""
    memory = mmap.mmap(-1, num_rows * dim * 4)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32).view(num_rows, dim).fill_(1.0)


class _Both:
    """The same rows in a store and in a tensor: those of `keys[i]` are row i of the tensor.

    With several ranks, one of them owns all keys.
    """

    def __init__(self, num_rows: int, dim: int, keys_a_call: int, ranks: int = 1) -> None:
        self.generator = np.random.default_rng(SEED)
        self.keys = owned_keys(num_rows, ranks)
        self.rows = _huge_page_tensor(num_rows, dim)
        self.store = HostStore(num_threads=2)
        self.store.create_table(TableSpec(TABLE, dim))
        for first in range(0, num_rows, 500_000):
            piece = slice(first, first + 500_000)
            self.store.scatter(TABLE, self.keys[piece], self.rows[piece], step=0)
        self.out = torch.zeros(keys_a_call, dim)
        self.draw_distinct()

    def use_threads(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self.store.num_threads = threads

    def draw(self) -> None:
        """Draws random positions, with repeats."""
        self.positions = torch.from_numpy(self.generator.integers(len(self.keys), size=len(self.out)))
        self.call_keys = self.keys[self.positions]

    def draw_distinct(self) -> None:
        drawn = self.generator.choice(len(self.keys), len(self.out), replace=False, shuffle=True)
        self.positions = torch.from_numpy(drawn)
        self.call_keys = self.keys[self.positions]

    def gather(self) -> None:
        self.store.gather(TABLE, self.call_keys, out=self.out)

    def index_select(self) -> None:
        torch.index_select(self.rows, 0, self.positions, out=self.out)

    def scatter(self) -> None:
        self.store.scatter(TABLE, self.call_keys, self.out, step=1)

    def index_copy(self) -> None:
        self.rows.index_copy_(0, self.positions, self.out)


def _gather_and_scatter(num_rows: int, dim: int, ranks: int, keys_a_call: int, num_pairs: int) -> Iterator[Record]:
    both = _Both(num_rows, dim, keys_a_call, ranks)
    for threads in (1, 2):
        both.use_threads(threads)
        gather = compare(both.gather, both.index_select, num_pairs, prepare=both.draw)
        scatter = compare(both.scatter, both.index_copy, num_pairs, prepare=both.draw_distinct)
        yield {
            "dim": dim,
            "threads": threads,
            "ranks": ranks,
            "num_rows": num_rows,
            "num_pairs": num_pairs,
            "seed": SEED,
            **gather.fields("gather_vs_index_select"),
            "gather_ns_per_row": _ns_per_row(gather.ours, keys_a_call),
            **scatter.fields("scatter_vs_index_copy"),
            "scatter_ns_per_row": _ns_per_row(scatter.ours, keys_a_call),
        }


def _unique(name: str, keys: Tensor, threads: int, num_pairs: int) -> Record:
    torch.set_num_threads(threads)
    out = torch.zeros_like(keys), torch.zeros_like(keys)
    comparison = compare(
        lambda: unique(keys, threads, out),
        lambda: torch.unique(keys, return_inverse=True),
        num_pairs,
    )
    return {
        "method": name,
        "threads": threads,
        "num_keys": len(keys),
        "num_pairs": num_pairs,
        "seed": SEED,
        **comparison.fields("unique_vs_torch"),
        "unique_ms": statistics.median(comparison.ours) * 1e3,
        "torch_unique_ms": statistics.median(comparison.baseline) * 1e3,
    }


def _growth(few_rows: int, many_rows: int, dim: int, keys_a_call: int, num_pairs: int) -> Record:
    """Compares how much gather and index_select slow down if the table is twenty times larger."""
    few, many = _Both(few_rows, dim, keys_a_call), _Both(many_rows, dim, keys_a_call)
    few.use_threads(1)
    many.use_threads(1)
    at_few = compare(few.gather, few.index_select, num_pairs, prepare=few.draw)
    at_many = compare(many.gather, many.index_select, num_pairs, prepare=many.draw)
    gather = statistics.median(at_many.ours) / statistics.median(at_few.ours)
    index_select = statistics.median(at_many.baseline) / statistics.median(at_few.baseline)
    return {
        "dim": dim,
        "threads": 1,
        "num_rows": many_rows,
        "num_pairs": num_pairs,
        "seed": SEED,
        "growth_slowdown": gather / index_select,
        "gather_many_vs_few": gather,
        "index_select_many_vs_few": index_select,
    }


def _overhead(step_rows: int, num_steps: int, dim: int = 16) -> Record:
    """Measures resident bytes per row beyond row and state: the mean over 1, 2, ... num_steps times step_rows rows."""
    keys, rows = random_keys(step_rows * num_steps), torch.ones(step_rows, dim)
    store = HostStore(num_threads=2)
    store.create_table(TableSpec(TABLE, dim))
    before = resident_bytes()
    overheads, transients = [], []
    for step in range(num_steps):
        reset_peak()
        piece = keys[step * step_rows : (step + 1) * step_rows]
        store.scatter(TABLE, piece, rows, step=0)
        num_rows = (step + 1) * step_rows
        now = resident_bytes()
        overheads.append((now - before - num_rows * dim * 4) / num_rows)
        transients.append((peak_bytes() - now) / num_rows)
    return {
        "dim": dim,
        "threads": 2,
        "num_rows": step_rows * num_steps,
        "seed": SEED,
        "overhead_bytes_per_row": statistics.mean(overheads),
        "overhead_bytes_per_row_most": max(overheads),
        "transient_peak_bytes_per_row": max(transients),
    }


def _ns_per_row(seconds: list[float], num_rows: int) -> float:
    return statistics.median(seconds) / num_rows * 1e9
