"""The input of the model: rows at the occurrences of keys, of tables with and without a common group.

Fails, for example, if Embeddings.table_rows takes the group's first table for every feature, or if
HostOccurrences.part ignores that each earlier micro-batch has one offset more than samples.
"""

import pytest
import torch
from torch import Tensor

from nestpipe import Batch, Pooled, Sequence, Table
from nestpipe.data import Jagged
from nestpipe.embedding.cluster import GIVEN_ORDER
from nestpipe.embedding.dedup import BatchDedup, dedup_batch
from nestpipe.embedding.features import Embeddings, SequenceEmbedding
from nestpipe.embedding.group import FeatureGroups, group_features
from nestpipe.embedding.model_rows import ModelRows

PADDING = -7


def embedded(features: FeatureGroups, batch: BatchDedup, micro_batch: int, tables: dict[str, Tensor]) -> Embeddings:
    """Returns embeddings of a micro-batch. Row k of a table is that of key k."""
    rows = []
    for group in batch.groups:
        positions = group.row_positions[group.rows_of(micro_batch)]
        table_keys = group.keys[positions].split(group.row_counts[micro_batch].tolist())
        named = zip(group.group.names, table_keys, strict=True)
        rows.append(ModelRows(torch.cat([tables[name][keys] for name, keys in named])))
    return Embeddings(features, batch.groups, micro_batch, rows)


def test_side_by_side_is_cat() -> None:
    """Fails if side_by_side takes the features in their own order."""
    table, other = Table("a", 4), Table("b", 3)
    features = group_features({"x": Pooled(table), "y": Pooled(other, "mean"), "z": Sequence(table)})
    lists = Jagged.from_lists([[0], [1, 1, 2]])
    batch = dedup_batch(features, Batch(dict.fromkeys("xyz", lists)), 1, 1)
    embeddings = embedded(features, batch, 0, {"a": torch.randn(3, 4), "b": torch.randn(3, 3)})
    assert torch.equal(embeddings.side_by_side(["y", "x"]), torch.cat([embeddings["y"], embeddings["x"]], dim=1))
    with pytest.raises(ValueError, match="'z' is a sequence"):
        embeddings.side_by_side()
    with pytest.raises(KeyError, match="there is no feature 'w'"):
        embeddings.side_by_side(["w"])


@pytest.mark.parametrize("names", ["cdab", "dba"], ids=["all tables", "not all"])
def test_side_by_side_has_the_bits_of_each_feature_alone(names: str) -> None:
    """Has two groups of tables, one of which has no row in the second micro-batch.

    Fails if Embeddings._rows_in takes the group's first row for every feature, or counts rows in the order of the
    names; or if _whole_groups takes rows for whole that the features do not cover, whose gradients nobody sets.
    """
    tables = {"a": Table("a", 2), "b": Table("b", 2), "c": Table("c", 2), "d": Table("d", 3)}
    modes = {"a": "mean", "b": "sum", "c": "sum", "d": "sum"}
    features = group_features({name: Pooled(table, modes[name]) for name, table in tables.items()})
    lists = {name: [[1, 2, 2], [], [5, 1], [4, 4]] for name in "acd"} | {"b": [[3], [3, 0], [], []]}
    batch = dedup_batch(features, Batch({name: Jagged.from_lists(keys) for name, keys in lists.items()}), 2, 2)
    generator = torch.Generator().manual_seed(1)
    values = {name: torch.randn(6, table.dim, generator=generator) for name, table in tables.items()}
    for i in range(2):
        together, alone = (embedded(features, batch, i, values) for _ in range(2))
        for embeddings in (together, alone):
            for rows in embeddings._rows:
                rows.variable.requires_grad_()
        wide = together.side_by_side(names)
        parts = torch.cat([alone[name] for name in names], dim=1)
        assert torch.equal(wide, parts)
        gradient = torch.randn(wide.shape, generator=generator)
        wide.backward(gradient)
        parts.backward(gradient)
        assert all(
            torch.equal(x.take_gradient(), y.take_gradient()) for x, y in zip(together._rows, alone._rows, strict=True)
        )


def test_every_feature_has_the_rows_of_its_own_table() -> None:
    """Has three tables of a group and one of another, different numbers of keys, padding, weights, and a table with two
    features."""
    a, b, c, d = Table("a", 2), Table("b", 2), Table("c", 2), Table("d", 3)
    features = group_features(
        {
            "c_keys": Pooled(c, "mean", padding_key=PADDING),
            "b_keys": Sequence(b, padding_key=PADDING),
            "a_keys": Pooled(a),
            "b_keys_again": Pooled(b),
            "d_keys": Pooled(d),
        }
    )
    assert [group.names for group in features.groups] == [("a", "b", "c"), ("d",)]
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(0, 4, (5, 9), generator=generator)
    offsets = torch.cat([torch.zeros(5, 1, dtype=torch.int64), lengths.cumsum(1)], dim=1)
    keys = {}
    for name, bounds in zip(features.features, offsets, strict=True):
        values = torch.randint(0, 6, (int(bounds[-1]),), generator=generator)
        if features.features[name].padding_key is not None:
            values[::4] = PADDING
        weights = torch.rand(len(values), generator=generator) + 0.5 if name in ("c_keys", "a_keys") else None
        keys[name] = Jagged(values, bounds, weights)
    whole = Batch(keys)
    tables = {table.name: torch.randn(6, table.dim, generator=generator) for table in (a, b, c, d)}
    batch = dedup_batch(features, whole, 3, 2, 1, GIVEN_ORDER)
    first = 0
    for i in range(3):
        embeddings = embedded(features, batch, i, tables)
        part = whole[first : first + batch.num_samples[i]]
        first += batch.num_samples[i]
        assert list(embeddings) == list(features.features)
        for name, feature in features.features.items():
            value, jagged = embeddings[name], part.keys[name]
            expected = [vectors_of(feature, jagged, s, tables[feature.table.name]) for s in range(len(jagged))]
            if isinstance(value, SequenceEmbedding):
                assert value.host_lengths == value.lengths.tolist() == jagged.offsets.diff().tolist()
                torch.testing.assert_close(value.values, torch.cat(expected))
            else:
                torch.testing.assert_close(value, torch.stack(expected))
    assert first == len(whole)


def vectors_of(feature: Pooled | Sequence, jagged: Jagged, sample: int, table: Tensor) -> Tensor:
    span = slice(int(jagged.offsets[sample]), int(jagged.offsets[sample + 1]))
    keys = jagged.values[span]
    present = (keys != PADDING).float()
    vectors = table[keys.clamp(min=0)] * present[:, None]
    if isinstance(feature, Sequence):
        return vectors
    weights = torch.ones(len(keys)) if jagged.weights is None else jagged.weights[span]
    total = (vectors * weights[:, None]).sum(0)
    divisor = float((weights * present).sum()) if feature.mode == "mean" else 1.0
    return total / (divisor or 1.0)
