"""Clustering: has every sample once, equals the plain version, and finds planted structure.

Fails, for example, if a refinement counts a sample's own keys as present in its part (`> 1` made `> 0`), if padding is
taken for key 0, if singles count as shared (`uses > 1` made `> 0`), or if a sample stays in a part that is too full.
"""

import random
import threading
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from nestpipe.data.batch import Jagged
from nestpipe.data.synthetic.sequences import SequenceData
from nestpipe.embedding.cluster import CLUSTER_COSTS, CLUSTER_METHODS, Clustering
from nestpipe.store import cluster, unique
from tests.embedding import plain_cluster
from tests.streams import key_streams

Lists = list[list[int]]
NATIVE = ("spectral", "minhash")


def numbered(features: Sequence[Jagged]) -> tuple[list[Jagged], int]:
    distinct, inverse = unique(torch.cat([feature.values for feature in features]))
    numbers = inverse.split([len(feature.values) for feature in features])
    return [Jagged(n, feature.offsets) for n, feature in zip(numbers, features, strict=True)], len(distinct)


def parts_of(lists: Lists, num_parts: int, method: str = "spectral", cost: str = "keys", seed: int = 0) -> list[Tensor]:
    num_distinct = max((key for keys in lists for key in keys), default=-1) + 1
    return Clustering(method, cost, seed).parts([Jagged.from_lists(lists)], num_distinct, num_parts)


def assert_partition(parts: list[Tensor], num_samples: int, num_parts: int) -> None:
    assert len(parts) == num_parts
    assert all(part.dtype == torch.int64 and bool((part.diff() > 0).all()) for part in parts)
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(num_samples))


def zipf_lists(num_samples: int, num_keys: int, most: int, seed: int) -> Lists:
    draw = random.Random(seed)
    return [[int(num_keys ** draw.random()) - 1 for _ in range(draw.randrange(most + 1))] for _ in range(num_samples)]


EDGES: dict[str, Lists] = {
    "no samples": [],
    "one sample": [[0, 1, 2]],
    "fewer samples than parts": [[0], [1, 0], [2]],
    "all keys equal": [[0]] * 40,
    "no keys at all": [[]] * 13,
    "only padding": [[-1, -1]] * 9,
    "nothing shared": [[i] for i in range(30)],
    "a huge list": [list(range(5000)), *([[i % 50] for i in range(60)])],
    "repeated keys": [[i % 3] * 7 for i in range(20)],
}


@pytest.mark.parametrize("num_parts", [1, 2, 3, 4, 8, 9, 70])
@pytest.mark.parametrize("method", CLUSTER_METHODS)
@pytest.mark.parametrize("lists", EDGES.values(), ids=EDGES)
def test_edges(lists: Lists, method: str, num_parts: int) -> None:
    for cost in CLUSTER_COSTS:
        assert_partition(parts_of(lists, num_parts, method, cost), len(lists), num_parts)


@pytest.mark.parametrize("stream", key_streams())
@pytest.mark.parametrize("method", CLUSTER_METHODS)
def test_adversarial_streams(stream: str, method: str) -> None:
    for keys in key_streams()[stream]:
        offsets = torch.arange(0, len(keys) + 3, 3).clamp(max=len(keys))
        features, num_distinct = numbered([Jagged(keys, offsets), Jagged(keys.flip(0), offsets)])
        for num_parts in (2, 3, 5):
            assert_partition(Clustering(method).parts(features, num_distinct, num_parts), len(offsets) - 1, num_parts)


@pytest.mark.parametrize("method", NATIVE)
@pytest.mark.parametrize("seed", range(12))
def test_against_the_plain_version(method: str, seed: int) -> None:
    draw = random.Random(seed)
    one = zipf_lists(draw.randrange(3, 80), 60, 8, seed)
    other = [[60 + key if draw.random() < 0.9 else -1 for key in keys[:3]] for keys in one]
    features = [Jagged.from_lists(one), Jagged.from_lists(other)]
    both = [a + b for a, b in zip(one, other, strict=True)]
    for num_parts in (1, 2, 3, 4, 8, 11):
        for cost in CLUSTER_COSTS:
            costs = Clustering(cost=cost).costs(features)
            lists = [(feature.values, feature.offsets) for feature in features]
            order, offsets = cluster(lists, 120, costs, num_parts, method, seed)
            expected = plain_cluster.cluster(both, costs.tolist(), num_parts, method, seed)
            assert order.tensor_split(offsets[1:-1])[0].tolist() == expected[0]
            assert [part.tolist() for part in order.tensor_split(offsets[1:-1])] == expected


@pytest.mark.parametrize(("num_groups", "num_uncut"), [(2, 2), (3, 2)])
def test_finds_groups_that_share_no_key(num_groups: int, num_uncut: int) -> None:
    """Groups are interleaved. Two parts have one of two groups each; of three groups they cut only one."""
    draw = random.Random(7)
    lists = [[100 * (s % num_groups) + draw.randrange(100) for _ in range(12)] for s in range(120 * num_groups)]
    for seed in range(3):
        one, other = (set((part % num_groups).tolist()) for part in parts_of(lists, 2, seed=seed))
        assert len(one ^ other) == num_uncut


