"""Keys packed for an accelerator, and where samples lie in the order of parts, against plain loops over lists.

Fails, for example, if pack of csrc/src/pack.cpp writes the table of padding, if Block::lay_out counts sources from the
beginning of the feature (`sources[i] = bounds[0]`), or if lay_out takes the longest sample of the last block only.
"""

from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nestpipe.store.native import pack_ops
from tests.store.native.key_batches import Batch, Feature, batches, cuts, feature_keys, feature_samples, integers

UNWRITTEN = -77


class Packed(NamedTuple):
    outside: tuple[int, int] | None
    keys: list[int]
    tables: list[int]


def pack(batch: Batch, num_threads: int = 1, which: str = "keys and tables") -> Packed:
    rows, _keys = feature_keys(batch.features)
    number = sum(len(feature.flat) for feature in batch.features)
    keys = torch.full((number,), UNWRITTEN) if "keys" in which else None
    tables = torch.full((number,), UNWRITTEN, dtype=torch.int16) if "tables" in which else None
    outside = pack_ops.pack_keys(rows, batch.num_tables, keys, tables, num_threads)
    return Packed(outside, *([] if array is None else array.tolist() for array in (keys, tables)))


def expected_pack(batch: Batch) -> Packed:
    keys = [key for feature in batch.features for key in feature.flat]
    tables = [
        batch.num_tables if key == feature.padding else feature.table
        for feature in batch.features
        for key in feature.flat
    ]
    return Packed(None, keys, tables)


@given(batch=batches(), num_threads=st.sampled_from([1, 3]))
@settings(max_examples=100, deadline=None)
def test_pack_keys(batch: Batch, num_threads: int) -> None:
    expected = expected_pack(batch)
    assert pack(batch, num_threads) == expected
    assert pack(batch, num_threads, "keys") == expected._replace(tables=[])
    assert pack(batch, num_threads, "tables") == expected._replace(keys=[])
    assert pack(batch, num_threads, "nothing") == Packed(None, [], [])


@pytest.mark.parametrize("padding", [None, 3])
def test_pack_many_keys_with_threads(padding: int | None) -> None:
    """There is work for several threads. Fails if `pack` copies to `keys` instead of `keys + begin`."""
    random = np.random.default_rng(1)
    sizes = [500_000, 0, 1, 7_000]
    lists = [random.integers(0, 9, size).tolist() for size in sizes]
    batch = Batch([Feature([keys], table, padding) for table, keys in enumerate(lists)], len(sizes), 1)
    expected = expected_pack(batch)
    are_equal = [pack(batch, num_threads) == expected for num_threads in (1, 3)]
    assert are_equal == [True, True]


def test_pack_finds_the_first_key_outside() -> None:
    """Then nothing is written, and nothing raised. Padding may be outside. Fails if nestpipe_pack_keys packs whatever
    has_outside returns."""
    inside = Feature([[0, 4, -7]], 0, padding=-7, limit=5)
    for wrong in (5, -1, 2**63 - 1, -(2**63)):
        outside = Feature([[1, -7], [wrong, wrong]], 1, padding=-7, limit=5)
        free = Feature([[wrong]], 1)
        packed = pack(Batch([inside, free, outside, outside], 2, 2))
        assert packed == Packed((2, 2), [UNWRITTEN] * 12, [UNWRITTEN] * 12)
        assert pack(Batch([inside, free, outside], 2, 2), which="nothing").outside == (2, 2)
    batch = Batch([inside, inside], 1, 1)
    assert pack(batch) == expected_pack(batch)


def test_pack_nothing_and_many_tables() -> None:
    assert pack(Batch([], 0, 0)) == Packed(None, [], [])
    assert pack(Batch([Feature([[], []], 0), Feature([[], []], 0, 5)], 1, 2)) == Packed(None, [], [])
    last = Batch([Feature([[1, 2]], 32766, padding=2)], 32767, 1)
    assert pack(last).tables == [32766, 32767]


