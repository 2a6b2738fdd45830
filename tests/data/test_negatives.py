"""Negatives do not depend on how samples are asked for; they have the right number, and are uniform over the corpus.

Fails, for example, if stream is given indices in the batch instead of positions, or if the words of a sample are
numbered from the first sample of the batch.
"""

import pytest
import torch

from nestpipe import Batch, Jagged
from nestpipe.data.dataset import Batches, Dataset
from nestpipe.data.negatives import WithNegatives


class Histories(Dataset):
    """Sample s has s % 4 keys."""

    num_samples = 40

    def samples(self, first: int, count: int) -> Batch:
        lists = [list(range(s, s + s % 4)) for s in range(first, first + count)]
        return Batch({"history": Jagged.from_lists(lists)}, weight=float(sum(map(len, lists))))


def lists(batch: Batch) -> list[list[int]]:
    jagged = batch.keys["negatives"]
    return [part.tolist() for part in jagged.values.tensor_split(jagged.offsets[1:-1])] if len(jagged) else []


@pytest.mark.parametrize("per", ["position", "sample"])
def test_one_sample_at_a_time_and_any_number_of_ranks(per: str) -> None:
    data = WithNegatives(Histories(), 1000, 5, per)
    whole = lists(data.samples(0, 40))
    assert [len(keys) for keys in whole] == [5 * (s % 4) if per == "position" else 5 for s in range(40)]
    assert whole == [lists(data.samples(s, 1))[0] for s in range(40)]
    ranks = [Batches(data, 5, rank, 4) for rank in range(4)]
    assert whole == [keys for _ in range(2) for rank in ranks for keys in lists(next(rank))]
    assert lists(data.samples(3, 0)) == []


def test_what_is_drawn_depends_on_the_seed_and_nothing_repeats() -> None:
    one, other = (WithNegatives(Histories(), 10**15, 50, seed=seed).samples(0, 40) for seed in (1, 2))
    drawn = torch.cat([batch.keys["negatives"].values for batch in (one, other)])
    assert len(drawn.unique()) == len(drawn)
    assert one.weight == 60.0
    assert torch.equal(one.keys["history"].values, Histories().samples(0, 40).keys["history"].values)


@pytest.mark.parametrize("corpus", [7, torch.tensor([-3, 2**62, 5, 11, 0, 1, 2])])
def test_uniform(corpus: int | torch.Tensor) -> None:
    keys = WithNegatives(Histories(), corpus, 2000, "sample").samples(0, 40).keys["negatives"].values
    distinct, counts = keys.unique(return_counts=True)
    expected = torch.arange(7) if isinstance(corpus, int) else corpus.sort().values
    assert torch.equal(distinct, expected)
    deviation = 80_000**0.5 * (1 / 7 * 6 / 7) ** 0.5
    assert float((counts - 80_000 / 7).abs().max()) < 4 * deviation


def test_refusals() -> None:
    for arguments, text in (
        ((0,), "the corpus has 0 keys"),
        ((5, 0), "num_negatives is 0"),
        ((torch.zeros(3),), "must be a 1-dimensional int64 tensor"),
        ((5, 5, "batch"), "not per 'batch'"),
    ):
        with pytest.raises(ValueError, match=text):
            WithNegatives(Histories(), *arguments)
    with pytest.raises(ValueError, match="negatives need a feature 'items'"):
        WithNegatives(Histories(), 5, history="items").samples(0, 1)
