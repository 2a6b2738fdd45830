"""The synthetic click log: samples do not depend on how they are asked for, and have the documented distributions.

Fails, for example, if stream numbers its words by index in the batch, if sessions continue beyond their block, or if
`click` is drawn with a probability 5% higher than the one given.
"""

import numpy as np
import pytest
import torch

from nestpipe.data.batch import Batch
from nestpipe.data.dataset import Batches
from nestpipe.data.synthetic.clicks import BLOCK, NUM_USER_FIELDS, NUM_VALUES, SESSIONS, ClickData
from nestpipe.data.synthetic.draws import stream, zipf_values
from nestpipe.evaluation.clicks import auc, normalised_entropy

SMALL = ClickData(seed=5, scale=0.01)


def tensors(batch: Batch) -> dict[str, torch.Tensor]:
    return {name: jagged.values for name, jagged in batch.keys.items()} | dict(batch.inputs)


def assert_equal(got: Batch, expected: Batch) -> None:
    expected_tensors = tensors(expected)
    assert tensors(got).keys() == expected_tensors.keys()
    for name, values in tensors(got).items():
        assert values.dtype == expected_tensors[name].dtype
        assert torch.equal(values, expected_tensors[name]), name


def key_columns(batch: Batch) -> torch.Tensor:
    """Returns [fields, samples] keys."""
    return torch.stack([jagged.values for jagged in batch.keys.values()])


def test_shapes() -> None:
    batch = SMALL.samples(0, 7)
    assert tuple(batch.keys) == SMALL.feature_names == tuple(f"c{field:02}" for field in range(26))
    assert all(jagged.lengths.tolist() == [1] * 7 for jagged in batch.keys.values())
    assert {name: (values.dtype, tuple(values.shape)) for name, values in batch.inputs.items()} == {
        "dense": (torch.float32, (7, 13)),
        "click": (torch.float32, (7,)),
        "click_probability": (torch.float32, (7,)),
    }


@pytest.mark.parametrize("first", [0, 1, 1000, 10**12 + 17])
@pytest.mark.parametrize("sizes", [[1] * 40, [3, 0, 20, 17], [39, 1], [8, 32], [0, 40]])
def test_any_slicing_gives_the_same_samples(first: int, sizes: list[int]) -> None:
    whole = ClickData(seed=5, scale=0.01).samples(first, 40)
    starts = np.cumsum([0, *sizes])
    for start, size in zip(starts, sizes, strict=False):
        assert_equal(SMALL.samples(first + int(start), size), whole[slice(start, start + size)])


def test_a_long_batch_has_the_samples_of_short_ones() -> None:
    whole = SMALL.samples(500, 4096)
    for start, size in ((0, 7), (1023, 33), (4095, 1)):
        assert_equal(SMALL.samples(500 + start, size), whole[slice(start, start + size)])


def test_known_samples() -> None:
    """Recorded results of training stay valid only while these do not change."""
    batch = ClickData(seed=1).samples(10**6, 2)
    assert batch.keys["c00"].values.tolist() == [1319622840071630966, 4724092572968253414]
    assert batch.keys["c25"].values.tolist() == [275102768331184735, 275102768331184735]
    assert batch.inputs["dense"][:, 0].tolist() == [1.3567590713500977, -0.9668520092964172]
    assert batch.inputs["click_probability"].tolist() == pytest.approx([0.0870880783, 0.0516733043], rel=1e-6)


def test_seeds_differ_in_samples_only() -> None:
    one, other = (ClickData(seed=seed, scale=0.01).samples(0, 4000) for seed in (1, 2))
    assert not torch.equal(one.inputs["dense"], other.inputs["dense"])
    same = (key_columns(one) == key_columns(other)).double().mean(1)
    assert same.max() < 0.5
    for field in range(26):  # the most frequent keys are the same for every seed
        top = [torch.mode(key_columns(batch)[field]).values for batch in (one, other)]
        assert top[0] == top[1]


def test_ranks_share_the_global_batch() -> None:
    data = ClickData(seed=3, num_samples=100, scale=0.01)
    alone = list(Batches(data, 48))
    ranks = [list(Batches(data, 16, rank, 3)) for rank in range(3)]
    for step, batch in enumerate(alone):
        parts = [tensors(ranks[rank][step]) for rank in range(3)]
        for name, values in tensors(batch).items():
            assert torch.equal(torch.cat([part[name] for part in parts]), values)
    assert [len(batches[-1]) for batches in ranks] == [4, 0, 0]


def test_goes_on_at_a_position() -> None:
    batches = Batches(SMALL, 32)
    for _ in range(3):
        next(batches)
    other = Batches(SMALL, 16, rank=1, world_size=2)
    other.load_state(batches.state())
    assert_equal(next(other), next(batches)[16:])


