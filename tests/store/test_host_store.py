"""The native store: refused calls change nothing; threads, forks and memory."""

import copy
import multiprocessing
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from nestpipe.store import HostStore, Piece, TableFullError, TableSpec, group_by_owner, init
from nestpipe.store.interface import check_array
from nestpipe.store.native import library
from nestpipe.store.process_memory import resident_bytes
from tests.forked import run_forked


@pytest.fixture
def store() -> HostStore:
    store = HostStore(num_threads=2)
    store.create_table(TableSpec("item", 4, 2, (0.1, 0.2), init=init.Normal(0.02)))
    store.scatter("item", torch.arange(10), torch.ones(10, 6), step=1)
    return store


KEYS = torch.arange(3)
RECORDS = torch.ones(3, 6)
WIDE = torch.ones(3, 9)
ITEM = ["item"], torch.tensor([0, 3])
OVERLAPPING = torch.ones(20).as_strided((3, 6), (5, 1))
MISALIGNED = torch.frombuffer(bytearray(25), dtype=torch.int64, offset=1)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda s: s.create_table(TableSpec("item", 4)), ValueError, "already has a table 'item'"),
        (lambda s: s.size("itm"), ValueError, "there is no table 'itm' in the store; it has ['item']"),
        (lambda s: s.scatter("item", KEYS.int(), RECORDS, 0), TypeError, "keys must be torch.int64, got torch.int32"),
        (lambda s: s.scatter("item", KEYS.tolist(), RECORDS, 0), TypeError, "must be a torch.Tensor, got list"),
        (lambda s: s.scatter("item", KEYS.view(1, 3), RECORDS, 0), ValueError, "must have shape [n], got [1, 3]"),
        (lambda s: s.scatter("item", torch.arange(6)[::2], RECORDS, 0), ValueError, "must be contiguous"),
        (lambda s: s.scatter("item", KEYS, RECORDS.double(), 0), TypeError, "must be torch.float32"),
        (lambda s: s.scatter("item", KEYS, RECORDS[:, :4], 0), ValueError, "must have shape [3, 6], got [3, 4]"),
        (lambda s: s.scatter("item", KEYS, RECORDS[:2], 0), ValueError, "must have shape [3, 6], got [2, 6]"),
        (lambda s: s.scatter("item", KEYS, RECORDS, -1), ValueError, "step is -1"),
        (lambda s: s.gather("item", KEYS, out=torch.empty(3, 4)), ValueError, "shape [3, 6], got [3, 4]"),
        (lambda s: s.gather("item", KEYS.to("meta")), ValueError, "must be in host memory"),
        (lambda s: s.count("item", 3, 2), ValueError, "not a range within 0 .. 65536"),
        (lambda s: s.export_piece("item", -1, 2), ValueError, "first_bucket is -1"),
        (lambda s: s.count("item", 0.0, 5), TypeError, "first_bucket must be an integer, got 0.0"),
        (lambda s: s.import_piece("item", 0, 1, Piece(KEYS, RECORDS, KEYS)), ValueError, "outside [0, 1)"),
        (lambda s: s.import_piece("item", 0, 65536, Piece(KEYS, RECORDS, -KEYS - 1)), ValueError, "is negative"),
        (lambda s: s.reserve("item", 2**33), ValueError, "reserve in table 'item': num_rows is 8589934592"),
        (lambda s: s.reserve("item", 2**64 + 5), ValueError, "must be 0 .. 4294967294"),
        (lambda s: s.reserve("item", -1), ValueError, "num_rows is -1"),
        (lambda s: s.scatter("item", KEYS, RECORDS, 1.5), TypeError, "step must be an integer, got 1.5"),
        (lambda s: s.scatter("item", KEYS, RECORDS, True), TypeError, "step must be an integer, got True"),
        (lambda s: s.scatter("item", KEYS, torch._neg_view(RECORDS), 0), ValueError, "contiguous and dense"),
        (lambda s: s.gather("item", KEYS, out=RECORDS.clone().requires_grad_()), ValueError, "require a gradient"),
        (lambda s: s.gather("item", MISALIGNED), ValueError, "aligned in memory"),
        (lambda s: s.gather("item", KEYS, out=WIDE[:, :6]), ValueError, "must be contiguous"),
        (lambda s: s.scatter("item", KEYS, WIDE[:, :6], 0), ValueError, "must be contiguous"),
        (lambda s: s.scatter_tables(*ITEM, KEYS, OVERLAPPING, KEYS, 0), ValueError, "must be contiguous"),
        (
            lambda s: s.scatter_tables(*ITEM, KEYS, torch.ones(6).expand(3, 6), KEYS, 0),
            ValueError,
            "must be contiguous",
        ),
        (lambda s: s.scatter_tables(*ITEM, KEYS, torch.ones(6, 3).T, KEYS, 0), ValueError, "must be contiguous"),
        (lambda s: s.scatter_tables(*ITEM, KEYS, torch.ones(3, 12)[:, ::2], None, 0), ValueError, "must be contiguous"),
        (lambda s: s.scatter_tables(*ITEM, KEYS, torch._neg_view(WIDE)[:, :6], None, 0), ValueError, "and dense"),
        (lambda s: s.scatter_tables(*ITEM, KEYS, WIDE, KEYS, 0), ValueError, "shape [n, 6], got [3, 9]"),
        (lambda s: s.scatter_tables(*ITEM, KEYS, WIDE[:, :5], KEYS, 0), ValueError, "shape [n, 6], got [3, 5]"),
        (lambda s: s.scatter_tables(*ITEM, KEYS, WIDE[:2, :6], None, 0), ValueError, "shape [3, 6], got [2, 6]"),
        (lambda s: s.scatter_tables(*ITEM, KEYS, WIDE[:2, :6], KEYS, 0), ValueError, "places[2] is 2, outside"),
        (lambda s: s.scatter_tables(*ITEM, KEYS, WIDE[:, :6], KEYS - 1, 0), ValueError, "places[0] is -1, outside"),
        (lambda s: s.scatter_tables(*ITEM, KEYS, WIDE[:0, :6], KEYS, 0), ValueError, "outside of an array of 0"),
        (lambda s: s.scatter_tables(*ITEM, KEYS, WIDE[:, :6], KEYS[:2], 0), ValueError, "shape [3], got [2]"),
        (lambda s: s.scatter_tables(*ITEM, KEYS, WIDE[:, :6], None, -1), ValueError, "step is -1"),
        (lambda s: s.scatter_tables(*ITEM, KEYS, RECORDS, None, KEYS - 1), ValueError, "steps[0] is -1, must be >= 0"),
        (lambda s: s.scatter_tables(*ITEM, KEYS, RECORDS, None, KEYS[:2]), ValueError, "step must have shape [3]"),
        (lambda s: s.scatter_tables(*ITEM, KEYS, RECORDS, None, KEYS.int()), TypeError, "step must be torch.int64"),
        (lambda s: s.gather_tables(*ITEM, KEYS, OVERLAPPING, None), ValueError, "must be contiguous"),
        (lambda s: s.gather_tables(*ITEM, KEYS, WIDE[:, :6], KEYS + 1), ValueError, "places[2] is 3, outside"),
        (lambda s: s.gather_tables(*ITEM, KEYS, WIDE[:, :6], None, KEYS), TypeError, "found must be torch.bool"),
        (lambda s: s.gather_tables(*ITEM, KEYS, WIDE[:, :6], None, KEYS[:2] > 0), ValueError, "shape [3], got [2]"),
        (lambda s: s.gather_tables(*ITEM, KEYS, WIDE.clone().requires_grad_()[:, :6], None), ValueError, "a gradient"),
        (lambda s: copy.copy(s), TypeError, "cannot be copied or pickled"),
        (lambda s: HostStore(1.5), TypeError, "num_threads must be an integer"),
        (lambda s: HostStore(num_threads=0), ValueError, "num_threads is 0"),
        (lambda s: TableSpec("", 4), ValueError, "must not be empty"),
        (lambda s: TableSpec("t", 0), ValueError, "dim is 0"),
        (lambda s: TableSpec("t", 4, 2, (1.0,)), ValueError, "1 initial_state values for state_width 2"),
        (lambda s: TableSpec("t", 4, dtype=torch.float16), ValueError, "must be torch.float32 or torch.float64"),
        (lambda s: TableSpec("t", 4, init=init.Normal(-1.0)), ValueError, "needs std >= 0"),
        (lambda s: TableSpec("t", 4, init=init.Uniform(1.0, 0.0)), ValueError, "needs low <= high"),
        (lambda s: TableSpec("t", 4, init=init.Uniform(-1.7e308, 1.7e308)), ValueError, "a finite difference"),
        (lambda s: TableSpec("t", 4, 1, (float("inf"),)), ValueError, "initial_state has a value that is not finite"),
        (lambda s: TableSpec("t", 2.0), TypeError, "dim must be an integer, got 2.0"),
        (lambda s: TableSpec("t", 4, max_rows=2**64 + 1), ValueError, "max_rows is"),
        (lambda s: TableSpec("a\0b", 4), ValueError, "NUL character"),
        (lambda s: TableSpec("t", 4, init=init.Constant(float("nan"))), ValueError, "not finite"),
        (lambda s: TableSpec("t", 4, seed=-1), ValueError, "seed is -1"),
        (lambda s: TableSpec("t", 4, max_rows=0), ValueError, "max_rows is 0"),
    ],
)
def test_refused(store: HostStore, call, error: type[Exception], text: str) -> None:
    digest = store.digest_part("item")
    with pytest.raises(error) as raised:
        call(store)
    assert text in str(raised.value)
    assert store.digest_part("item") == digest
    assert store.size("item") == 10


