"""Behaviour sequences: samples do not depend on how they are asked for, and have the documented distributions.

Fails, for example, if `units` are numbered by index in the batch, if interests are drawn for each item, or if an item
is of an interest with a probability 0.05 above INTEREST_SHARE.
"""

import numpy as np
import pytest
import torch

from nestpipe.data.batch import Batch
from nestpipe.data.dataset import Batches
from nestpipe.data.synthetic.draws import stream
from nestpipe.data.synthetic.sequences import (
    INTEREST_SHARE,
    INTERESTS_A_SAMPLE,
    ITEMS_AN_INTEREST,
    LENGTH_SPREAD,
    MAX_LENGTH,
    MEDIAN_LENGTH,
    NUM_INTERESTS,
    NUM_ITEMS,
    SKEW,
    SequenceData,
)

DATA = SequenceData(seed=5)


def assert_equal(got: Batch, expected: Batch) -> None:
    assert got.keys.keys() == expected.keys.keys() == {"history"}
    assert torch.equal(got.keys["history"].values, expected.keys["history"].values)
    assert torch.equal(got.keys["history"].offsets, expected.keys["history"].offsets)


def items_of(data: SequenceData, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the sample and the item of each occurrence."""
    positions = np.arange(count, dtype=np.uint64)
    lengths = data._lengths(positions)
    samples = np.repeat(positions, lengths)
    place = np.concatenate([np.arange(length, dtype=np.uint64) for length in lengths])
    return samples.astype(np.int64), data._items(samples, place).astype(np.int64)


@pytest.mark.parametrize("first", [0, 1, 1000, 10**12 + 17])
@pytest.mark.parametrize("sizes", [[1] * 40, [3, 0, 20, 17], [0, 40]])
def test_any_slicing_gives_the_same_samples(first: int, sizes: list[int]) -> None:
    whole = SequenceData(seed=5).samples(first, 40)
    starts = np.cumsum([0, *sizes])
    for start, size in zip(starts, sizes, strict=False):
        assert_equal(DATA.samples(first + int(start), size), whole[slice(start, start + size)])


def test_known_samples() -> None:
    """Recorded results of training stay valid only while these do not change."""
    history = SequenceData(seed=1).samples(10**6, 3).keys["history"]
    assert history.lengths.tolist() == [49, 53, 40]
    assert history.values[:2].tolist() == [5760092429151129692, 2379741637280914066]


def test_seeds_differ_in_samples_only() -> None:
    one, other = (SequenceData(seed=seed).samples(0, 1000).keys["history"].values for seed in (1, 2))
    assert not torch.equal(one[:1000], other[:1000])
    assert one.mode().values == other.mode().values


def test_ranks_share_the_global_batch() -> None:
    data = SequenceData(seed=3, num_samples=100)
    alone = list(Batches(data, 48))
    ranks = [list(Batches(data, 16, rank, 3)) for rank in range(3)]
    for step, batch in enumerate(alone):
        values = [ranks[rank][step].keys["history"].values for rank in range(3)]
        assert torch.equal(torch.cat(values), batch.keys["history"].values)
    assert [len(batches[-1]) for batches in ranks] == [4, 0, 0]


def test_lengths_are_lognormal() -> None:
    lengths = DATA.samples(0, 20_000).keys["history"].lengths.double()
    assert lengths.min() >= 1
    assert lengths.max() <= MAX_LENGTH
    assert lengths.median() == pytest.approx(MEDIAN_LENGTH, rel=0.03)
    assert (lengths + 0.5).log().std() == pytest.approx(LENGTH_SPREAD, rel=0.03)


def test_items_are_of_few_interests() -> None:
    """Checks the share of items that are of the sample's own interests, including those that are so by chance."""
    samples, items = items_of(DATA, 2000)
    assert 0 <= items.min() <= items.max() < NUM_ITEMS
    numbers = samples[:, None] * INTERESTS_A_SAMPLE + np.arange(INTERESTS_A_SAMPLE)
    interests = (stream("interest", 5, numbers) % np.uint64(NUM_INTERESTS)).astype(np.int64)
    hit = (items[:, None] % NUM_INTERESTS == interests).any(1).mean()
    by_chance = 1 - (1 - 1 / NUM_INTERESTS) ** INTERESTS_A_SAMPLE
    assert hit == pytest.approx(INTEREST_SHARE + (1 - INTEREST_SHARE) * by_chance, abs=0.01)
    assert set(np.unique(interests)) == set(range(NUM_INTERESTS))


def test_items_are_zipf_distributed() -> None:
    """Items are grouped by popularity within their interest, whether drawn from the interest or from all items."""
    _, items = items_of(DATA, 4000)
    weights = np.arange(1, NUM_ITEMS + 1) ** -SKEW
    weights /= weights.sum()
    interest_weights = np.arange(1, ITEMS_AN_INTEREST + 1) ** -SKEW
    interest_weights /= interest_weights.sum()
    for first, end in ((0, 1), (1, 10), (10, 100), (100, ITEMS_AN_INTEREST)):
        expected = INTEREST_SHARE * interest_weights[first:end].sum()
        expected += (1 - INTEREST_SHARE) * weights[first * NUM_INTERESTS : end * NUM_INTERESTS].sum()
        got = ((items >= first * NUM_INTERESTS) & (items < end * NUM_INTERESTS)).mean()
        assert got == pytest.approx(expected, abs=0.005)


def test_splitting_costs_what_it_should() -> None:
    """Compares the distinct keys of all micro-batches, in the given order, with those of the batch."""
    for batch_size, num_parts, expansion in ((512, 4, 1.22), (2048, 8, 1.44)):
        history = DATA.samples(0, batch_size).keys["history"]
        parts = torch.arange(batch_size).tensor_split(num_parts)
        total = sum(len(history.take(part).values.unique()) for part in parts)
        assert total / len(history.values.unique()) == pytest.approx(expansion, abs=0.02)


def test_end_of_data() -> None:
    data = SequenceData(num_samples=10)
    assert len(data.samples(10, 0)) == 0
    for first, count in ((8, 3), (-1, 2), (0, -1)):
        with pytest.raises(ValueError, match="were asked for"):
            data.samples(first, count)
    with pytest.raises(ValueError, match="num_samples is -1"):
        SequenceData(num_samples=-1)
