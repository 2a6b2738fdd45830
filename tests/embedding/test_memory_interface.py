"""Rows in host memory and in device memory: one interface, the same rows, sums and flags.

DeviceMemory runs here on host memory, with the plain form of its kernels (kernels/rows/reference.py). The tests of the
kernels compare both forms to the bit. Fails, for example, if HostMemory.add_rows leaves out the limit, if _in_units
counts places in rows instead of units, or if row_ops.read_rows reads one row after another whatever the places are.
"""

import math

import pytest
import torch
from torch import Tensor

from nestpipe.data import Batch, Jagged
from nestpipe.embedding.cluster import Clustering
from nestpipe.embedding.dedup import BatchDedup, HostOccurrences, dedup_batch
from nestpipe.embedding.device_memory import DeviceMemory
from nestpipe.embedding.fused import GroupOccurrences
from nestpipe.embedding.group import group_features
from nestpipe.embedding.host_memory import HostMemory
from nestpipe.embedding.memory import Memory, memory_on
from nestpipe.embedding.optim import SGD, Adagrad, Adam, RowOptimizer, RowWiseAdagrad
from nestpipe.embedding.packed import PackedBatch
from nestpipe.embedding.table import Pooled, Sequence, Table
from nestpipe.embedding.travel import message_unit
from nestpipe.kernels.rows.segments import Segments, make_segments

CPU = torch.device("cpu")
SHAPES = [(1, torch.float32), (5, torch.float32), (16, torch.float32), (3, torch.float64), (8, torch.float64)]
ALL_SHAPES = pytest.mark.parametrize(("dim", "dtype"), SHAPES)


def memories() -> tuple[Memory, Memory]:
    return HostMemory(), DeviceMemory(CPU, is_staged=False)


def drawn(num_rows: int, dim: int, dtype: torch.dtype, gap: int = 3) -> Tensor:
    """Returns random rows with gaps between them, like those of records."""
    return torch.randn(num_rows, dim + gap, dtype=dtype)[:, :dim]


def places(num: int, num_rows: int) -> Tensor:
    return torch.randperm(num_rows)[:num]


@ALL_SHAPES
@pytest.mark.parametrize(("gathers", "scatters"), [(False, False), (True, False), (False, True), (True, True)])
def test_copy_rows(dim: int, dtype: torch.dtype, gathers: bool, scatters: bool) -> None:
    torch.manual_seed(dim)
    source, target = drawn(20, dim, dtype), drawn(20 if not scatters else 30, dim, dtype)
    from_places, to_places = places(20, 20) if gathers else None, places(20, 30) if scatters else None
    expected = target.clone()
    expected[slice(None) if to_places is None else to_places] = source if from_places is None else source[from_places]
    for memory in memories():
        copied = target.clone()
        memory.copy_rows(source, from_places, copied, to_places)
        assert torch.equal(copied, expected)


