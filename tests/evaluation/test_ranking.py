"""Ranks against a full sort in plain Python integers: ties, histories, items never trained, one to three ranks.

Fails, for example, if _count takes ties for lower where all keys of a block are smaller (limit = score), if
_count_histories counts a repeated item twice (no .unique()), or if it takes the target out with the history
(key <= targets).
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import nestpipe
from nestpipe import Jagged, Table, World
from nestpipe.evaluation import ranking
from nestpipe.evaluation.exact_scores import whole_cosine_rows, whole_rows, whole_users
from nestpipe.evaluation.ranking import Queries, Ranked, rank_targets
from nestpipe.ops.sampled_softmax import unit
from nestpipe.store import HostStore, group_by_owner
from tests.ops.test_largest_tensor import LargestTensor
from tests.ranks import run_ranks

DIM = 5
TABLE = Table("item", DIM, init=nestpipe.init.Normal(0.3))
NUM_ITEMS = 60
NUM_TRAINED = 45


def trained_rows() -> Tensor:
    """Returns rows with ties: some are equal, some opposite, some zero, some differ in length only."""
    rows = torch.randn(NUM_TRAINED, DIM, generator=torch.Generator().manual_seed(1))
    rows[10:20] = rows[:10]
    rows[20:23] = 0
    rows[23:26] = -rows[:3]
    rows[26:30] = 4 * rows[:4]
    return rows


def store_of(world: World) -> HostStore:
    store = HostStore()
    store.create_table(TABLE.spec(seed=0))
    keys = torch.arange(NUM_TRAINED)
    order, counts = group_by_owner("item", keys, world.mesh.num_shards)
    owned = order.split(counts.tolist())[world.mesh.shard]
    store.scatter("item", keys[owned], trained_rows()[owned], step=0)
    return store


def some_queries(num_users: int = 40) -> Queries:
    """Returns queries: one user in four equals an item, one is all zeros; histories have repeats and targets."""
    generator = torch.Generator().manual_seed(2)
    users = F.normalize(torch.randn(num_users, DIM, generator=generator), dim=1)
    users[::4] = F.normalize(trained_rows()[: len(users[::4])], dim=1)
    users[3] = 0
    targets = torch.randint(NUM_ITEMS, (num_users,), generator=generator)
    histories = [torch.randint(NUM_ITEMS + 20, (i % 7,), generator=generator).tolist() for i in range(num_users)]
    for i in range(0, num_users, 3):
        histories[i] = [*histories[i], *histories[i][:2], int(targets[i])]
    return Queries(users, targets, Jagged.from_lists(histories))


def slow_ranks(queries: Queries, corpus: list[int], normalise: bool) -> list[int]:
    """Sorts the whole corpus for each user, with scores that are Python's integers."""
    store = store_of(World())
    rows = store.gather("item", torch.tensor(corpus), rows_only=True).records
    whole = whole_cosine_rows(rows) if normalise else whole_rows(rows, float(rows.double().norm(dim=1).max()))
    rows_by_item = dict(zip(corpus, whole.long().tolist(), strict=True))
    result = []
    offsets = queries.histories.offsets.tolist()
    for i, user in enumerate(whole_users(queries.users).long().tolist()):
        target = int(queries.targets[i])
        seen = set(queries.histories.values[offsets[i] : offsets[i + 1]].tolist()) - {target}
        scores = {
            item: sum(a * b for a, b in zip(user, row, strict=True))
            for item, row in rows_by_item.items()
            if item not in seen
        }
        best_first = sorted(scores, key=lambda item: (-scores[item], item))
        result.append(best_first.index(target) + 1)
    return result


