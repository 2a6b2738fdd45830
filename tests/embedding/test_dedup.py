"""The requester's dedup of a batch against the same in plain Python, for every group, rank and micro-batch.

Fails, for example, if contiguous_keys takes the keys of features in the order of the batch, if _split ignores the
order of the micro-batches, if _cluster_lists numbers keys group by group, or if HostOccurrences.part gives a feature
without weights the ones that stand in for them.
"""

import re
from itertools import pairwise
from typing import Any

import pytest
import torch

from nestpipe import Batch, Pooled, Sequence, Table
from nestpipe.data import Jagged
from nestpipe.embedding.cluster import GIVEN_ORDER, Clustering
from nestpipe.embedding.dedup import RequesterDedup, _cluster_lists, _distinct, dedup_batch
from nestpipe.embedding.group import FeatureGroups, group_features
from nestpipe.embedding.optim import SGD, RowOptimizer
from tests.store.native.key_batches import owner

PADDING = -7
NUM_SAMPLES = 13


class Own(RowOptimizer):
    """Compared by identity: each object makes a group of its own."""

    def update(self, rows: Any, state: Any, gradient: Any, step: int, lr: float) -> None:
        pass  # these tests train nothing


def make_features(optimizers: dict[str, RowOptimizer], dims: dict[str, int]) -> FeatureGroups:
    tables = {name: Table(name, dims.get(name, 2), optimizer=made) for name, made in optimizers.items()}
    return group_features(
        {
            "d_keys": Pooled(tables["d"], "mean", padding_key=PADDING),
            "b_keys": Sequence(tables["b"], padding_key=PADDING),
            "a_keys": Pooled(tables["a"]),
            "b_keys_again": Pooled(tables["b"]),
            "c_keys": Pooled(tables["c"], padding_key=3),
        }
    )