def test_found_in_memory_given(store: HostStore) -> None:
    found, out = torch.tensor([True, True, True, False, False]), torch.zeros(3, 9)
    given = store.gather_tables(*ITEM, torch.tensor([11, 3, 12]), out[:, :6], None, found[1:4])
    assert found.tolist() == [True, False, True, False, False]
    assert given.data_ptr() == found[1:4].data_ptr()
    assert out[:, 6:].tolist() == [[0.0] * 3] * 3
    assert out[1, :6].tolist() == [1.0] * 6


TWO, STARTS = ("item", "user"), torch.tensor([0, 1, 3])


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda s: s.sizes(["item", "itm"]), ValueError, "there is no table 'itm'"),
        (lambda s: s.gather_tables((), STARTS[:1], KEYS[:0], RECORDS, KEYS[:0]), ValueError, "at least one name"),
        (lambda s: s.gather_tables("item", STARTS, KEYS, RECORDS, None), ValueError, "got 'item'"),
        (lambda s: s.gather_tables(TWO, STARTS[1:], KEYS, RECORDS, None), ValueError, "shape [3], got [2]"),
        (lambda s: s.gather_tables(TWO, STARTS.int(), KEYS, RECORDS, None), TypeError, "offsets must be torch.int64"),
        (lambda s: s.gather_tables(TWO, STARTS * 2, KEYS, RECORDS, None), ValueError, "do not rise from 0 to the numb"),
        (lambda s: s.gather_tables(TWO, STARTS, KEYS, RECORDS, None, KEYS), TypeError, "found must be torch.bool"),
        (lambda s: s.gather_tables(TWO, STARTS, KEYS, OVERLAPPING, None), ValueError, "must be contiguous"),
        (lambda s: s.scatter_tables(TWO, STARTS, KEYS, RECORDS, KEYS + 1, 0), ValueError, "places[2] is 3, outside"),
        (lambda s: s.scatter_tables(TWO, STARTS, KEYS, RECORDS, None, -1), ValueError, "step is -1"),
        (lambda s: s.scatter_tables(TWO, STARTS, KEYS, RECORDS, None, 1.5), TypeError, "step must be an integer"),
        (lambda s: s.scatter_tables(TWO, STARTS, KEYS, RECORDS.double(), None, 0), TypeError, "must be torch.float32"),
        (lambda s: s.scatter_tables(["item"] * 2, STARTS, KEYS, RECORDS, None, 0), ValueError, "'item' is given twice"),
        (
            lambda s: s.scatter_tables(("item", "wide"), STARTS, KEYS, RECORDS, None, 0),
            ValueError,
            "table 'item' has 6 columns of 4 bytes, table 'wide' has 7 columns of 4 bytes",
        ),
        (lambda s: s.find_tables(["user"] * 2, STARTS, KEYS), ValueError, "'user' is given twice"),
        (lambda s: s.scatter_tables(TWO, STARTS, KEYS, RECORDS, None, 0), TableFullError, "table 'user' is full"),
    ],
)
def test_several_tables_refused(store: HostStore, call, error: type[Exception], text: str) -> None:
    store.create_table(TableSpec("user", 5, 1, max_rows=1))
    store.create_table(TableSpec("wide", 5, 2))
    digest = store.digest_part("item")
    with pytest.raises(error) as raised:
        call(store)
    assert text in str(raised.value)
    assert store.digest_part("item") == digest
    assert store.sizes(["wide", "user", "item"]).tolist() == [0, 0, 10]