def test_pack_refusals() -> None:
    rows, _keys = feature_keys([Feature([[1]], 0), Feature([[2]], 1)])
    keys, tables = torch.full((2,), UNWRITTEN), torch.full((2,), UNWRITTEN, dtype=torch.int16)
    with pytest.raises(ValueError, match="features must be ordered by table"):
        pack_ops.pack_keys(np.ascontiguousarray(rows[::-1]), 2, keys, tables)
    with pytest.raises(ValueError, match="feature 1: there is no table number 1 of 1"):
        pack_ops.pack_keys(rows, 1, keys, tables)
    for num_tables in (-1, 32768):
        with pytest.raises(ValueError, match=f"num_tables is {num_tables}"):
            pack_ops.pack_keys(rows, num_tables, keys, tables)
    with pytest.raises(ValueError, match=r"contiguous int64 array \[n, 6\]"):
        pack_ops.pack_keys(rows[:, :5], 2, keys, tables)
    with pytest.raises(TypeError, match=r"keys must be torch\.int64"):
        pack_ops.pack_keys(rows, 2, keys.to(torch.int32), tables)
    with pytest.raises(TypeError, match=r"tables must be torch\.int16"):
        pack_ops.pack_keys(rows, 2, keys, tables.to(torch.int64))
    for size in (1, 3):
        with pytest.raises(ValueError, match=rf"keys must have shape \[2\], got \[{size}\]"):
            pack_ops.pack_keys(rows, 2, integers([0] * size), tables)
        with pytest.raises(ValueError, match=rf"tables must have shape \[2\], got \[{size}\]"):
            pack_ops.pack_keys(rows, 2, keys, torch.zeros(size, dtype=torch.int16))
    with pytest.raises(ValueError, match="num_threads is 0"):
        pack_ops.pack_keys(rows, 2, keys, tables, 0)
    assert keys.tolist() == tables.tolist() == [UNWRITTEN] * 2


class Layout(NamedTuple):
    bounds: list[int]
    sources: list[int]
    longest: int


def lay_out(
    batch: Batch, samples: list[int] | None, part_offsets: list[int], with_sources: bool = True, num_threads: int = 1
) -> Layout:
    rows, _offsets = feature_samples(batch.features)
    number = len(batch.features) * batch.num_samples
    bounds, sources = torch.full((number + 1,), UNWRITTEN), torch.full((number,), UNWRITTEN) if with_sources else None
    order = None if samples is None else integers(samples)
    arrays = order, integers(part_offsets), batch.num_samples, bounds, sources
    longest = pack_ops.lay_out(rows, *arrays, num_threads)
    return Layout(bounds.tolist(), [] if sources is None else sources.tolist(), longest)


def expected_layout(batch: Batch, samples: list[int] | None, part_offsets: list[int]) -> Layout:
    order = list(range(batch.num_samples)) if samples is None else samples
    lengths = [[len(keys) for keys in feature.keys] for feature in batch.features]
    firsts = np.cumsum([0, *chain(*lengths)]).tolist()  # of each feature and sample
    bounds, sources = [0], []
    for first, end in pairwise(part_offsets):
        for f in range(len(batch.features)):
            for sample in order[first:end]:
                bounds.append(bounds[-1] + lengths[f][sample])
                sources.append(firsts[f * batch.num_samples + sample])
    return Layout(bounds, sources, max([0, *chain(*lengths)]))


@given(data=st.data(), batch=batches(), num_threads=st.sampled_from([1, 3]))
@settings(max_examples=150, deadline=None)
def test_lay_out(data: st.DataObject, batch: Batch, num_threads: int) -> None:
    samples, part_offsets = data.draw(cuts(batch.num_samples))
    expected = expected_layout(batch, samples, part_offsets)
    assert lay_out(batch, samples, part_offsets, num_threads=num_threads) == expected
    without = lay_out(batch, samples, part_offsets, with_sources=False, num_threads=num_threads)
    assert without == expected._replace(sources=[])