@pytest.mark.parametrize("cost", CLUSTER_COSTS)
@pytest.mark.parametrize("num_parts", [2, 3, 4, 8])
def test_ends_are_small_and_others_balanced(cost: str, num_parts: int) -> None:
    features, num_distinct = numbered(list(SequenceData(seed=3).samples(0, 1024).keys.values()))
    clustering = Clustering("spectral", cost)
    costs = clustering.costs(features)
    parts = clustering.parts(features, num_distinct, num_parts)
    assert_partition(parts, 1024, num_parts)
    loads = torch.stack([costs[part].sum() for part in parts])
    between = loads if num_parts == 2 else loads[1:-1]
    assert between.max() <= 1.05 * between.mean()
    if num_parts > 2:
        assert max(loads[0], loads[-1]) <= 0.45 * between.mean() + (0 if cost == "keys" else costs.max() / 2)
        assert min(loads[0], loads[-1]) > 0.2 * between.mean()


def num_used(features: list[Jagged], parts: list[Tensor]) -> list[int]:
    return [len(torch.cat([feature.take(part).values for feature in features]).unique()) for part in parts]


def test_uses_fewer_keys_than_the_given_order() -> None:
    features, num_distinct = numbered(list(SequenceData(seed=3).samples(0, 512).keys.values()))
    given, spectral = (
        num_used(features, Clustering(method).parts(features, num_distinct, 4)) for method in ("none", "spectral")
    )
    assert sum(given) - sum(spectral) > 0.2 * (sum(given) - num_distinct)
    assert max(spectral[0], spectral[-1]) < 0.6 * min(given[0], given[-1])


@pytest.mark.parametrize("method", NATIVE)
def test_deterministic(method: str) -> None:
    """Every thread gets the same parts, whatever it clustered before. Another seed gives other parts."""
    lists = zipf_lists(300, 400, 10, seed=1)
    expected = [part.tolist() for part in parts_of(lists, 5, method)]
    results: list[list[list[int]]] = []

    def work() -> None:
        parts_of(zipf_lists(500, 5000, 20, seed=2), 9, method)
        results.append([part.tolist() for part in parts_of(lists, 5, method)])

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 3
    assert [part.tolist() for part in parts_of(lists, 5, method, seed=9)] != expected


def test_how_features_are_cut_does_not_matter() -> None:
    lists = [[0, 1], [1, 2], [3, 4], [4, 5]] * 10
    whole = parts_of(lists, 4)
    columns = [Jagged.from_lists([[keys[column]] for keys in lists]) for column in range(2)]
    parts = Clustering().parts(columns, 6, 4)
    assert [part.tolist() for part in parts] == [part.tolist() for part in whole]


def test_none_is_the_given_order() -> None:
    parts = parts_of([[0]] * 10, 4, "none")
    assert [part.tolist() for part in parts] == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]


def test_few_samples_leave_the_ends_empty() -> None:
    assert [len(part) for part in parts_of([[0], [1], [0]], 5)] == [0, 1, 1, 1, 0]


def test_needs_a_feature() -> None:
    with pytest.raises(ValueError, match="at least one feature"):
        Clustering().parts([], 0, 4)


def test_costs() -> None:
    features = [Jagged.from_lists([[1, 2], [], [3]]), Jagged.from_lists([[1], [], [-1]])]
    assert Clustering().costs(features).tolist() == [3, 1, 2]
    assert Clustering(cost="length_squared").costs(features).tolist() == [9, 1, 4]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"method": "metis"}, "cluster method 'metis' is none of spectral, minhash, none"),
        ({"cost": "length"}, "cluster cost 'length' is none of keys, length_squared"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_refuses_unknown_choices(wrong: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Clustering(**wrong)


def test_refuses_bad_arrays() -> None:
    index, offsets, cost = torch.tensor([0, 1]), torch.tensor([0, 1, 2]), torch.ones(2).double()
    cluster([(index, offsets)], 2, cost, 2)
    for arguments, text in (
        (([(index, offsets)], 1, cost, 2), "index is not below num_distinct"),
        (([(index, torch.tensor([0, 2, 1]))], 2, cost, 2), "offsets do not rise"),
        (([(index, offsets)], 2, cost * 0, 2), "a cost is not above 0"),
        (([(index, offsets)], 2, cost * 1e308, 2), "costs add up to more than"),
        (([(index, offsets)], 2, cost, 0), "num_parts is 0, must be 1 .. 4096"),
        (([(index, offsets)], 2, cost, 2, "other"), "method 'other' is none of"),
        (([(index, offsets[:2])], 2, cost, 2), "offsets must have shape"),
    ):
        with pytest.raises(ValueError, match=text):
            cluster(*arguments)
    with pytest.raises(TypeError, match=r"index must be torch\.int64"):
        cluster([(index.int(), offsets)], 2, cost, 2)
