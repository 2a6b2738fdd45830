"""Ranks each user's target in the corpus, exactly. Each owner scores the rows it owns, one block at a time.

rank = 1 + items with a higher score + items with an equal score and a smaller key, in the corpus without the items of
the user's history. The target stays in, even if the history contains it. An item that was never trained has its initial
row; it is not created. docs/evaluation.md says what is guaranteed.
"""

import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from nestpipe.data.batch import Jagged
from nestpipe.distributed import Channel
from nestpipe.embedding.table import Table
from nestpipe.evaluation.exact_scores import lengths, whole_cosine_rows, whole_rows, whole_users
from nestpipe.store import Store, group_by_owner
from nestpipe.store.interface import check_keys

NUM_USERS = 2048
"""Users of all ranks that are exchanged at a time."""
NUM_TOGETHER = 256
"""Users that are multiplied with a block at a time: few enough for the products to stay in the cache."""
NUM_ITEMS = 2048
"""Items in a block, and keys of histories that are scored at a time."""
NUM_KEYS = 2**20
"""Keys of the corpus whose owners are computed at a time."""


@dataclass(frozen=True)
class Ranked:
    ranks: Tensor
    """[n] int64, one for each of this rank's users."""
    num_items: int
    """Items in the corpus."""
    num_untrained_items: int
    """Items in the corpus that were never trained."""


@dataclass(frozen=True)
class Queries:
    users: Tensor
    """[n, dim]"""
    targets: Tensor
    """[n] keys."""
    histories: Jagged
    """[n] lists of keys. Repeats count once, and keys outside the corpus do not count."""

    def __post_init__(self) -> None:
        num_users = len(self.users)
        check_keys(self.targets)
        if self.users.dim() != 2 or len(self.targets) != num_users or len(self.histories) != num_users:
            raise ValueError(
                f"users must be [n, dim], with a target and a history each; got users {list(self.users.shape)}, "
                f"{len(self.targets)} targets and {len(self.histories)} histories"
            )


