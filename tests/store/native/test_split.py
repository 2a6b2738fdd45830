"""The parts of a batch against plain loops over lists.

Fails, for example, if list_rows of csrc/src/split.cpp forgets the parts before the last eight (`earlier_`), or if it
writes four rows where there is no room for four.
"""

from itertools import chain
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe.store.native import plan_ops
from tests.store.native.key_batches import WORLD_SIZES, Batch, Feature, batches, cuts, dedup, feature_samples, integers


class ExpectedSplit(NamedTuple):
    uses: list[list[int]]
    row_positions: list[int]
    is_first: list[bool]
    row_counts: list[list[int]]
    index: list[int]
    index_offsets: list[int]
    offsets: list[int]
    sources: list[int]


def expected_split(
    batch: Batch, deduped: plan_ops.Deduped, samples: list[int] | None, part_offsets: list[int]
) -> ExpectedSplit:
    num_parts, order = len(part_offsets) - 1, samples or list(range(batch.num_samples))
    tables = [t for row in deduped.counts.tolist() for t, count in enumerate(row) for _ in range(count)]
    got = ExpectedSplit([[0] * ((num_parts + 7) // 8) for _ in tables], [], [], [], [], [0], [], [])
    positions = deduped.positions.tolist()
    starts = np.cumsum([0, *(len(feature.flat) for feature in batch.features)]).tolist()
    seen: set[int] = set()
    for part in range(num_parts):
        places = order[part_offsets[part] : part_offsets[part + 1]]
        lists = [occurrences_of(feature, starts[f], places) for f, feature in enumerate(batch.features)]
        used = {positions[i] for occurrences in lists for i in chain(*occurrences)} - {-1}
        rows = [sorted(position for position in used if tables[position] == t) for t in range(batch.num_tables)]
        for position in chain(*rows):
            got.uses[position][part // 8] |= 1 << part % 8
            got.row_positions.append(position)
            got.is_first.append(position not in seen)
        seen |= used
        got.row_counts.append([len(table_rows) for table_rows in rows])
        for feature, occurrences in zip(batch.features, lists, strict=True):
            table_rows = rows[feature.table]
            flat = list(chain(*occurrences))
            got.index.extend(len(table_rows) if positions[i] < 0 else table_rows.index(positions[i]) for i in flat)
            got.sources.extend(flat)
            got.index_offsets.append(len(got.index))
            got.offsets.extend(np.cumsum([0, *map(len, occurrences)]).tolist())
    return got


def occurrences_of(feature: Feature, start: int, samples: list[int]) -> list[list[int]]:
    """Returns the occurrences of each sample, in a feature whose first occurrence has number `start`."""
    offsets = np.cumsum([start, *(len(keys) for keys in feature.keys)]).tolist()
    return [list(range(offsets[s], offsets[s + 1])) for s in samples]


def split(
    batch: Batch, deduped: plan_ops.Deduped, samples: list[int] | None, part_offsets: list[int], sources: bool = True
) -> plan_ops.Split:
    rows, _offsets = feature_samples(batch.features)
    order = None if samples is None else integers(samples)
    return plan_ops.split(
        rows,
        deduped.positions,
        deduped.counts,
        len(deduped.keys),
        order,
        integers(part_offsets),
        batch.num_samples,
        sources,
    )


@given(data=st.data(), batch=batches(), world_size=WORLD_SIZES)
@settings(max_examples=150, deadline=None)
def test_split(data: st.DataObject, batch: Batch, world_size: int) -> None:
    samples, part_offsets = data.draw(cuts(batch.num_samples))
    deduped = dedup(batch, world_size)
    expected = expected_split(batch, deduped, samples, part_offsets)
    got = split(batch, deduped, samples, part_offsets)
    for name in expected._fields:
        assert getattr(got, name).tolist() == getattr(expected, name), name
    without = split(batch, deduped, samples, part_offsets, sources=False)
    assert without.sources is None
    assert torch.equal(without.index, got.index)


def test_split_of_many_keys() -> None:
    random = np.random.default_rng(3)
    features = [
        Feature([random.integers(0, 40, random.integers(0, 5)).tolist() for _ in range(60)], table, padding)
        for table, padding in ((0, None), (0, 1), (2, 3), (3, None), (3, None))
    ]
    batch = Batch(features, 5, 60)
    for world_size in (1, 4, 1536):
        deduped = dedup(batch, world_size)
        for part_offsets in ([0, 60], [0, 1, 1, 30, 60], [0, *range(12, 61, 2)]):
            for samples in (None, random.permutation(60).tolist()):
                expected = expected_split(batch, deduped, samples, part_offsets)
                got = split(batch, deduped, samples, part_offsets)
                for name in expected._fields:
                    assert getattr(got, name).tolist() == getattr(expected, name), name


def test_split_refusals() -> None:
    batch = Batch([Feature([[1, 2], [2]], 0), Feature([[5], []], 1)], 2, 2)
    deduped = dedup(batch, 3)
    split(batch, deduped, [1, 0], [0, 1, 2])
    for samples in ([0, 0], [0, 2], [-1, 0]):
        with pytest.raises(ValueError, match=r"samples\[[01]\] is"):
            split(batch, deduped, samples, [0, 1, 2])
    for part_offsets in ([0, 3], [0, 1], [1, 2], [0, 2, 1, 2], [0, -1, 2]):
        with pytest.raises(ValueError, match="parts: offsets do not rise from 0 to 2"):
            split(batch, deduped, None, part_offsets)
    for wrong in (3, -2, 2**63 - 1, -(2**63)):
        positions = deduped.positions.clone()
        positions[1] = wrong
        with pytest.raises(ValueError, match=r"positions has values outside of -1 \.\. 2"):
            split(batch, deduped._replace(positions=positions), None, [0, 2])
    for part_offsets in ([0, 2], [0, 1, 2]):
        positions = torch.full_like(deduped.positions, 1)
        with pytest.raises(ValueError, match=r"position [02] is not among the positions"):
            split(batch, deduped._replace(positions=positions), None, part_offsets)
    with pytest.raises(ValueError, match="the sum of counts is 3, must be the number of keys, 4"):
        split(batch, deduped._replace(keys=integers([0] * 4)), None, [0, 2])
    with pytest.raises(ValueError, match="counts must not be negative"):
        split(batch, deduped._replace(counts=-deduped.counts), None, [0, 2])
    with pytest.raises(ValueError, match="4 positions, but the features have 3 keys"):
        split(batch._replace(features=batch.features[:1]), deduped, None, [0, 2])
    rows, offsets = feature_samples(batch.features)
    offsets[1][1] = 2
    with pytest.raises(ValueError, match="feature 1: offsets do not rise from 0 to 1"):
        plan_ops.split(rows, deduped.positions, deduped.counts, 3, None, integers([0, 2]), 2)