def test_one_row_of_any_stride(store: HostStore) -> None:
    """Fails if check_records_at returns records.stride(0): the stride of a single row is arbitrary."""
    store.scatter_tables(
        ["item"], torch.tensor([0, 1]), KEYS[:1], torch.full((6,), 3.0).as_strided((1, 6), (2**62, 1)), None, step=1
    )
    assert store.gather("item", KEYS[:1]).records.tolist() == [[3.0] * 6]


def test_full_table() -> None:
    store = HostStore(num_threads=2)
    store.create_table(TableSpec("item", 4, max_rows=100))
    store.scatter("item", torch.arange(90), torch.ones(90, 4), step=1)
    digest = store.digest_part("item")
    with pytest.raises(TableFullError, match="table 'item' is full: it may hold max_rows = 100 rows; raise max_rows"):
        store.scatter("item", torch.arange(50, 120), torch.zeros(70, 4), step=2)
    assert store.digest_part("item") == digest
    store.scatter("item", torch.arange(50, 100), torch.zeros(50, 4), step=2)
    assert store.size("item") == 100


OUT_OF_MEMORY = """
import resource, torch
from nestpipe.store import HostStore, TableSpec
store = HostStore(num_threads=2)
store.create_table(TableSpec("item", 256))
keys, records = torch.arange(400_000), torch.ones(400_000, 256)
store.scatter("item", keys[:1000], records[:1000], step=1)
digest = store.digest_part("item")
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 200 * 2**20,) * 2)
try:
    store.scatter("item", keys, records, step=2)
except MemoryError as error:
    print("refused:", error)
assert store.digest_part("item") == digest and store.size("item") == 1000
store.scatter("item", keys[:2000], records[:2000], step=3)
assert store.size("item") == 2000
print("still good")
"""