def make_batch(seed: int = 0, num_samples: int = NUM_SAMPLES, num_keys: int = 9) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    keys = {}
    for name in ("d_keys", "b_keys", "a_keys", "b_keys_again", "c_keys"):
        lengths = torch.randint(0, 5, (num_samples,), generator=generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        values = torch.randint(0, num_keys, (int(offsets[-1]),), generator=generator) * (-1) ** seed
        if name in ("d_keys", "b_keys"):
            values[::5] = PADDING
        weights = torch.rand(len(values), generator=generator) if name in ("d_keys", "b_keys_again") else None
        keys[name] = Jagged(values, offsets, weights)
    return Batch(keys, {"number": torch.arange(num_samples)})


GROUPED = make_features({name: SGD(0.1) for name in "abcd"}, {"d": 3})
"""Tables a, b and c are one group."""


def check_group(
    features: FeatureGroups, got: RequesterDedup, batch: Batch, parts: list[list[int]], world_size: int
) -> None:
    """Checks the dedup of a group."""
    group = got.group
    used: dict[tuple[int, int], None] = {}  # (table, key) in order of first use
    for table, name in zip(group.feature_tables.tolist(), group.features, strict=True):
        padding = features.features[name].padding_key
        used |= dict.fromkeys((table, key) for key in batch.keys[name].values.tolist() if key != padding)
    owners = {(t, key): owner(key, group.names[t], world_size) for t, key in used}
    ordered = sorted(used, key=lambda item: (owners[item], item[0]))  # stable: first use
    positions = {item: place for place, item in enumerate(ordered)}
    assert got.keys.tolist() == [key for _, key in ordered]
    counts = [[0] * len(group.tables) for _ in range(world_size)]
    for item in ordered:
        counts[owners[item]][item[0]] += 1
    assert got.counts.tolist() == counts

    seen: set[int] = set()
    masks = [0] * len(ordered)
    for i, samples in enumerate(parts):
        rows = check_part(features, got, batch, i, samples, positions)
        own = slice(*got.row_offsets[i : i + 2])
        assert got.rows_of(i) == own
        assert got.row_positions[own].tolist() == [positions[item] for item in rows]
        assert got.is_first[own].tolist() == [positions[item] not in seen for item in rows]
        assert got.num_rows(i) == len(rows)
        assert got.row_counts[i].tolist() == [sum(t == table for t, _ in rows) for table in range(len(group.tables))]
        seen |= {positions[item] for item in rows}
        for item in rows:
            masks[positions[item]] |= 1 << i
    assert seen == set(range(len(ordered)))
    assert [int.from_bytes(bytes(mask), "little") for mask in got.uses.tolist()] == masks


def check_part(
    features: FeatureGroups,
    got: RequesterDedup,
    batch: Batch,
    micro_batch: int,
    samples: list[int],
    positions: dict[tuple[int, int], int],
) -> list[tuple[int, int]]:
    """Checks the occurrences of one micro-batch; returns its rows."""
    group = got.group
    lists = {
        name: [batch.keys[name].values[span].tolist() for span in spans(batch, name, samples)]
        for name in group.features
    }
    tables = dict(zip(group.features, group.feature_tables.tolist(), strict=True))
    used = {
        (tables[name], key)
        for name, sample_keys in lists.items()
        for keys in sample_keys
        for key in keys
        if key != features.features[name].padding_key
    }
    rows = sorted(used, key=lambda item: (item[0], positions[item]))
    for f, name in enumerate(group.features):
        part, table_keys = got.occurrences.part(micro_batch, f), [key for t, key in rows if t == tables[name]]
        flat = [key for keys in lists[name] for key in keys]
        padding = features.features[name].padding_key
        assert part.index.tolist() == [len(table_keys) if key == padding else table_keys.index(key) for key in flat]
        lengths = [len(keys) for keys in lists[name]]
        assert part.offsets[0] == 0
        assert part.offsets.diff().tolist() == lengths
        weights = batch.keys[name].weights
        if weights is None:
            assert part.weights is None
        else:
            pieces = [weights[span] for span in spans(batch, name, samples)]
            assert part.weights is not None
            assert torch.equal(part.weights, torch.cat([*pieces, torch.empty(0)]).to(group.dtype))
    return rows


def spans(batch: Batch, name: str, samples: list[int]) -> list[slice]:
    bounds = list(pairwise(batch.keys[name].offsets.tolist()))
    return [slice(*bounds[sample]) for sample in samples]


@pytest.mark.parametrize("world_size", [1, 3, 1536])
@pytest.mark.parametrize(
    ("num_micro_batches", "method"), [(1, "spectral"), (3, "none"), (4, "spectral"), (11, "minhash"), (15, "none")]
)
@pytest.mark.parametrize("seed", [0, 1])
def test_against_plain_python(world_size: int, num_micro_batches: int, method: str, seed: int) -> None:
    """With 15 micro-batches of 13 samples some are empty, and a mask has two bytes."""
    batch = make_batch(seed)
    for num_threads in (1, 2):
        split = num_micro_batches, world_size, num_threads, Clustering(method)
        got = dedup_batch(GROUPED, batch, *split)
        assert [group.group.names for group in got.groups] == [("a", "b", "c"), ("d",)]
        parts = [inputs["number"].tolist() for inputs in got.inputs]
        assert sorted(sample for part in parts for sample in part) == list(range(NUM_SAMPLES))
        assert got.num_samples == list(map(len, parts))
        if method == "none":
            assert parts == [part.tolist() for part in torch.arange(NUM_SAMPLES).tensor_split(num_micro_batches)]
        for group in got.groups:
            check_group(GROUPED, group, batch, parts, world_size)


def groupings() -> dict[str, FeatureGroups]:
    one, other = Own(0.1), Own(0.1)
    return {
        "together": make_features(dict.fromkeys("abcd", one), {}),
        "interleaved": make_features({"a": one, "b": other, "c": one, "d": other}, {}),
        "apart": make_features({name: Own(0.1) for name in "abcd"}, {}),
    }


@pytest.mark.parametrize("method", ["spectral", "minhash"])
@pytest.mark.parametrize("world_size", [1, 3, 1536])
def test_clustering_does_not_depend_on_groups(method: str, world_size: int) -> None:
    """Fails if _cluster_lists numbers keys, or orders features, group after group."""
    batch = make_batch(2, num_samples=60, num_keys=40)
    parts, numbers = [], []
    for features in groupings().values():
        got = dedup_batch(features, batch, 6, world_size, 1, Clustering(method))
        parts.append([inputs["number"].tolist() for inputs in got.inputs])
        lists, num_distinct = _cluster_lists(
            features, [_distinct(group, batch, world_size, 1) for group in features.groups]
        )
        numbers.append((num_distinct, [(jagged.values.tolist(), jagged.offsets.tolist()) for jagged in lists]))
    assert [len(features.groups) for features in groupings().values()] == [1, 2, 4]
    assert parts[0] == parts[1] == parts[2]
    assert numbers[0] == numbers[1] == numbers[2]
    num_distinct, lists = numbers[0]
    assert {number for values, _ in lists for number in values} == set(range(-1, num_distinct))


@pytest.mark.parametrize("together", [True, False])
def test_a_key_outside_names_feature_and_sample(together: bool) -> None:
    """The key is behind samples without keys, in the second feature of a second table. Padding is never outside."""
    optimizers = dict.fromkeys("ab", SGD(0.1)) if together else {"a": SGD(0.1), "b": SGD(0.2)}
    a, b = (Table(name, 2, optimizer=o, num_keys=n) for (name, o), n in zip(optimizers.items(), (None, 5), strict=True))
    features = group_features({"x": Pooled(a), "y": Pooled(b, padding_key=-9), "z": Sequence(b)})
    fine, large = Jagged.from_lists([[], [4, -9], [], [0]]), Jagged.from_lists([[1], [], [2, 0], [3]])
    anything = Jagged.from_lists([[2**40], [], [-1], []])
    dedup_batch(features, Batch({"x": anything, "y": fine, "z": large}), 2, 3)
    for key in (5, -1, -9, 2**62):
        outside = Jagged(large.values.clone(), large.offsets)
        outside.values[2] = key
        text = f"feature 'z', sample 2: key {key} is outside 0 .. 4, the keys of table 'b' (num_keys = 5)"
        with pytest.raises(ValueError, match=re.escape(text)):
            dedup_batch(features, Batch({"x": anything, "y": fine, "z": outside}), 2, 3)


def test_keys_with_gaps_in_memory() -> None:
    """Fails if _contiguous returns its argument."""
    values = torch.arange(20)[::2]
    features = group_features({"x": Pooled(Table("a", 2))})
    with_gaps = dedup_batch(features, Batch({"x": Jagged(values, torch.tensor([0, 4, 10]))}), 2, 1, 1, GIVEN_ORDER)
    assert with_gaps.groups[0].keys.tolist() == list(range(0, 20, 2))
    assert [with_gaps.groups[0].num_rows(i) for i in range(2)] == [4, 6]


def test_a_rank_without_a_batch_takes_part_with_nothing() -> None:
    got = dedup_batch(GROUPED, None, 3, 4)
    assert not got.has_batch
    assert got.num_samples == [0, 0, 0]
    for group in got.groups:
        assert len(group.keys) == 0
        assert group.counts.shape == (4, len(group.group.tables))
        assert not group.counts.any()
        assert [group.num_rows(i) for i in range(3)] == [0, 0, 0]


def test_features_that_do_not_match() -> None:
    batch = Batch({"a_keys": Jagged.from_lists([[1]]), "new": Jagged.from_lists([[1]])})
    with pytest.raises(
        ValueError, match=r"missing \['b_keys', 'b_keys_again', 'c_keys', 'd_keys'\], unknown \['new'\]"
    ):
        dedup_batch(GROUPED, batch, 1, 1)
