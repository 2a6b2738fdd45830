"""The oracle's probabilities equal those of plain loops, and the frequencies among many users; ranks of targets.

Fails, for example, if `is_new` leaves out the items of the interests, if evidence is not divided by it, if the target's
own place is taken as within a session, or if `group_popularity` adds up the whole group.
"""

from itertools import combinations

import numpy as np
import pytest
import torch

from nestpipe.data.batch import Batch, Jagged
from nestpipe.data.synthetic.histories import LONG_GAP_SECONDS, HistoryData, HistoryShape
from nestpipe.data.synthetic.history_baselines import BACK_OFF, Popularity, count, ranks_of_targets, transitions
from nestpipe.data.synthetic.history_oracle import HistoryOracle

TINY = HistoryShape(14, 0.7, 3, 2, 2, 0.55, 0.3, 0.25, median_length=4, length_spread=0.6, max_length=7)


def slow_mixture(data: HistoryData, own: tuple[int, ...], before: int | None, begins: bool) -> np.ndarray:
    """Returns [num_items] the probability of each item at one attempt, for a user of these interests."""
    shape, pop = data.shape, data.popularity
    items = range(shape.num_items)
    rest = 1 - shape.follow - shape.interest
    total = np.zeros(shape.num_items)
    follow, scale = (0.0, 1 - shape.follow) if begins else (shape.follow, 1.0)
    if not begins:
        led = [i for i in items if data.groups[i] == data.leads_to[before] and data.interests[i] in own]
        for i in led:
            total[i] += follow * pop[i] / sum(pop[j] for j in led)
    for interest in own:
        members = [i for i in items if data.interests[i] == interest]
        for i in members:
            total[i] += shape.interest / scale / len(own) * pop[i] / sum(pop[j] for j in members)
    return total + rest / scale * pop / pop.sum()


def slow_probabilities(data: HistoryData, items: list[int], begins: list[bool]) -> np.ndarray:
    joint = np.zeros(data.shape.num_items)
    for own in combinations(range(data.shape.num_interests), data.shape.interests_a_user):
        likelihood = 1.0
        for place in range(len(items) + 1):
            new = slow_mixture(data, own, items[place - 1] if place else None, begins[place])
            new[items[:place]] = 0.0
            new /= new.sum()
            if place < len(items):
                likelihood *= new[items[place]]
        joint += likelihood * new
    return joint / joint.sum()


@pytest.mark.parametrize("interests_a_user", [1, 2, 3])
def test_against_enumeration(interests_a_user: int) -> None:
    data = HistoryData(3, shape=HistoryShape(**{**TINY.__dict__, "interests_a_user": interests_a_user}))
    batch = data.samples(0, 60)
    probabilities = HistoryOracle(data).probabilities(batch).numpy()
    offsets = batch.keys["history"].offsets.tolist()
    for sample in range(60):
        items = batch.keys["history"].values[offsets[sample] : offsets[sample + 1]].tolist()
        gaps = batch.inputs["times"][sample].diff()[: len(items)]
        slow = slow_probabilities(data, items, [True, *(gaps >= LONG_GAP_SECONDS[0]).tolist()])
        assert probabilities[sample] == pytest.approx(slow, rel=1e-9, abs=1e-15)


def test_adds_up_to_1_over_the_corpus_without_the_history() -> None:
    data = HistoryData(1)
    batch = data.samples(0, 50)
    probabilities = HistoryOracle(data).probabilities(batch)
    assert torch.allclose(probabilities.sum(1), torch.ones(50, dtype=torch.float64), rtol=1e-12)
    history = batch.keys["history"]
    history_probabilities = probabilities[torch.arange(50).repeat_interleave(history.lengths), history.values]
    assert bool((history_probabilities == 0).all())
    assert int((probabilities == 0).sum()) == len(history.values)