def test_out_of_memory_is_refused() -> None:
    """400 MB of rows in 200 MB of address space are refused. Nothing changes, and the store stays usable."""
    done = run_forked(exec, OUT_OF_MEMORY, {})
    assert done.returncode == 0, done.stderr
    assert "refused: out of memory: the system refused" in done.stdout
    assert "still good" in done.stdout


REFUSED_RESERVE = """
import resource, torch
from nestpipe.store import HostStore, TableSpec
store = HostStore()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 60 * 2**30,) * 2)
for name, dim in (("wide", 2**14), ("narrow", 1)):  # no room for the records; room for them, none for the index
    store.create_table(TableSpec(name, dim))
    store.scatter(name, torch.arange(10), torch.ones(10, dim), step=0)
    before = store.memory(name)
    try:
        store.reserve(name, 2**32 - 2)
    except MemoryError:
        assert store.memory(name) == before
        print(name, "refused")
"""


def test_refused_reserve_maps_nothing() -> None:
    """Fails if Table::reserve leaves the arena larger when there is no memory for the index."""
    done = run_forked(exec, REFUSED_RESERVE, {})
    assert done.stdout == "wide refused\nnarrow refused\n", done.stderr


EXIT_DURING_A_CALL = """
import threading, time, torch
from nestpipe.store import HostStore, TableSpec
from nestpipe.store.native.library import call
store = HostStore(num_threads=2)
store.create_table(TableSpec("item", 64))
keys = torch.arange(200_000)
store.scatter("item", keys, torch.ones(200_000, 64), step=0)
out = torch.empty(200_000, 64)
arguments = (*store._handle("item"), keys.data_ptr(), len(keys), 64, out.data_ptr(), out.nbytes, None, None, 2)
def read():  # no torch in here: its own frames do not survive a thread that is stopped at exit
    while True:
        call("gather", *arguments)
threading.Thread(target=read, daemon=True).start()
time.sleep(0.3)
"""