def ranks_of(
    world: World, corpus: Tensor | int, normalise: bool = True, block: int = 2048, skew: bool = False
) -> Ranked:
    """Ranks for this rank's share of the users; with `skew`, the first of several ranks has none."""
    ranking.NUM_ITEMS, ranking.NUM_USERS, ranking.NUM_TOGETHER = block, max(1, block // 2), max(1, block // 3)
    queries = some_queries()
    users = torch.arange(len(queries.users))
    first = 1 if skew and world.size > 1 else 0
    own = users[users % (world.size - first) + first == world.rank] if world.rank >= first else users[:0]
    queries = Queries(queries.users[own], queries.targets[own], queries.histories.take(own))
    return rank_targets(queries, corpus, TABLE, store_of(world), world.evaluate, normalise)


def on_ranks(size: int, function, *arguments) -> list:
    return [function(World(), *arguments)] if size == 1 else run_ranks(size, function, *arguments)


def joined(results: list[Ranked], skew: bool = False) -> list[int]:
    """Returns ranks in the order of the users before they were dealt out."""
    parts = [result.ranks.tolist() for result in results][1 if skew and len(results) > 1 else 0 :]
    return [parts[i % len(parts)][i // len(parts)] for i in range(sum(map(len, parts)))]


@pytest.fixture(autouse=True)
def sizes_as_before():
    before = ranking.NUM_ITEMS, ranking.NUM_USERS, ranking.NUM_TOGETHER
    yield
    ranking.NUM_ITEMS, ranking.NUM_USERS, ranking.NUM_TOGETHER = before


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("block", [1, 2, 7, 2048])
@pytest.mark.parametrize("corpus", ["all", "listed"])
def test_against_a_full_sort(normalise: bool, block: int, corpus: str) -> None:
    keys = list(range(NUM_ITEMS)) if corpus == "all" else [*range(NUM_ITEMS + 9, -1, -1), 5, 5, -(2**63), 2**63 - 1]
    given = NUM_ITEMS if corpus == "all" else torch.tensor(keys)
    ranked = ranks_of(World(), given, normalise, block)
    assert ranked.ranks.tolist() == slow_ranks(some_queries(), sorted(set(keys)), normalise)
    assert ranked.num_items == len(set(keys))
    assert ranked.num_untrained_items == len(set(keys)) - NUM_TRAINED


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("normalise", "block", "skew"), [(True, 7, False), (False, 2048, True)])
def test_the_same_on_any_number_of_ranks(size: int, normalise: bool, block: int, skew: bool) -> None:
    """Fails if the counts of one rank are not added to the others', or if target scores are not."""
    results = on_ranks(size, ranks_of, NUM_ITEMS, normalise, block, skew)
    alone = ranks_of(World(), NUM_ITEMS, normalise)
    assert joined(results, skew) == alone.ranks.tolist()
    assert {result.num_untrained_items for result in results} == {NUM_ITEMS - NUM_TRAINED}


def test_the_same_with_sharding_groups() -> None:
    """Fails if each group counts all items (`channel.mesh.num_shards` and `channel.mesh.shard` in _owned)."""
    results = run_ranks(4, ranks_of, NUM_ITEMS, True, 7, replicas=2)
    assert joined(results) == ranks_of(World(), NUM_ITEMS, True).ranks.tolist()
    assert {result.num_untrained_items for result in results} == {NUM_ITEMS - NUM_TRAINED}


def test_there_are_ties() -> None:
    """Otherwise the tests above would say little."""
    queries, rows = some_queries(), whole_cosine_rows(trained_rows())
    products = whole_users(queries.users) @ rows.T
    targets = queries.targets.clamp(max=NUM_TRAINED - 1)
    ties = (products == products.gather(1, targets[:, None])).sum(1) > 1
    assert 5 < int(ties.sum()) < len(ties)


def test_by_hand() -> None:
    """Rows 0 and 10 are equal, and user 0 is like them: item 0 comes first, 10 second; row 26 is only longer."""
    store, user = store_of(World()), F.normalize(trained_rows()[:1], dim=1)

    def rank_of(target: int, history: list[int]) -> int:
        queries = Queries(user, torch.tensor([target]), Jagged.from_lists([history]))
        return int(rank_targets(queries, NUM_ITEMS, TABLE, store, World().evaluate).ranks)

    assert [rank_of(target, []) for target in (0, 10, 26)] == [1, 2, 3]
    assert rank_of(26, [0, 0, 0]) == 2
    assert rank_of(26, [0, 10, 26, 10**9]) == 1
    assert rank_of(23, []) == NUM_ITEMS


def test_no_tensor_of_all_users_and_items() -> None:
    """Fails with NUM_TOGETHER or NUM_ITEMS = 2**40."""
    ranking.NUM_ITEMS, ranking.NUM_USERS, ranking.NUM_TOGETHER = 32, 2048, 16
    generator = torch.Generator().manual_seed(5)
    num_users, num_items = 200, 1000
    users = torch.randn(num_users, DIM, generator=generator)
    targets = torch.randint(num_items, (num_users,), generator=generator)
    queries = Queries(users, targets, Jagged.from_lists([[]] * num_users))
    with LargestTensor() as largest:
        rank_targets(queries, num_items, TABLE, store_of(World()), World().evaluate)
    assert largest.num_elements < 5000  # the users themselves, as bytes, are 4000


def test_nothing_is_created() -> None:
    store = store_of(World())
    before = store.digest_part("item"), store.size("item")
    rank_targets(some_queries(), NUM_ITEMS, TABLE, store, World().evaluate)
    assert (store.digest_part("item"), store.size("item")) == before


@pytest.mark.parametrize("dim", [1, 3, 64, 257])
def test_products_are_exact(dim: int) -> None:
    """Products do not depend on the order of addition. Fails with UNITS = 2^28."""
    generator = torch.Generator().manual_seed(dim)
    users = whole_users(torch.randn(9, dim, generator=generator) * torch.rand(9, 1, generator=generator).exp())
    rows = whole_cosine_rows(torch.randn(300, dim, generator=generator).abs() + 0.5)
    products = users.abs() @ rows.T
    assert products.max() < 2.0**53
    assert torch.equal(products, users.abs().flip(1) @ rows.flip(1).T)
    exact = [
        [sum(a * b for a, b in zip(u, r, strict=True)) for r in rows.long().tolist()]
        for u in users.abs().long().tolist()
    ]
    assert products.long().tolist() == exact


def test_rows_do_not_depend_on_their_block() -> None:
    rows = torch.randn(1000, 50, generator=torch.Generator().manual_seed(3))
    whole = whole_cosine_rows(rows)
    assert torch.equal(whole, torch.cat([whole_cosine_rows(part) for part in rows.split([1, 2, 3, 500, 494])]))
    torch.testing.assert_close(whole.float() * 2.0**-26, unit(rows), rtol=1e-5, atol=1e-7)


def test_scores_are_close_to_those_of_the_model() -> None:
    generator = torch.Generator().manual_seed(4)
    users, rows = torch.randn(20, 64, generator=generator), torch.randn(500, 64, generator=generator)
    scores = (whole_users(F.normalize(users, dim=1)) @ whole_cosine_rows(rows).T) * 2.0**-52
    torch.testing.assert_close(
        scores, F.normalize(users, dim=1).double() @ F.normalize(rows.double(), dim=1).T, rtol=0, atol=2e-7
    )


def refusals(world: World) -> list[str]:
    queries, store, channel = some_queries(), store_of(world), world.evaluate
    nans = Queries(queries.users * (math.nan if world.rank == 0 else 1), queries.targets, queries.histories)
    texts = []
    for given, corpus in ((queries, 50), (nans, NUM_ITEMS), (queries, NUM_ITEMS + world.rank)):
        try:
            rank_targets(given, corpus, TABLE, store, channel)
        except ValueError as error:
            texts.append(str(error))
    return [*texts, str(rank_targets(queries, NUM_ITEMS, TABLE, store, channel).ranks.tolist())]


def test_refusals_are_agreed() -> None:
    """All ranks raise the same, and go on together."""
    first, second = run_ranks(2, refusals)
    assert first == second
    outside = sorted(some_queries().targets[some_queries().targets >= 50].tolist())
    assert first[0].startswith(f"{2 * len(outside)} of 80 targets are not in the corpus, for example 5")
    assert first[1] == "the vectors of 40 of 80 users are not finite"
    assert first[2] == "the ranks were given different corpora, of [60, 61] items"


def test_refusals_of_one_rank() -> None:
    store, channel = store_of(World()), World().evaluate
    with pytest.raises(ValueError, match="users have 3 columns, but the rows of table 'item' 5"):
        rank_targets(
            Queries(torch.zeros(0, 3), torch.tensor([], dtype=torch.int64), Jagged.from_lists([])),
            5,
            TABLE,
            store,
            channel,
        )
    with pytest.raises(ValueError, match="1 targets and 3 histories"):
        Queries(torch.zeros(2, DIM), torch.tensor([1]), Jagged.from_lists([[], [], []]))
    store.scatter("item", torch.tensor([3]), torch.full((1, DIM), math.inf), step=1)
    with pytest.raises(ValueError, match="1 rows of the corpus in table 'item' are not finite"):
        rank_targets(some_queries(), NUM_ITEMS, TABLE, store, channel)


def test_without_users_or_items() -> None:
    empty = Queries(torch.zeros(0, DIM), torch.tensor([], dtype=torch.int64), Jagged.from_lists([]))
    for corpus in (NUM_ITEMS, 0, torch.tensor([], dtype=torch.int64)):
        assert rank_targets(empty, corpus, TABLE, store_of(World()), World().evaluate).ranks.tolist() == []