def rank_targets(
    queries: Queries,
    corpus: Tensor | int,
    table: Table,
    store: Store,
    channel: Channel,
    normalise: bool = True,
) -> Ranked:
    """Ranks targets. All ranks call it, with their own users and the same corpus: keys, or n for 0 .. n - 1.

    A score is the product of the user's vector with the item's row, which `normalise` scales to length 1. Rows come
    from the store, so flush before a call within fit.
    """
    if queries.users.shape[1] != table.dim:
        raise ValueError(
            f"users have {queries.users.shape[1]} columns, but the rows of table {table.name!r} {table.dim}"
        )
    with channel.watch.busy():
        items = OwnedItems(corpus, table, store, channel, normalise)
        own_survey = items.survey(queries)
    surveys = [_Survey(**json.loads(text)) for text in channel.share_text(json.dumps(asdict(own_survey)))]
    problem = _problem(surveys, table)
    if problem is not None:
        raise channel.watch.agreed(ValueError(problem))
    items.largest_length = max(survey.largest_length for survey in surveys)
    counts = [survey.num_users for survey in surveys]
    at_a_time = max(1, NUM_USERS // channel.size)
    ranks = [torch.empty(0, dtype=torch.int64)]
    for first in range(0, max(counts), at_a_time):
        part = slice(first, first + at_a_time)
        sizes = [len(range(count)[part]) for count in counts]
        all_queries = _gather_queries(queries, part, sizes, channel)
        ranks.append(_ranks(all_queries, items, channel).split(sizes)[channel.rank])
    num_untrained = sum(survey.num_untrained for survey in surveys)
    return Ranked(torch.cat(ranks), own_survey.num_items, num_untrained)


@dataclass(frozen=True)
class _Survey:
    """Counts that ranks share before users are exchanged."""

    num_users: int
    num_bad_users: int
    num_items: int
    corpus_hash: int
    num_bad_rows: int
    num_untrained: int
    largest_length: float


def _problem(surveys: list[_Survey], table: Table) -> str | None:
    if len({(survey.num_items, survey.corpus_hash) for survey in surveys}) > 1:
        return f"the ranks were given different corpora, of {[survey.num_items for survey in surveys]} items"
    if num_bad := sum(survey.num_bad_users for survey in surveys):
        return f"the vectors of {num_bad} of {sum(survey.num_users for survey in surveys)} users are not finite"
    if num_bad := sum(survey.num_bad_rows for survey in surveys):
        return f"{num_bad} rows of the corpus in table {table.name!r} are not finite"
    return None


class OwnedItems:
    """The items of the corpus that this rank owns."""

    def __init__(self, corpus: Tensor | int, table: Table, store: Store, channel: Channel, normalise: bool) -> None:
        self._table = table
        self._store = store
        self._normalise = normalise
        self.largest_length = 1.0
        """Length of the longest row of the corpus, on all ranks."""
        if isinstance(corpus, Tensor):
            check_keys(corpus)
            corpus = corpus.unique()
        parts = _parts(corpus)
        self.num_items = sum(map(len, parts))
        self._corpus_hash = zlib.crc32(corpus.numpy().tobytes()) if isinstance(corpus, Tensor) else 0
        self.keys = torch.cat([_owned(part, table.name, channel) for part in parts])
        """Keys of the items, ascending."""

    def survey(self, queries: Queries) -> _Survey:
        num_bad, num_untrained, largest = 0, 0, 0.0
        for keys in self.keys.split(NUM_ITEMS):
            gathered = self._store.gather(self._table.name, keys, rows_only=True)
            row_lengths = lengths(gathered.records)
            num_bad += int(row_lengths.isfinite().logical_not().sum())
            num_untrained += len(keys) - int(gathered.found.sum())
            largest = max(largest, float(row_lengths.max()) if len(keys) else 0.0)
        num_users, num_bad_users = len(queries.users), int(lengths(queries.users).isfinite().logical_not().sum())
        largest = largest if math.isfinite(largest) else 0.0
        return _Survey(num_users, num_bad_users, self.num_items, self._corpus_hash, num_bad, num_untrained, largest)

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields keys and their rows in whole numbers, block by block."""
        for keys in self.keys.split(NUM_ITEMS):
            yield keys, self.rows(keys)

    def rows(self, keys: Tensor) -> Tensor:
        rows = self._store.gather(self._table.name, keys, rows_only=True).records
        return whole_cosine_rows(rows) if self._normalise else whole_rows(rows, self.largest_length)

    def positions(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the position of each key among the owned items, and whether it is one of them."""
        if len(self.keys) == 0:
            return torch.zeros_like(keys), torch.zeros_like(keys, dtype=torch.bool)
        positions = torch.searchsorted(self.keys, keys).clamp_(max=len(self.keys) - 1)
        return positions, self.keys[positions] == keys


def _parts(corpus: Tensor | int) -> list[Tensor]:
    if isinstance(corpus, Tensor):
        return list(corpus.split(NUM_KEYS))
    return [torch.arange(i, min(i + NUM_KEYS, corpus)) for i in range(0, max(corpus, 1), NUM_KEYS)]


def _owned(keys: Tensor, table: str, channel: Channel) -> Tensor:
    order, counts = group_by_owner(table, keys, channel.size)
    return keys[order.split(counts.tolist())[channel.mesh.part]]


def _gather_queries(queries: Queries, part: slice, sizes: list[int], channel: Channel) -> Queries:
    """Returns this part of every rank's queries, in order of rank; sizes[r] come from rank r."""

    def gather(own: Tensor) -> Tensor:
        parts = channel.all_gather_bytes(own.contiguous().flatten().view(torch.uint8))
        return torch.cat([part.clone().view(own.dtype) for part in parts])

    samples = torch.arange(len(queries.users))[part]
    histories = queries.histories.take(samples)
    history_lengths = gather(histories.lengths)
    offsets = torch.cat([history_lengths.new_zeros(1), history_lengths.cumsum(0)])
    users = gather(queries.users[part]).view(sum(sizes), queries.users.shape[1])
    return Queries(users, gather(queries.targets[part]), Jagged(gather(histories.values), offsets))


def _ranks(queries: Queries, items: OwnedItems, channel: Channel) -> Tensor:
    """Returns the ranks, [n], of users of all ranks; the same on every rank."""
    with channel.watch.busy():
        users = whole_users(queries.users)
        positions, is_owned = items.positions(queries.targets)
        scores = torch.zeros(2, len(users), dtype=torch.float64)
        scores[0, is_owned] = (users[is_owned] * items.rows(items.keys[positions[is_owned]])).sum(1)
        scores[1] = is_owned
    channel.all_reduce_sum(scores)  # one rank has the score of a target, the others 0
    score, num_owners = scores
    if bool((num_owners == 0).any()):
        outside = queries.targets[num_owners == 0]
        raise channel.watch.agreed(
            ValueError(
                f"{len(outside)} of {len(num_owners)} targets are not in the corpus, for example {int(outside[0])}; "
                "the corpus must have every item that can be a target"
            )
        )
    with channel.watch.busy():
        better = torch.zeros(len(users), dtype=torch.int64)
        for keys, rows in items.blocks():
            for first in range(0, len(users), NUM_TOGETHER):
                part = slice(first, first + NUM_TOGETHER)
                better[part] += _count(users[part] @ rows.T, score[part], keys, queries.targets[part])
        better -= _count_histories(users, score, queries, items)
    channel.all_reduce_sum(better)
    return better + 1


def _count(products: Tensor, score: Tensor, keys: Tensor, targets: Tensor) -> Tensor:
    """Returns how many items of a block, whose keys ascend, are better than each user's target."""
    num_smaller = torch.searchsorted(keys, targets)
    # Scores are whole numbers: where all keys are smaller than the target's, a tie counts as higher.
    limit = score - (num_smaller == len(keys)).double()
    better = (products > limit[:, None]).view(torch.uint8).sum(1, dtype=torch.int32).long()
    (inside,) = ((num_smaller > 0) & (num_smaller < len(keys))).nonzero(as_tuple=True)
    if len(inside) > 0:
        is_smaller = torch.arange(len(keys)) < num_smaller[inside, None]
        ties = (products[inside] == score[inside, None]) & is_smaller
        better.index_add_(0, inside, ties.sum(1))
    return better


def _count_histories(users: Tensor, score: Tensor, queries: Queries, items: OwnedItems) -> Tensor:
    """Returns how many owned items of each history were counted as better than the target, which itself never is."""
    better = torch.zeros(len(users), dtype=torch.int64)
    history_users = torch.arange(len(users)).repeat_interleave(queries.histories.lengths)
    positions, is_owned = items.positions(queries.histories.values)
    num_owned = max(1, len(items.keys))
    distinct = (history_users * num_owned + positions)[is_owned].unique()
    for part in distinct.split(NUM_ITEMS):
        user, key = part // num_owned, items.keys[part % num_owned]
        products = (users[user] * items.rows(key)).sum(1)
        is_tie = (products == score[user]) & (key < queries.targets[user])
        better.index_add_(0, user, ((products > score[user]) | is_tie).long())
    return better