def test_exit_while_a_thread_is_in_a_call() -> None:
    """Fails, by a segmentation fault, if the store is destroyed at the interpreter's exit."""
    done = subprocess.run([sys.executable, "-c", EXIT_DURING_A_CALL], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_keys_of_one_owner() -> None:
    """A rank has only the keys of its buckets. Fails by a timeout if the index is ordered by the bits of the bucket."""
    keys = torch.arange(1_500_000)
    order, counts = group_by_owner("item", keys, 8)
    owned = keys[order.split(counts.tolist())[5]]
    store = HostStore()
    store.create_table(TableSpec("item", 4))
    store.scatter("item", owned, torch.ones(len(owned), 4), step=0)
    assert store.find("item", owned).all()
    imported = HostStore()
    imported.create_table(TableSpec("item", 4))
    for first in range(40_000, 50_000, 1000):  # bucket after bucket, as in a checkpoint
        imported.import_piece("item", first, first + 1000, store.export_piece("item", first, first + 1000))
    assert imported.size("item") == store.count("item", 40_000, 50_000) > 0


def test_export_during_writes(store: HostStore) -> None:
    """Fails if export_piece does not start again when rows were inserted after its count."""
    stop = threading.Event()

    def write() -> None:
        for first in range(0, 10**9, 50):
            if stop.is_set():
                return
            store.scatter("item", torch.arange(first, first + 50), torch.ones(50, 6), step=1)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        sizes: list[int] = []
        while len(sizes) < 30 or (sizes[-1] == sizes[0] and len(sizes) < 3000):  # the writer may start late
            sizes.append(len(store.export_piece("item", 0, 65536).keys))
    finally:
        stop.set()
        writer.join()
    assert sizes == sorted(sizes)
    assert sizes[-1] > sizes[0]


def test_results_do_not_depend_on_threads() -> None:
    keys, digests = torch.randint(50_000, (80_000,)), set()
    records = torch.randn(len(keys), 20)
    for num_threads in (1, 2, 5):
        store = HostStore(num_threads)
        store.create_table(TableSpec("item", 20))
        store.scatter("item", keys, records, step=0)
        digests.add(store.digest_part("item"))
    assert len(digests) == 1


def test_concurrent_threads(store: HostStore) -> None:
    """A reader sees either all of a write or nothing of it."""
    keys, failures = torch.arange(10_000), []

    def read() -> None:
        for _ in range(30):
            records = store.gather("item", keys).records
            if not torch.equal(records[10:], records[10:11].expand(9990, 6)):
                failures.append("torn read")

    store.scatter("item", keys, torch.zeros(10_000, 6), step=2)
    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for step in range(30):
        store.scatter("item", keys, torch.full((10_000, 6), float(step)), step=step)
    for reader in readers:
        reader.join()
    assert failures == []


def test_works_in_a_forked_child(store: HostStore) -> None:
    """The library's helper threads do not exist in a forked child, which must start its own.

    Fails without the pthread_atfork handler in parallel.cpp.
    """
    keys, records = torch.arange(50_000), torch.ones(50_000, 6)
    store.scatter("item", keys, records, step=5)
    expected = store.digest_part("item")
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()

    def work() -> None:
        digest = store.digest_part("item")
        results.put((digest, len(list(Path("/proc/self/task").iterdir()))))

    child = context.Process(target=work)
    child.start()
    child.join(timeout=20)
    alive = child.is_alive()
    child.kill()
    assert not alive
    assert results.get() == (expected, store.num_threads)


def test_memory_report(store: HostStore) -> None:
    store.scatter("item", torch.arange(5000), torch.ones(5000, 6), step=1)
    store.erase("item", torch.arange(1000))
    report = store.memory("item")
    assert (report.num_rows, report.record_bytes, report.payload_bytes) == (4000, 24, 96_000)
    assert report.metadata_bytes == 8 * 5000
    assert report.erased_bytes == 1000 * 24
    assert 12 * 5000 <= report.index_bytes <= 40 * 5000
    assert report.mapped_bytes >= report.payload_bytes + report.metadata_bytes + report.index_bytes


def test_small_tables_are_small() -> None:
    """Fails if the first block of an arena is advised to use huge pages from its start."""
    store = HostStore()
    before = resident_bytes()
    for number in range(200):
        store.create_table(TableSpec(f"table{number}", 16))
        store.scatter(f"table{number}", torch.arange(100), torch.ones(100, 16), step=0)
    assert (resident_bytes() - before) / 200 < 100_000  # bytes a table: a few pages for rows, steps and index


def test_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "ABI_VERSION", 999)
    with pytest.raises(ImportError, match="this package needs 999; run `make native` again"):
        library._load(library.LIBRARY)
    with pytest.raises(ImportError, match="has not been built; run `make native`"):
        library._load(library.LIBRARY.with_name("libmissing.so"))


def test_check_array_says_what_to_do() -> None:
    with pytest.raises(TypeError, match=r"convert with \.to\(torch\.int64\)"):
        check_array("keys", torch.zeros(3), torch.int64, [None])
