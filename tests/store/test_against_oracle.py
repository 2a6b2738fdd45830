"""The native store against the pure-Python one: the same results, errors and digest for any sequence of calls.

Fails, for example, if Index::erase does not move displaced rows back (drop its last loop), or if Table::write_records
writes `step` where it should write steps[i], or if HostStore.erase does not count as a write.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

from nestpipe.store import DictStore, HostStore, Piece, Store, TableSpec, init
from tests.streams import key_streams

KEYS = st.one_of(
    st.integers(0, 40),
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from([-(2**63), 2**63 - 1, -1, 0]),
)
KEY_LISTS = st.lists(KEYS, max_size=60)
SPECS = st.builds(
    TableSpec,
    name=st.sampled_from(["item", "a", "größe"]),
    dim=st.integers(1, 20),
    state_width=st.just(2),
    initial_state=st.just((0.1, -3.0)),
    init=st.sampled_from(
        [init.Constant(0.5), init.Uniform(-1, 2), init.Normal(0.02, 1.0), init.TruncatedNormal(3.0)],
    ),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 2**64 - 1),
    max_rows=st.sampled_from([None, 25, 80]),
)
BUCKETS = st.tuples(st.integers(0, 65536), st.integers(0, 65536)).map(lambda pair: (min(pair), max(pair)))


def outcome(store: Store, name: str, *arguments: Any, **keywords: Any) -> Any:
    """Returns the result of a call, or the type of the error that it raised."""
    try:
        return getattr(store, name)(*arguments, **keywords)
    except (ValueError, TypeError, RuntimeError) as error:
        return type(error)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, tuple):
        return isinstance(b, tuple) and all(map(same, a, b))
    return bool(a == b)


class TwoStores(RuleBasedStateMachine):
    @initialize(spec=SPECS, num_threads=st.integers(1, 3))
    def create(self, spec: TableSpec, num_threads: int) -> None:
        self.spec = spec
        self.native, self.oracle = HostStore(num_threads), DictStore()
        self.both("create_table", spec)
        for name, max_rows in (("second", 40), ("third", None)):
            self.both("create_table", replace(spec, name=name, max_rows=max_rows))
        self.both("create_table", replace(spec, name="wider", dim=spec.dim + 1))
        self.num_writes = 0

    def both(self, name: str, *arguments: Any, **keywords: Any) -> Any:
        native = outcome(self.native, name, *arguments, **keywords)
        oracle = outcome(self.oracle, name, *arguments, **keywords)
        assert same(native, oracle), f"{name}: {native} is not {oracle}"
        return native

    def new_records(self, num_keys: int) -> Tensor:
        self.num_writes += 1
        generator = torch.Generator().manual_seed(self.num_writes)
        return torch.randn(num_keys, self.spec.num_columns, generator=generator, dtype=self.spec.dtype)

    def new_steps(self, num_keys: int, kind: str) -> Tensor:
        """Returns a step for each key. Both stores refuse a list with a negative one, and one that is too long."""
        steps = 100 * self.num_writes + torch.arange(num_keys + (kind == "too many"))
        if kind == "negative":
            steps[-1:] = -1
        return steps

    @rule(keys=KEY_LISTS, seed=st.integers(0, 99), room=st.integers(-1, 5), gap=st.integers(0, 3))
    def gather_and_scatter_at_places(self, keys: list[int], seed: int, room: int, gap: int) -> None:
        """Uses random places of a larger array, or all of it in order. With room -1 one place is missing, and both
        stores refuse. Gaps between rows must not change."""
        tensor = torch.tensor(keys, dtype=torch.int64)
        generator = torch.Generator().manual_seed(seed)
        size = max(len(keys) + room, 0)
        places = torch.randperm(len(keys) + max(room, 0), generator=generator)[: len(keys)] if seed % 4 else None
        width, offsets = self.spec.num_columns, torch.tensor([0, len(keys)])
        outs = [torch.zeros(size, width + gap, dtype=self.spec.dtype) for _ in range(2)]
        results = [
            outcome(store, "gather_tables", [self.spec.name], offsets, tensor, out[:, :width], places)
            for store, out in zip((self.native, self.oracle), outs, strict=True)
        ]
        assert same(*results)
        assert torch.equal(*outs)
        records = torch.cat([self.new_records(size), torch.full((size, gap), torch.nan, dtype=self.spec.dtype)], 1)
        self.both("scatter_tables", [self.spec.name], offsets, tensor, records[:, :width], places, self.num_writes)

    @rule(
        keys=st.lists(KEY_LISTS, min_size=3, max_size=3),
        first=st.integers(0, 3),
        num_tables=st.sampled_from([3, 2, 1, 0]),
        seed=st.integers(0, 99),
        room=st.sampled_from([2, 0, -1]),
        odd=st.sampled_from(["", "", "", "repeat", "wider", "unknown", "offsets", "short"]),
        steps=st.sampled_from(["one", "each", "each", "negative", "too many"]),
    )
    def several_tables(
        self, keys: list[list[int]], first: int, num_tables: int, seed: int, room: int, odd: str, steps: str
    ) -> None:
        """Uses tables in any order, with or without places. Some cases are refused by both stores, in all calls or only
        in those that read or write records."""
        names = [self.spec.name, "second", "third"]
        names = (names[first:] + names[:first])[:num_tables]
        if odd in ("repeat", "wider", "unknown") and names:
            names[-1] = {"repeat": names[0], "wider": "wider", "unknown": "fourth"}[odd]
        keys = keys[: len(names)]
        offsets = torch.tensor([0, *map(len, keys)], dtype=torch.int64).cumsum(0)
        offsets[-1] += odd == "offsets"
        if odd == "short":
            offsets = offsets[1:]
        tensor = torch.tensor([key for some in keys for key in some], dtype=torch.int64)
        generator = torch.Generator().manual_seed(seed)
        size = max(len(tensor) + room, 0)
        places = torch.randperm(len(tensor) + max(room, 0), generator=generator)[: len(tensor)] if seed % 4 else None
        outs = [torch.zeros(size, self.spec.num_columns + 2, dtype=self.spec.dtype) for _ in range(2)]
        results = [
            outcome(store, "gather_tables", names, offsets, tensor, out[:, :-2], places)
            for store, out in zip((self.native, self.oracle), outs, strict=True)
        ]
        assert same(*results)
        assert torch.equal(*outs)
        self.both("find_tables", names, offsets, tensor)
        step = self.num_writes if steps == "one" else self.new_steps(len(tensor), steps)
        self.both("scatter_tables", names, offsets, tensor, self.new_records(size), places, step)
        self.both("sizes", names)
        for name in ("second", "third", "wider"):
            self.both("digest_part", name)
            self.both("export_piece", name, 0, 65536)  # has the steps

    @rule(keys=KEY_LISTS, rows_only=st.booleans(), with_steps=st.booleans())
    def gather(self, keys: list[int], rows_only: bool, with_steps: bool) -> None:
        tensor = torch.tensor(keys, dtype=torch.int64)
        self.both("gather", self.spec.name, tensor, rows_only=rows_only, with_steps=with_steps)

    @rule(keys=KEY_LISTS, step=st.integers(-1, 2**63 - 1))
    def scatter(self, keys: list[int], step: int) -> None:
        self.both("scatter", self.spec.name, torch.tensor(keys, dtype=torch.int64), self.new_records(len(keys)), step)

    @rule(keys=KEY_LISTS)
    def find(self, keys: list[int]) -> None:
        self.both("find", self.spec.name, torch.tensor(keys, dtype=torch.int64))

    @rule(keys=KEY_LISTS)
    def erase(self, keys: list[int]) -> None:
        self.both("erase", self.spec.name, torch.tensor(keys, dtype=torch.int64))

    @rule(num_rows=st.integers(-1, 2000))
    def reserve(self, num_rows: int) -> None:
        self.both("reserve", self.spec.name, num_rows)

    @rule(buckets=BUCKETS)
    def count_and_export(self, buckets: tuple[int, int]) -> None:
        self.both("count", self.spec.name, *buckets)
        self.both("export_piece", self.spec.name, *buckets)

    @rule(keys=KEY_LISTS, buckets=BUCKETS, step=st.integers(-1, 9))
    def import_any(self, keys: list[int], buckets: tuple[int, int], step: int) -> None:
        piece = Piece(
            torch.tensor(keys, dtype=torch.int64),
            self.new_records(len(keys)),
            torch.arange(step, step + len(keys)),
        )
        self.both("import_piece", self.spec.name, *buckets, piece)

    @rule(cut=st.integers(0, 65536))
    def round_trip(self, cut: int) -> None:
        """Exported in two pieces and imported into an empty store, a table is the same table."""
        copy = HostStore()
        copy.create_table(self.spec)
        for first, end in ((0, cut), (cut, 65536)):
            copy.import_piece(self.spec.name, first, end, self.native.export_piece(self.spec.name, first, end))
        assert copy.digest_part(self.spec.name) == self.native.digest_part(self.spec.name)
        assert same(copy.export_piece(self.spec.name, 0, 65536), self.native.export_piece(self.spec.name, 0, 65536))

    @invariant()
    def same_digest_and_size(self) -> None:
        self.both("digest_part", self.spec.name)
        self.both("size", self.spec.name)
        assert self.native.num_writes == self.oracle.num_writes


TestTwoStores = TwoStores.TestCase
TestTwoStores.settings = settings(max_examples=30, stateful_step_count=30, deadline=None, derandomize=True)


@pytest.mark.parametrize("stream", key_streams())
@pytest.mark.parametrize("num_threads", [1, 3])
def test_streams(stream: str, num_threads: int) -> None:
    """Every batch is gathered, changed and written back, as training does."""
    spec = TableSpec("item", 6, 3, (0.0, 1.0, 2.0), init=init.Normal(0.1), dtype=torch.float64, seed=9)
    native, oracle = HostStore(num_threads), DictStore()
    for store in (native, oracle):
        store.create_table(spec)
        for step, keys in enumerate(key_streams()[stream]):
            records = store.gather("item", keys).records
            store.scatter("item", keys, records * 0.75 + step, step)
    assert native.digest_part("item") == oracle.digest_part("item")
    assert same(native.export_piece("item", 0, 65536), oracle.export_piece("item", 0, 65536))


def test_large_random_table() -> None:
    """Sizes at which the index grows many times and calls use several threads and streaming stores."""
    native, dim = HostStore(num_threads=3), 40
    native.create_table(TableSpec("item", dim))
    generator = torch.Generator().manual_seed(0)
    keys = torch.randperm(120_000, generator=generator) * 1_000_003
    rows = torch.randn(len(keys), dim, generator=generator)
    for first in range(0, len(keys), 30_000):
        native.scatter("item", keys[first : first + 30_000], rows[first : first + 30_000], step=first)
    assert native.size("item") == len(keys)
    drawn = torch.randint(len(keys), (100_000,), generator=generator)
    gathered = native.gather("item", keys[drawn], with_steps=True)
    assert torch.equal(gathered.records, rows[drawn])
    assert gathered.found.all()
    assert gathered.steps is not None
    assert torch.equal(gathered.steps, drawn // 30_000 * 30_000)
    assert native.erase("item", keys[:60_000]) == 60_000
    assert torch.equal(native.find("item", keys), torch.arange(len(keys)) >= 60_000)
    assert torch.equal(native.gather("item", keys[60_000:]).records, rows[60_000:])
