"""Tables form one group if one call can handle them alike.

Fails, for example, if group_features leaves the dtype out of its key, or asks for the optimizer of a frozen table, if
group_key returns the class of a user's own optimizer instead of its identity, or if _group sorts features by name.
"""

import pytest
import torch
from torch import Tensor

from nestpipe import Pooled, Sequence, Table
from nestpipe.embedding.group import FeatureGroups, group_features
from nestpipe.embedding.optim import SGD, Adagrad, Adam, LearningRate, RowOptimizer, RowWiseAdagrad


class Own(RowOptimizer):
    def update(self, rows: Tensor, state: Tensor, gradient: Tensor, step: int, lr: float) -> None:
        rows.sub_(gradient * lr)


class FromOurs(SGD):
    """A subclass may change anything, so it is not equal to SGD."""


def halving(step: int) -> float:
    return 0.5**step


def grouped(*tables: Table) -> list[tuple[str, ...]]:
    return [group.names for group in group_features({table.name: Pooled(table) for table in tables}).groups]


def are_one_group(first: RowOptimizer, second: RowOptimizer) -> bool:
    return len(grouped(Table("a", 2, optimizer=first), Table("b", 2, optimizer=second))) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: SGD(0.1, weight_decay=0.5),
        lambda: Adagrad(0.1, 0.2, 1e-9, 0.3),
        lambda: RowWiseAdagrad(0.1, 0.2),
        lambda: Adam(0.1, (0.8, 0.99), 1e-7),
        lambda: Adam(0.1, [0.8, 0.99]),
        lambda: SGD(halving),
    ],
)
def test_equal_optimizers_are_one_group(make) -> None:
    """Optimizers are compared by value, also if a hyperparameter is a list."""
    assert are_one_group(make(), make())


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (SGD(0.1), SGD(0.2)),
        (SGD(0.1), SGD(0.1, weight_decay=0.1)),
        (Adagrad(0.1), RowWiseAdagrad(0.1)),
        (Adagrad(0.1), Adagrad(0.1, initial_accumulator=0.1)),
        (Adagrad(0.1), Adagrad(0.1, eps=1e-9)),
        (Adam(0.1), Adam(0.1, (0.9, 0.99))),
        (SGD(halving), SGD(lambda step: 0.5**step)),
        (SGD(halving), SGD(0.5)),
        (Own(0.1), Own(0.1)),
        (FromOurs(0.1), FromOurs(0.1)),
        (FromOurs(0.1), SGD(0.1)),
    ],
)
def test_optimizers_that_differ_or_may_differ_are_two(first: RowOptimizer, second: RowOptimizer) -> None:
    assert not are_one_group(first, second)
    assert are_one_group(first, first)


@pytest.mark.parametrize("optimizer", [SGD(0.1), Own(0.1)])
def test_dim_dtype_and_frozen(optimizer: RowOptimizer) -> None:
    def table(name: str, dim: int = 2, dtype: torch.dtype = torch.float32, frozen: bool = False) -> Table:
        return Table(name, dim, optimizer=optimizer, dtype=dtype, frozen=frozen)

    assert grouped(table("a"), table("b", dim=3)) == [("a",), ("b",)]
    assert grouped(table("a"), table("b", dtype=torch.float64)) == [("a",), ("b",)]
    assert grouped(table("a"), table("b", frozen=True)) == [("a",), ("b",)]
    assert grouped(table("a", frozen=True), table("b", frozen=True)) == [("a", "b")]


def test_what_else_may_differ() -> None:
    """Tables of a group may differ in max_rows, num_keys and init; frozen ones also in the optimizer."""
    lr: LearningRate = halving
    tables = Table("a", 2, optimizer=SGD(lr), num_keys=5), Table("b", 2, optimizer=SGD(lr), max_rows=7)
    assert grouped(*tables) == [("a", "b")]
    (group,) = group_features({table.name: Pooled(table) for table in tables}).groups
    assert group.most_rows[1] == 7 < group.most_rows[0]
    assert group.feature_keys[:, 5].tolist() == [5, 0]
    assert grouped(*(Table(n, 2, optimizer=o, frozen=True) for n, o in (("a", SGD(1)), ("b", Adam(1))))) == [("a", "b")]


def mixed() -> FeatureGroups:
    tables = {name: Table(name, dim) for name, dim in (("a", 4), ("b", 3), ("c", 4), ("d", 3), ("e", 5))}
    return group_features(
        {
            "z": Pooled(tables["c"], padding_key=-1),
            "y": Sequence(tables["a"]),
            "x": Pooled(tables["e"]),
            "w": Pooled(tables["d"]),
            "v": Sequence(tables["c"]),
            "u": Pooled(tables["b"]),
            "t": Pooled(tables["a"], padding_key=0),
        }
    )


def test_order_of_groups_tables_and_features() -> None:
    """Groups are ordered by their first table's name, tables by name, features by table and then as given."""
    features = mixed()
    assert [group.names for group in features.groups] == [("a", "c"), ("b", "d"), ("e",)]
    assert [group.features for group in features.groups] == [("y", "t", "z", "v"), ("u", "w"), ("x",)]
    assert [group.feature_tables.tolist() for group in features.groups] == [[0, 0, 1, 1], [0, 1], [0]]
    names = [name for group in features.groups for name in group.names]
    assert [names[i] for i in features.table_order] == ["a", "b", "c", "d", "e"]
    assert features.num_tables == 5
    assert features.places == {
        "y": (0, 0),
        "t": (0, 1),
        "z": (0, 2),
        "v": (0, 3),
        "u": (1, 0),
        "w": (1, 1),
        "x": (2, 0),
    }


def test_sets_of_features() -> None:
    """Pooled features are in the order of the user, sequences in that of the group; one that is read by index is alone.
    Fails if _feature_sets takes pooled features in the order of the group, or gathers sequences read by index."""
    a, b = Table("a", 4), Table("b", 4)
    (group,) = group_features(
        {
            "z": Sequence(b),
            "y": Pooled(b),
            "x": Sequence(a, by_index=True),
            "w": Pooled(a),
            "v": Sequence(b, by_index=True),
            "u": Sequence(a),
            "t": Pooled(b),
        }
    ).groups
    named = [([group.features[f] for f in one.features], one.is_pooled) for one in group.feature_sets]
    assert named == [(["y", "w", "t"], True), (["u", "z"], False), (["x"], False), (["v"], False)]
    sets = [group.feature_sets for group in mixed().groups]
    assert [[(one.features, one.is_pooled) for one in each] for each in sets] == [
        [((2, 1), True), ((0, 3), False)],
        [((1, 0), True)],
        [((0,), True)],
    ]


def test_padding_of_features_that_share_a_table() -> None:
    """Padding belongs to a feature, and 0 is a key like any other. Fails if _group asks `if feature.padding_key`."""
    (group, *_) = mixed().groups
    assert group.feature_keys[:, 2:5].tolist() == [[0, 0, 0], [0, 1, 0], [1, 1, -1], [1, 0, 0]]


def test_sizes_of_a_group() -> None:
    table = Table("a", 5, optimizer=Adam(0.1), dtype=torch.float64)
    (group,) = group_features({"x": Pooled(table)}).groups
    assert (group.row_bytes, group.num_columns, group.record_bytes) == (40, 15, 120)
    (frozen,) = group_features({"x": Pooled(Table("a", 5, optimizer=Adam(0.1), frozen=True))}).groups
    assert (frozen.row_bytes, frozen.num_columns, frozen.record_bytes) == (20, 5, 20)