def test_is_what_the_generator_does() -> None:
    """Among many users with the same two items, targets are as frequent as the oracle expects."""
    shape = HistoryShape(6, 0.5, 2, 1, 2, 0.5, 0.3, 0.3, median_length=2, length_spread=0, max_length=2)
    data = HistoryData(2, shape=shape)
    batch = data.samples(0, 60_000)
    pairs = batch.keys["history"].values.view(-1, 2)
    begins = batch.inputs["times"].diff() >= LONG_GAP_SECONDS[0]
    kinds, which = torch.cat([pairs, begins.long()], dim=1).unique(dim=0, return_inverse=True)
    firsts = torch.full((len(kinds),), len(pairs)).scatter_reduce_(0, which, torch.arange(len(pairs)), "amin")
    counts = torch.zeros(len(kinds), 6).index_put_(
        (which, batch.keys["target"].values), torch.ones(len(pairs)), accumulate=True
    )
    expected = HistoryOracle(data).probabilities(batch[firsts]) * counts.sum(1, keepdim=True)
    squares = ((counts - expected) ** 2 / expected)[expected > 5]
    # Chi-square has mean 1 for each free cell.
    assert len(squares) > 300
    assert float(squares.mean()) == pytest.approx(0.75, abs=0.15)


def test_times_matter() -> None:
    """After a long gap before the target, the last item leads to nothing. The model sees that time, too."""
    data = HistoryData(1)
    batch = data.samples(0, 1)
    times, length = batch.inputs["times"].clone(), int(batch.keys["history"].lengths[0])
    answers = []
    for gap in (10, LONG_GAP_SECONDS[0]):
        times[0, length] = times[0, length - 1] + gap
        answers.append(HistoryOracle(data).probabilities(Batch(batch.keys, {"times": times}))[0])
    led = torch.from_numpy(data.groups == data.leads_to[int(batch.keys["history"].values[-1])])
    assert float(answers[0][led].sum()) > data.shape.follow
    assert float(answers[1][led].sum()) < 0.2


def test_without_a_history() -> None:
    data = HistoryData(1, shape=TINY)
    empty = Batch(
        {"history": Jagged.from_lists([[]]), "target": Jagged.from_lists([[0]])}, {"times": torch.zeros(1, 8).long()}
    )
    assert HistoryOracle(data).probabilities(empty)[0].numpy() == pytest.approx(slow_probabilities(data, [], [True]))


def test_too_many_sets() -> None:
    with pytest.raises(ValueError, match="one of 886163135 sets, too many to weigh"):
        HistoryOracle(HistoryData(shape=HistoryShape(num_interests=45, interests_a_user=9, num_groups=10)))


def test_baselines_count() -> None:
    data = HistoryData(4, shape=TINY)
    popularity, bigram = count(data, 14, 5, 20_000)
    items, following = transitions(data.samples(5, 20_000))
    assert popularity.counts.tolist() == torch.bincount(following, minlength=14).tolist()
    batch = data.samples(0, 40)
    last = batch.keys["history"].values[batch.keys["history"].offsets[1:] - 1]
    scores = bigram.scores(batch)
    for row, item in zip(scores, last.tolist(), strict=True):
        expected = torch.bincount(following[items == item], minlength=14) + BACK_OFF * popularity.counts / len(items)
        assert torch.allclose(row, expected)


def test_the_more_is_known_the_better() -> None:
    """Hit rates at 10: the oracle is clearly above the bigram, which is clearly above the popularity."""
    data = HistoryData(1)
    popularity, bigram = count(data, data.shape.num_items, 0, 10_000)
    batch = data.samples(2**40, 400)
    oracle, second, third = (
        float((ranks_of_targets(guess.scores(batch), batch) <= 10).double().mean())
        for guess in (HistoryOracle(data), bigram, popularity)
    )
    assert oracle > 2 * second > 4 * third


def test_ranks_of_targets() -> None:
    """The smaller key wins a tie, and items of the history do not count."""
    batch = Batch({"history": Jagged.from_lists([[0], [], [3, 4]]), "target": Jagged.from_lists([[2], [2], [0]])})
    scores = torch.tensor([[9.0, 5, 5, 5, 1], [9, 5, 5, 5, 1], [1, 0, 2, 9, 9]])
    assert ranks_of_targets(scores, batch).tolist() == [2, 3, 2]
    assert Popularity(torch.arange(5.0)).scores(batch).shape == (3, 5)