def test_lay_out_many_samples_with_threads() -> None:
    """There is work for several threads. Fails if blocks begin where they end (begins[b] is set after num_keys), or if
    `lay_out` writes the ends of all blocks to the beginning of bounds (`bounds + 1`)."""
    random, number = np.random.default_rng(2), 60_000
    features = [Feature([[0] * n for n in random.integers(0, most + 1, number)], 0) for most in (1, 0, 7, 1)]
    features.append(Feature([[0]] * number, 0))
    batch, part_offsets = Batch(features, 1, number), [0, 0, 1, *range(2_000, number + 1, 2_000), number]
    for samples in (None, random.permutation(number).tolist()):
        expected = expected_layout(batch, samples, part_offsets)
        assert expected.longest == 7
        got = [lay_out(batch, samples, part_offsets, num_threads=num_threads) for num_threads in (1, 3)]
        are_equal = [layout == expected for layout in got]
        assert are_equal == [True, True]


def test_lay_out_nothing() -> None:
    assert lay_out(Batch([], 1, 3), [2, 0, 1], [0, 1, 3]) == Layout([0], [], 0)
    assert lay_out(Batch([Feature([], 0)] * 2, 1, 0), None, [0, 0, 0]) == Layout([0], [], 0)
    assert lay_out(Batch([Feature([[], []], 0)], 1, 2), [1, 0], [0, 2]) == Layout([0, 0, 0], [0, 0], 0)


def test_lay_out_refusals() -> None:
    batch = Batch([Feature([[1, 2], [2]], 0), Feature([[5], []], 1)], 2, 2)
    for samples in ([0, 0], [0, 2], [-1, 0]):
        with pytest.raises(ValueError, match=r"samples\[[01]\] is"):
            lay_out(batch, samples, [0, 1, 2])
    for part_offsets in ([0, 3], [0, 1], [1, 2], [0, 2, 1, 2], [0, -1, 2]):
        with pytest.raises(ValueError, match="parts: offsets do not rise from 0 to 2"):
            lay_out(batch, None, part_offsets)
    with pytest.raises(ValueError, match="part_offsets must have at least two entries"):
        lay_out(batch, None, [0])
    with pytest.raises(ValueError, match="num_threads is 0"):
        lay_out(batch, None, [0, 2], num_threads=0)
    rows, offsets = feature_samples(batch.features)
    parts, bounds, sources = integers([0, 2]), integers([UNWRITTEN] * 5), integers([UNWRITTEN] * 4)

    def refuses(error: type[Exception], match: str, **changed: Tensor | np.ndarray | None) -> None:
        arguments = {"features": rows, "samples": None, "part_offsets": parts, "num_samples": 2}
        with pytest.raises(error, match=match):
            pack_ops.lay_out(**(arguments | {"bounds": bounds, "sources": sources} | changed))

    refuses(ValueError, r"contiguous int64 array \[n, 3\]", features=rows[:, :2])
    refuses(ValueError, r"bounds must have shape \[5\], got \[4\]", bounds=bounds[:4])
    refuses(ValueError, r"sources must have shape \[4\], got \[5\]", sources=bounds)
    refuses(ValueError, r"samples must have shape \[2\], got \[3\]", samples=integers([0, 1, 2]))
    for name, array in (("bounds", bounds), ("sources", sources), ("part_offsets", parts), ("samples", parts)):
        refuses(TypeError, rf"{name} must be torch\.int64", **{name: array.to(torch.int32)})
    offsets[1][2] = 2
    refuses(ValueError, "feature 1: offsets do not rise from 0 to 1")
    assert bounds.tolist() + sources.tolist() == [UNWRITTEN] * 9
    offsets[1][1:] = integers([2, 1])
    refuses(ValueError, "feature 1")  # offsets that fall, which are noticed while bounds are written