@pytest.mark.parametrize("skew", [0.0, 0.8, 1.05, 1.5])
@pytest.mark.parametrize("field", [0, 13, 19, 25])
def test_values_are_zipf_distributed(skew: float, field: int) -> None:
    num_draws, num_values = 300_000, NUM_VALUES[field]
    words = stream(f"value {field}", 0, np.arange(num_draws))
    values = zipf_values(ClickData(skew=skew)._quantiles[field], words).astype(np.int64)
    share = np.arange(1, num_values + 1) ** -skew
    share /= share.sum()
    # Compares the first values one by one, rare ones in ever larger groups; allows 5 deviations and a cell.
    starts = np.unique(np.geomspace(1, num_values, 40).astype(int)) - 1
    expected = num_draws * np.add.reduceat(share, starts)
    got = np.add.reduceat(np.bincount(values, minlength=num_values), starts)
    assert len(got) == len(starts)
    assert np.all(np.abs(got - expected) <= 5 * np.sqrt(expected) + num_draws / 2**16)


def test_the_keys_of_the_default_are_skewed() -> None:
    """The most frequent keys of a field have the shares of a Zipf distribution with exponent 1.05."""
    columns = key_columns(ClickData().samples(0, 100_000))
    for field in (13, 19, 25):
        counts = columns[field].unique(return_counts=True)[1].sort(descending=True).values
        weights = torch.arange(1, NUM_VALUES[field] + 1).double() ** -1.05
        assert (counts[:5] / 100_000 - (weights / weights.sum())[:5]).abs().max() < 0.005


def test_keys_are_scattered_and_of_one_field_only() -> None:
    columns = key_columns(ClickData().samples(0, 20_000))
    distinct = [set(column.tolist()) for column in columns]
    assert sum(map(len, distinct)) == len(set.union(*distinct))
    keys = columns.unique()
    assert keys.min() >= 0
    # They are spread evenly over 63 bits.
    shares = torch.bincount(keys >> 60, minlength=8) / len(keys)
    assert shares.sub(0.125).abs().max() < 0.01
    assert (((keys[:, None] >> torch.arange(63)) & 1).double().mean(0) - 0.5).abs().max() < 0.02
    assert [len(values) for values in distinct[-2:]] == [15, 10]
    assert len(distinct[10]) > 5000


def test_a_session_shares_the_keys_of_the_user() -> None:
    columns = key_columns(ClickData(seed=2).samples(3 * BLOCK, BLOCK))
    users = columns[:NUM_USER_FIELDS].T
    sessions, which = users.unique(dim=0, return_inverse=True)
    assert 0.9 * SESSIONS < len(sessions) <= SESSIONS  # a few have no sample: (1 - 1 / 256) ** 1024 of them
    assert torch.bincount(which).double().mean() == pytest.approx(BLOCK / SESSIONS, rel=0.1)
    assert len(columns[NUM_USER_FIELDS:].T.unique(dim=0)) == BLOCK
    # Two neighbours are rarely of one session, and no session continues beyond its block.
    assert (which[1:] == which[:-1]).double().mean() < 0.05
    following = key_columns(ClickData(seed=2).samples(4 * BLOCK, BLOCK))[:NUM_USER_FIELDS].T
    assert len(torch.cat([users, following]).unique(dim=0)) == len(sessions) + len(following.unique(dim=0))


def test_dense_features_are_standard_and_independent() -> None:
    dense = SMALL.samples(0, 50_000).inputs["dense"].double()
    assert dense.mean(0).abs().max() < 0.02
    assert (torch.cov(dense.T) - torch.eye(13)).abs().max() < 0.03
    assert ((dense.abs() < 1).double().mean(0) - 0.68).abs().max() < 0.02


def test_clicks_have_the_probability_given() -> None:
    inputs = ClickData(seed=1).samples(0, 100_000).inputs
    probability, click = inputs["click_probability"].double(), inputs["click"].double()
    assert set(click.unique().tolist()) == {0.0, 1.0}
    for part in probability.argsort().tensor_split(10):
        deviation = (probability[part] * (1 - probability[part])).sum().sqrt()
        assert abs(click[part].sum() - probability[part].sum()) < 4 * deviation


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_how_well_clicks_can_be_predicted(seed: int) -> None:
    inputs = ClickData(seed=seed).samples(10**9, 50_000).inputs
    probability, click = inputs["click_probability"].double(), inputs["click"]
    assert 0.2 < click.mean() < 0.3
    assert 0.82 < auc(probability, click) < 0.85
    assert 0.72 < normalised_entropy(torch.logit(probability), click) < 0.76


def test_end_of_data() -> None:
    data = ClickData(num_samples=10, scale=0.01)
    assert len(data.samples(10, 0)) == 0
    assert data.samples(10, 0).inputs["dense"].shape == (0, 13)
    for first, count in ((8, 3), (-1, 2), (0, -1)):
        with pytest.raises(ValueError, match="were asked for"):
            data.samples(first, count)


@pytest.mark.parametrize("wrong", [{"num_samples": -1}, {"skew": -0.1}, {"scale": 0.0}])
def test_refuses_bad_arguments(wrong: dict) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is"):
        ClickData(**wrong)
