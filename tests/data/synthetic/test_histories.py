"""Histories: samples do not depend on how they are asked for, and have the documented distributions.

Fails, for example, if `samples` numbers positions from 0, if `is_new` is taken as true, if `cells` are
those of any interests, or if `way` is not shifted where a session begins.
"""

import numpy as np
import pytest
import torch

from nestpipe.data.batch import Batch
from nestpipe.data.dataset import Batches
from nestpipe.data.synthetic.histories import LONG_GAP_SECONDS, SHORT_GAP_SECONDS, HistoryData, HistoryShape
from nestpipe.data.synthetic.history_baselines import transitions

DATA = HistoryData(seed=5)
KNOWN = ([19, 20, 17], [157, 33, 97, 177, 12], [1917, 848, 35], [2028698, 2028731, 2120227])
MANY = DATA.samples(0, 6000)


def assert_equal(got: Batch, expected: Batch) -> None:
    assert got.keys.keys() == expected.keys.keys() == {"history", "target"}
    for name, jagged in expected.keys.items():
        assert torch.equal(got.keys[name].values, jagged.values)
        assert torch.equal(got.keys[name].offsets, jagged.offsets)
    assert torch.equal(got.inputs["times"], expected.inputs["times"])


@pytest.mark.parametrize("first", [0, 1, 1000, 2**40 + 17])
@pytest.mark.parametrize("sizes", [[1] * 20, [3, 0, 10, 7], [0, 20]])
def test_any_slicing_gives_the_same_samples(first: int, sizes: list[int]) -> None:
    whole = HistoryData(seed=5).samples(first, 20)
    starts = np.cumsum([0, *sizes])
    for start, size in zip(starts, sizes, strict=False):
        part = DATA.samples(first + int(start), size)
        assert_equal(part, whole[slice(start, start + size)])
        assert part.weight == len(part.keys["history"].values)


def test_known_samples() -> None:
    """Recorded results of training stay valid only while these do not change."""
    batch = HistoryData(seed=1).samples(10**6, 3)
    assert batch.keys["history"].lengths.tolist() == KNOWN[0]
    assert batch.keys["history"].values[:5].tolist() == KNOWN[1]
    assert batch.keys["target"].values.tolist() == KNOWN[2]
    assert batch.inputs["times"][0, :3].tolist() == KNOWN[3]


def test_held_out_samples_are_others() -> None:
    one, other = DATA.samples(0, 50), DATA.samples(2**40, 50)
    assert not torch.equal(one.keys["target"].values, other.keys["target"].values)
    assert not torch.equal(one.keys["target"].values, HistoryData(seed=6).samples(0, 50).keys["target"].values)


def test_ranks_share_the_global_batch() -> None:
    data = HistoryData(seed=3, num_samples=50)
    alone = list(Batches(data, 24))
    ranks = [list(Batches(data, 8, rank, 3)) for rank in range(3)]
    for step, batch in enumerate(alone):
        values = [ranks[rank][step].keys["history"].values for rank in range(3)]
        assert torch.equal(torch.cat(values), batch.keys["history"].values)
        assert sum(ranks[rank][step].weights[""] for rank in range(3)) == batch.weights[""]
    assert [len(batches[-1]) for batches in ranks] == [2, 0, 0]


def test_no_item_repeats_and_the_target_is_not_in_the_history() -> None:
    history, target = MANY.keys["history"], MANY.keys["target"].values
    samples = torch.arange(len(MANY)).repeat_interleave(history.lengths)
    pairs = torch.cat([samples * DATA.shape.num_items + history.values, torch.arange(len(MANY)) * 2000 + target])
    assert len(pairs.unique()) == len(pairs)
    assert int(pairs.min()) >= 0
    assert int(history.values.max()) < DATA.shape.num_items


def test_no_item_repeats_in_a_small_corpus() -> None:
    """Most candidates for the last item are rejected, because the user has had half of the corpus."""
    shape = HistoryShape(20, 0.8, 2, 1, 2, 0.6, 0.25, median_length=10, length_spread=0, max_length=10)
    batch = HistoryData(1, shape=shape).samples(0, 500)
    rows = torch.cat([batch.keys["history"].values.view(500, 10), batch.keys["target"].values[:, None]], dim=1)
    assert all(len(set(row)) == 11 for row in rows.tolist())


def test_lengths_are_lognormal() -> None:
    shape = HistoryShape(max_length=200, length_spread=0.7, median_length=30)
    lengths = HistoryData(1, shape=shape).samples(0, 3000).keys["history"].lengths.double()
    assert lengths.min() >= 1
    assert lengths.median() == pytest.approx(30, rel=0.05)
    assert (lengths + 0.5).log().std() == pytest.approx(0.7, rel=0.05)
    assert int(MANY.keys["history"].lengths.max()) == DATA.shape.max_length


