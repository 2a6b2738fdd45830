"""Table, dense model and batches of part four-ranks. Other ranks own a given share of a batch's keys."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nestpipe.bench.h200.four_ranks_recipe import Recipe
from nestpipe.bench.harness.ways import Shares
from nestpipe.data.batch import Batch, Jagged
from nestpipe.distributed import World
from nestpipe.embedding.cluster import GIVEN_ORDER
from nestpipe.embedding.dedup import dedup_batch
from nestpipe.embedding.features import SequenceEmbedding
from nestpipe.embedding.group import group_features
from nestpipe.embedding.optim import Adam, RowOptimizer, RowWiseAdagrad
from nestpipe.embedding.plan import requester_lists
from nestpipe.embedding.table import Feature, Sequence, Table
from nestpipe.store import HostStore, group_by_owner

SEED = 1
FEATURE, TABLE = "history", "item"
FILL_ROWS = 50_000
OPTIMIZERS: dict[str, RowOptimizer] = {"adam": Adam(1e-4), "rowwise_adagrad": RowWiseAdagrad(1e-3)}


def make_features(recipe: Recipe) -> dict[str, Feature]:
    return {FEATURE: Sequence(Table(TABLE, recipe.dim, optimizer=OPTIMIZERS[recipe.row_optimizer]))}


def keys_by_owner(rows_a_rank: int, world_size: int) -> list[Tensor]:
    """Splits keys 0 .. rows_a_rank * world_size - 1 by owner, each owner's in random order."""
    keys = torch.randperm(rows_a_rank * world_size, generator=torch.Generator().manual_seed(SEED))
    order, counts = group_by_owner(TABLE, keys, world_size)
    return list(keys[order].split(counts.tolist()))


def filled_store(features: Mapping[str, Feature], keys: Tensor, num_threads: int) -> HostStore:
    """Returns a store that holds a row for each key, as after long training."""
    store, table = HostStore(num_threads), features[FEATURE].table
    store.create_table(table.spec(SEED))
    store.reserve(table.name, len(keys))
    records = torch.zeros(FILL_ROWS, store.spec(table.name).num_columns)
    records[:, : table.dim].normal_(std=0.02, generator=torch.Generator().manual_seed(SEED))
    records[:, table.dim :] = torch.tensor(table.optimizer.initial_state(table.dim))
    for chunk in keys.split(FILL_ROWS):
        store.scatter(table.name, chunk, records[: len(chunk)], 0)
    return store


def counts_of_owners(num_keys: int, remote_share: float, rank: int, world_size: int) -> list[int]:
    """Returns how many keys of a batch each rank owns. The other ranks own equal parts of the remote share."""
    remote = int(num_keys * remote_share / (world_size - 1))
    return [num_keys - remote * (world_size - 1) if owner == rank else remote for owner in range(world_size)]


def make_batches(recipe: Recipe, pools: list[Tensor], rank: int) -> list[Batch]:
    """Makes the batches of one rank.

    No two ranks request the same key, so a rank owns the same number of rows of every global batch, for any remote
    share. A batch shares some of its new keys with the next one, and the last batch with the first.
    """
    size = len(pools)
    num_shared = int(recipe.num_distinct * recipe.overlap)
    num_fresh = recipe.num_distinct - num_shared
    if num_shared > num_fresh:
        raise ValueError(
            f"overlap is {recipe.overlap}, must be at most a half: a batch can share only keys that were new in the "
            "previous batch"
        )
    needed = recipe.num_batches * num_fresh
    if min(map(len, pools)) < needed:
        raise ValueError(f"a rank has {min(map(len, pools))} rows, batches of {num_fresh} new ones need {needed}")
    counts = [counts_of_owners(num_fresh, recipe.remote_share, requester, size) for requester in range(size)]
    fresh = []
    for number in range(recipe.num_batches):
        parts = []
        for owner, pool in enumerate(pools):
            first = number * num_fresh + sum(counts[requester][owner] for requester in range(rank))
            parts.append(pool[first : first + counts[rank][owner]])
        fresh.append(torch.cat(parts))
    generator = torch.Generator().manual_seed(SEED + rank)
    batches = []
    for number, mine in enumerate(fresh):
        before = fresh[number - 1]
        shared = before[torch.randperm(num_fresh, generator=generator)[:num_shared]]
        batches.append(_batch(recipe, torch.cat([mine, shared]), generator))
    return batches