def message_places(counts: list[int], row_bytes: int, before: int) -> Tensor:
    """Returns the places of rows for several ranks, in units; those of each rank start at a multiple of 16 bytes."""
    starts, start = [], before
    for count in counts:
        starts += [start + row * row_bytes for row in range(count)]
        start = -(-(start + count * row_bytes) // 16) * 16
    assert all(byte % message_unit(row_bytes) == 0 for byte in starts)
    return torch.tensor(starts) // message_unit(row_bytes)


@ALL_SHAPES
@pytest.mark.parametrize("counts", [[7], [1, 0, 6], [3, 2, 2]])
def test_messages_in_units(dim: int, dtype: torch.dtype, counts: list[int]) -> None:
    """Each kind of memory writes the same bytes, and reads the other's."""
    torch.manual_seed(dim)
    source, row_bytes = drawn(12, dim, dtype), dim * dtype.itemsize
    chosen, in_units = places(7, 12), message_places(counts, row_bytes, before=32)
    num_bytes = 32 + 3 * 16 + 7 * row_bytes + -(7 * row_bytes) % 16
    written = []
    for memory in memories():
        message = memory.empty_message(num_bytes).zero_()
        memory.write_message(source, chosen, message, in_units)
        written.append(message)
    assert torch.equal(written[0], written[1])
    unit = message_unit(row_bytes)
    for row, at in zip(chosen.tolist(), in_units.tolist(), strict=True):
        assert torch.equal(written[0][at * unit : at * unit + row_bytes].clone().view(dtype), source[row])
    for memory, message in zip(memories(), written[::-1], strict=True):
        target, expected, to_places = drawn(12, dim, dtype), None, places(7, 12)
        expected = target.clone()
        expected[to_places] = source[chosen]
        memory.read_message(message, in_units, target, to_places)
        assert torch.equal(target, expected)
        whole = memory.empty_rows(7, dim, dtype)
        memory.read_message(message, in_units, whole, None)
        assert torch.equal(whole, source[chosen])


@ALL_SHAPES
def test_messages_in_order(dim: int, dtype: torch.dtype) -> None:
    """Without places, rows are contiguous from the beginning. Bytes behind them do not change."""
    torch.manual_seed(dim)
    source, chosen, row_bytes = drawn(9, dim, dtype), places(4, 9), dim * dtype.itemsize
    for memory, other in (memories(), memories()[::-1]):
        message = memory.empty_message(4 * row_bytes + 16).fill_(7)
        memory.write_message(source, chosen, message, None)
        assert message[4 * row_bytes :].tolist() == [7] * 16
        rows, target = other.empty_rows(4, dim, dtype), torch.zeros(9, dim, dtype=dtype)
        other.read_message(message, None, rows, None)
        other.read_message(message, None, target, chosen)
        assert torch.equal(rows, source[chosen])
        assert torch.equal(target[chosen], source[chosen])


def test_no_rows_at_all() -> None:
    none = torch.empty(0, dtype=torch.int64)
    for memory in memories():
        rows, empty, message = (
            memory.empty_rows(3, 2, torch.float32).fill_(1),
            torch.empty(0, 2),
            memory.empty_message(0),
        )
        memory.copy_rows(rows, none, empty, None)
        memory.copy_rows(rows, none, rows.clone(), none)
        memory.write_message(rows, none, message, none)
        memory.write_message(rows, none, message, None)
        memory.read_message(message, none, rows, none)
        memory.read_message(message, None, empty, None)
        flag = memory.new_flag()
        memory.add_rows(rows, none, empty, torch.empty(0, dtype=torch.bool), 1.0, flag)
        memory.check_rows(empty, 1.0, flag)
        assert (flag.dtype, flag.tolist()) == (torch.int32, [0])
        assert torch.equal(rows, torch.ones(3, 2))
        assert memory.sum_rows(empty, make_segments(none, torch.zeros(3, dtype=torch.int64))).tolist() == [[0, 0]] * 2


@ALL_SHAPES
@pytest.mark.parametrize("with_places", [True, False])
@pytest.mark.parametrize("with_first", [True, False])
def test_add_rows(dim: int, dtype: torch.dtype, with_places: bool, with_first: bool) -> None:
    """A first row replaces what was there before, even NaN."""
    torch.manual_seed(dim)
    source, target = drawn(20, dim, dtype), drawn(33 if with_places else 20, dim, dtype)
    chosen = places(20, 33) if with_places else None
    is_first = torch.rand(20) < 0.5 if with_first else None
    indices = torch.arange(20) if chosen is None else chosen
    expected = target.clone()
    expected[indices] += source
    if is_first is not None:
        expected[indices[is_first]] = source[is_first]
        target[indices[is_first]] = math.nan
    for memory in memories():
        added, flag = target.clone(), memory.new_flag()
        memory.add_rows(added, chosen, source, is_first, torch.finfo(dtype).max / 4, flag)
        assert torch.equal(added, expected)
        assert int(flag) == 0
        again = target.clone()
        memory.add_rows(again, chosen, source, is_first, math.inf, None)
        assert torch.equal(again, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_ranks", [1, 3, 1536])
def test_flags(dtype: torch.dtype, num_ranks: int) -> None:
    """The limit itself is allowed. The next larger magnitude is not, nor is anything that is not finite.

    Fails if check_rows or add_rows compares with `<`, or does not flag NaN.
    """
    limit = torch.finfo(dtype).max / (2 * num_ranks)
    edge = torch.tensor(limit, dtype=dtype)
    if float(edge) > limit:  # rounded up
        edge = edge.nextafter(edge.new_zeros(()))
    beyond = edge.nextafter(edge.new_full((), math.inf))
    cases = [(edge, 0), (beyond, 1), (edge.new_tensor(math.inf), 1)]
    cases += [(-value, flagged) for value, flagged in cases] + [(edge.new_tensor(math.nan), 1), (edge.new_zeros(()), 0)]
    for value, flagged in cases:
        source = torch.ones(4, 3, dtype=dtype)
        source[2, 1] = value
        for memory in memories():
            in_check, in_first, in_sum = memory.new_flag(), memory.new_flag(), memory.new_flag()
            memory.check_rows(source, limit, in_check)
            memory.add_rows(torch.ones(4, 3, dtype=dtype), None, source, torch.ones(4).bool(), limit, in_first)
            memory.add_rows(source / 2, None, source / 2, None, limit, in_sum)
            assert [int(flag) for flag in (in_check, in_first, in_sum)] == [flagged] * 3, (value, memory)


def test_a_flag_stays_set() -> None:
    for memory in memories():
        flag, fine = memory.new_flag(), torch.ones(2, 2)
        memory.check_rows(torch.full((2, 2), math.nan), 1e30, flag)
        memory.check_rows(fine, 1e30, flag)
        memory.add_rows(fine.clone(), None, fine, None, 1e30, flag)
        assert flag.tolist() == [1]


@ALL_SHAPES
def test_sum_rows(dim: int, dtype: torch.dtype) -> None:
    """Entries are added in the given order. The bits of these sums depend on it."""
    torch.manual_seed(dim)
    values = torch.randn(40, dim, dtype=dtype) * 10.0 ** torch.randint(-3, 6, (40, 1))
    lengths = [0, 1, 7, 0, 30, 2]
    order = torch.randperm(40)
    segments: Segments = make_segments(order, torch.tensor([0, *lengths]).cumsum(0))
    expected = torch.zeros(len(lengths), dim, dtype=dtype)
    for s, entries in enumerate(order.split(lengths)):
        for entry in entries.tolist():
            expected[s] += values[entry]
    for memory in memories():
        assert torch.equal(memory.sum_rows(values, segments), expected)


@pytest.mark.parametrize("slots", [None, [7, 0, 3, 9, 1, 4]], ids=["all", "slots"])
@pytest.mark.parametrize(
    "optimizer",
    [SGD(0.1, 0.01), SGD(0.1), Adagrad(0.1), RowWiseAdagrad(0.1), Adam(0.1)],
    ids=lambda o: type(o).__name__,
)
def test_update(optimizer: RowOptimizer, slots: list[int] | None) -> None:
    """Updates some columns of records, in all slots or in some. A masked step changes nothing, and no other slot
    changes. Fails if update_records copies the slots out, but not back."""
    torch.manual_seed(3)
    width = 4 + optimizer.state_width(4)
    chosen = torch.tensor(slots) if slots is not None else None
    records = torch.rand(6 if slots is None else 10, width + 2, dtype=torch.float64)
    gradient = torch.randn(6, 4, dtype=torch.float64)
    (group,) = group_features({"t": Pooled(Table("t", 4, optimizer=optimizer, dtype=torch.float64))}).groups
    host, device = memories()
    changed = []
    for memory, is_masked in ((host, None), (device, torch.tensor(False)), (device, torch.tensor(True))):
        mine = records.clone()
        memory.update(group, optimizer, mine, chosen, gradient, 2, is_masked)
        changed.append(mine)
    torch.testing.assert_close(changed[0], changed[1], rtol=1e-14, atol=0)
    assert not torch.equal(changed[0], records)
    assert torch.equal(changed[2], records)
    if chosen is not None:
        dense = records[chosen]
        host.update(group, optimizer, dense, None, gradient, 2, None)
        assert torch.equal(changed[0], records.index_copy(0, chosen, dense))


def make_batch(num_samples: int) -> Batch:
    lists = [[s % 3, 5 - s % 4] for s in range(num_samples)]
    return Batch({name: Jagged.from_lists(lists) for name in ("x", "y")}, {"age": torch.arange(num_samples)})


@pytest.mark.parametrize("clustering", [Clustering("none"), Clustering("spectral")], ids=lambda c: c.method)
@pytest.mark.parametrize("batch", [make_batch(7), make_batch(0), None], ids=["batch", "empty", "none"])
def test_batches(batch: Batch | None, clustering: Clustering) -> None:
    """Either memory finds the same keys and rows. Fails if DeviceMemory.prepare_batch leaves out the clustering, or if
    pack_batch forgets that there is no batch."""
    features = group_features({"x": Pooled(Table("a", 2)), "y": Sequence(Table("b", 2))})
    split = 3, 2, 1, clustering
    expected = dedup_batch(features, batch, *split)
    kinds = (BatchDedup, HostOccurrences), (PackedBatch, GroupOccurrences)
    for memory, (prepared_kind, occurrences_kind) in zip(memories(), kinds, strict=True):
        prepared = memory.prepare_batch(features, batch, *split)
        assert isinstance(prepared, prepared_kind)
        uploaded = memory.upload_batch(prepared)
        assert uploaded.has_batch == expected.has_batch == (batch is not None)
        assert (uploaded.num_samples, uploaded.weights) == (expected.num_samples, expected.weights)
        for got, inputs in zip(uploaded.inputs, expected.inputs, strict=True):
            assert {name: values.tolist() for name, values in got.items()} == {
                name: values.tolist() for name, values in inputs.items()
            }
        for group, other in zip(uploaded.groups, expected.groups, strict=True):
            assert isinstance(group.occurrences, occurrences_kind)
            for name in ("keys", "counts", "uses", "row_positions", "is_first"):
                assert torch.equal(getattr(group, name), getattr(other, name)), name
            assert (group.row_counts.tolist(), group.row_offsets) == (other.row_counts.tolist(), other.row_offsets)


@pytest.mark.parametrize("memory", memories(), ids=lambda memory: type(memory).__name__)
def test_a_key_that_its_table_does_not_have(memory: Memory) -> None:
    """Fails if PackedKeys.from_batch ignores what pack_keys returns."""
    features = group_features({"x": Pooled(Table("a", 2, num_keys=5)), "y": Pooled(Table("b", 2))})
    with pytest.raises(ValueError, match=r"feature 'x'.* 5"):
        memory.prepare_batch(features, make_batch(4), 1, 1)


def test_records() -> None:
    """On a device, records begin at multiples of 16 bytes."""
    host, device = memories()
    assert (host.is_host, device.is_host) == (True, False)
    assert host.new_records(5, torch.float32).rows.shape[1] == 5
    assert device.new_records(5, torch.float32).rows.shape[1] == 8
    assert device.new_records(5, torch.float64).rows.shape[1] == 6


def test_memory_of_a_device() -> None:
    assert isinstance(memory_on(CPU), HostMemory)
    assert memory_on(CPU, is_staged=True).sealed(torch.empty(0)) is None