def test_times_tell_sessions() -> None:
    times, lengths = MANY.inputs["times"], MANY.keys["history"].lengths
    assert times.shape == (len(MANY), DATA.shape.max_length + 1)
    used = torch.arange(times.shape[1]) <= lengths[:, None]
    assert bool((times[~used] == 0).all())
    gaps = times.diff()[used[:, 1:]]
    is_long = gaps >= LONG_GAP_SECONDS[0]
    assert int(gaps[is_long].max()) <= LONG_GAP_SECONDS[1]
    assert int(gaps[~is_long].min()) >= SHORT_GAP_SECONDS[0]
    assert int(gaps[~is_long].max()) <= SHORT_GAP_SECONDS[1]
    assert is_long.double().mean() == pytest.approx(DATA.shape.new_session, abs=0.01)


def test_interests_are_sets() -> None:
    users = DATA.user_interests(np.arange(4000, dtype=np.uint64))
    assert all(len(set(row)) == DATA.shape.interests_a_user for row in users.tolist())
    counts = np.bincount(users.flatten(), minlength=DATA.shape.num_interests)
    assert counts / 4000 == pytest.approx(DATA.shape.interests_a_user / DATA.shape.num_interests, rel=0.2)


def test_items_follow_within_sessions_only() -> None:
    """Checks which next items the last one leads to, and are of the user's interests, with and without a new session.

    Items that the user had are drawn again, which changes the shares a little.
    """
    items, following = (part.numpy() for part in transitions(MANY))
    lengths, shape = MANY.keys["history"].lengths, DATA.shape
    begins = (MANY.inputs["times"].diff() >= LONG_GAP_SECONDS[0])[torch.arange(shape.max_length) < lengths[:, None]]
    users = DATA.user_interests(np.arange(len(MANY), dtype=np.uint64)).repeat(lengths.numpy(), axis=0)
    is_own = (DATA.interests[following][:, None] == users).any(axis=1)
    leads = DATA.leads_to[items] == DATA.groups[following]
    own, chance = shape.interests_a_user / shape.num_interests, 1 / shape.num_groups
    for new, follow in ((False, shape.follow), (True, 0.0)):
        share = shape.interest / (1 if not new else 1 - shape.follow)
        is_chosen = begins.numpy() == new
        assert (leads & is_own)[is_chosen].mean() == pytest.approx(
            follow + (share + (1 - follow - share) * own) * chance, abs=0.04
        )
        assert is_own[is_chosen].mean() == pytest.approx(follow + share + (1 - follow - share) * own, abs=0.04)


def test_first_items_are_zipf_distributed() -> None:
    """All interests are equally frequent, so the popularity within an interest is visible."""
    first = MANY.keys["history"].values[MANY.keys["history"].offsets[:-1]].numpy()
    shape = DATA.shape
    share = shape.interest / (1 - shape.follow)
    for low, high in ((0, 20), (20, 200), (200, 2000)):
        popular_share = DATA.popularity[low:high].sum() / DATA.popularity.sum()
        per_interest = np.bincount(DATA.interests, DATA.popularity)
        interest_share = (DATA.popularity / per_interest[DATA.interests])[low:high].sum() / shape.num_interests
        got = ((first >= low) & (first < high)).mean()
        assert got == pytest.approx(share * interest_share + (1 - share) * popular_share, abs=0.02)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_items": 100}, "num_items is 100, must be at least num_interests \\* num_groups = 500"),
        ({"follow": 0.7, "interest": 0.3}, "follow \\+ interest is 1.0, must be below 1"),
        ({"interests_a_user": 21}, "interests_a_user is 21, but there are num_interests = 20"),
        ({"skew": -1.0}, "skew is -1.0"),
        ({"new_session": 2.0}, "new_session is 2.0, must be a probability"),
        ({"num_groups": 0}, "num_groups is 0, must be at least 1"),
        ({"max_length": 5000}, "max_length is 5000, must be below 4096"),
    ],
)
def test_shapes_that_cannot_be(changes: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        HistoryShape(**changes)  # type: ignore[arg-type]


def test_end_of_data() -> None:
    data = HistoryData(num_samples=10)
    assert len(data.samples(10, 0)) == 0
    for first, count in ((8, 3), (-1, 2), (0, -1)):
        with pytest.raises(ValueError, match="were asked for"):
            data.samples(first, count)
    with pytest.raises(ValueError, match="num_samples is -1"):
        HistoryData(num_samples=-1)