def _batch(recipe: Recipe, distinct: Tensor, generator: torch.Generator) -> Batch:
    """Makes a batch in which each distinct key occurs at least once, and the others are random."""
    num_keys = recipe.batch_size * recipe.length
    more = distinct[torch.randint(len(distinct), (num_keys - len(distinct),), generator=generator)]
    keys = torch.cat([distinct, more])[torch.randperm(num_keys, generator=generator)]
    label = torch.randint(2, (recipe.batch_size,), generator=generator).float()
    return Batch({FEATURE: Jagged(keys, torch.arange(0, num_keys + 1, recipe.length))}, {"label": label})


@dataclass(frozen=True)
class Counts:
    """What the first and the last micro-batch exchange, of all distinct keys of all ranks."""

    window: Shares
    boundary: Shares
    """Only keys that the batch before, or after, has, too: these wait for the boundary of two batches."""
    overlap: dict[str, float]
    """Fields of `Overlap`, for predictions."""


def exchanged_keys(recipe: Recipe, batches: list[Batch], num_micro_batches: int, world: World) -> Counts:
    """Counts keys by what the batches say. All ranks call it."""
    features, counts = group_features(make_features(recipe)), torch.zeros(6, dtype=torch.int64)
    keys = [batch.keys[FEATURE].values for batch in batches]
    for number, batch in enumerate(batches):
        dedup = dedup_batch(features, batch, num_micro_batches, world.size, 1, GIVEN_ORDER).groups[0]
        rows_in, gradients_out = requester_lists(dedup, "once", world.rank)
        # No two ranks use the same key, so this rank's own batches say which keys are shared.
        before, after = keys[number - 1], keys[(number + 1) % len(keys)]
        last = num_micro_batches - 1
        head = dedup.keys[torch.cat([rows_in.others(0), rows_in.own(0)])]
        tail = dedup.keys[torch.cat([gradients_out.others(last), gradients_out.own(last)])]
        blocked, urgent = torch.isin(head, before).sum(), torch.isin(tail, after).sum()
        shared = torch.isin(dedup.keys, before).sum()
        counts += torch.tensor([len(head), len(tail), len(dedup.keys), blocked, urgent, shared])
    world.control.all_reduce_sum(counts)
    num_head, num_tail, num_keys, num_blocked, num_urgent, num_shared = counts.tolist()
    return Counts(
        Shares(num_head / num_keys, num_tail / num_keys),
        Shares(num_blocked / num_keys, num_urgent / num_keys),
        {
            "key_overlap": num_shared / num_keys,
            "head_overlap": num_blocked / num_head,
            "tail_overlap": num_urgent / num_tail,
        },
    )


class Tower(nn.Module):
    """Applies one layer repeatedly to every item of a history, averages the items of a sample, and computes a logit.

    It has few parameters and few, large operations, so the time is spent on the device, not in launching kernels or
    reducing dense gradients. All samples have the same number of items.
    """

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.length, self.repeats = recipe.length, recipe.repeats
        self.first = nn.Linear(recipe.dim, recipe.hidden)
        self.layer = nn.Linear(recipe.hidden, recipe.hidden)
        self.out = nn.Linear(recipe.hidden, 1)
        generator = torch.Generator().manual_seed(SEED)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.05, generator=generator)

    def forward(self, embeddings: Mapping[str, object], inputs: Mapping[str, Tensor]) -> Tensor:
        history = embeddings[FEATURE]
        assert isinstance(history, SequenceEmbedding)
        items = self.first(history.values)
        for _ in range(self.repeats):
            items = torch.add(items, torch.relu(self.layer(items)), alpha=1 / self.repeats)
        logit = self.out(items.unflatten(0, (-1, self.length)).mean(1)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logit, inputs["label"], reduction="sum")
