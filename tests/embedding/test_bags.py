"""What owners and requesters add up for features that are pooled at the owner, against loops over single keys: in the
same order, so to the bit, in float32.

Fails if a requester adds the partial sums of a bag in another order than that of owners (`order = len(bags) - 1 -
_order(bags.flip(0), self.num_bags)` in _BagLayout.rows), if an owner adds gradients by micro-batch first
(`group_by_row(blocks.by_part(keys), ...)` in own_bags), if messages are not in the order of bags (`_order(owners,
world_size)` in _split), if weights of requesters without any are not 1 (`zeros` in _Arrays.received), or if padding
keeps its weight (without `weights[present]` in _split).
"""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from nestpipe import Batch, Pooled, Sequence, Table
from nestpipe.data import Jagged
from nestpipe.distributed import Channel, Notice
from nestpipe.embedding.bags import BagPart
from nestpipe.embedding.cluster import BY_KEYS
from nestpipe.embedding.dedup import dedup_batch
from nestpipe.embedding.exchange.distributed import DistributedBatch, DistributedExchange
from nestpipe.embedding.features import Embeddings
from nestpipe.embedding.group import group_features
from nestpipe.embedding.host_memory import HostMemory
from nestpipe.embedding.resident import ResidentRows
from nestpipe.embedding.route import Route
from nestpipe.kernels.rows import pooling as on_device
from tests.embedding.thread_ranks import on_threads
from tests.store.native.key_batches import owner

DIM, PADDING, NUM_SAMPLES = 3, -7, 5
A, B = Table("a", DIM), Table("b", DIM)
FEATURES = group_features(
    {
        "b_sum": Pooled(B, padding_key=PADDING, where="owner"),
        "a_rows": Sequence(A),
        "a_mean": Pooled(A, "mean", padding_key=PADDING, where="owner"),
        "a_sum": Pooled(A, where="owner"),
    },
    pools_at_owner=True,
)
BAGS = ("a_mean", "a_sum", "b_sum")
"""In the order of their group: by table."""
Key = tuple[str, int]


def row_of(key: Key) -> Tensor:
    return torch.randn(DIM, generator=torch.Generator().manual_seed(1000 * ord(key[0][0]) + key[1] + 50))


def batch_of(rank: int, seed: int) -> Batch:
    """Returns a batch of few keys, so that ranks and samples share them. Weights differ between ranks and features."""
    generator = torch.Generator().manual_seed(10 * seed + rank)
    keys = {}
    for name in FEATURES.features:
        lengths = torch.randint(0, 6, (NUM_SAMPLES if rank != 2 else 0,), generator=generator)
        values = torch.randint(-1, 9, (int(lengths.sum()),), generator=generator)
        if name in ("b_sum", "a_mean"):
            values[values == -1] = PADDING
        has_weights = (rank + seed) % 2 == 0 and name != "a_sum"
        weights = torch.rand(len(values), generator=generator) if has_weights else None
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        keys[name] = Jagged(values, offsets, weights)
    return Batch(keys)


def gradient_of(rank: int, name: str, number: int) -> Tensor:
    """Returns the gradient of a sample's pooled feature, or of one row of a sequence."""
    seed = 100_000 * rank + 1000 * list(FEATURES.features).index(name) + number
    return torch.randn(DIM, generator=torch.Generator().manual_seed(seed))


@dataclass
class Seen:
    """What one rank sees."""

    values: dict[str, list[list[float]]] = field(default_factory=dict)
    """By feature and sample."""
    sums: dict[Key, list[float]] = field(default_factory=dict)
    """Gradients of the keys that it owns."""


def resident_rows(route: Route) -> list[ResidentRows]:
    (owned,) = route.owner_dedups
    keys = keys_of(route)
    records = torch.stack([row_of(key) for key in keys]) if keys else torch.empty(0, DIM)
    return [ResidentRows(owned.group, owned.keys, owned.table_offsets, records)]


def keys_of(route: Route) -> list[Key]:
    """Returns the keys that this rank owns."""
    (owned,) = route.owner_dedups
    bounds = owned.table_offsets.tolist()
    tables = [(t.name, slice(*bounds[i : i + 2])) for i, t in enumerate(owned.group.tables)]
    return [(name, key) for name, places in tables for key in owned.keys[places].tolist()]


def on_rank(channel: Channel, batches: list[Batch], num_parts: int) -> Seen:
    memory, seen = HostMemory(), Seen({name: [] for name in FEATURES.features})
    exchange = DistributedExchange(channel, channel, channel, memory)
    route = exchange.route(dedup_batch(FEATURES, batches[channel.rank], num_parts, channel.size), FEATURES, Notice())
    assert route is not None
    batch = exchange.open(route, exchange.plan(route, "once"), resident_rows(route))
    begin = dict.fromkeys(FEATURES.features, 0)
    for part in range(num_parts):
        batch.send_rows(part)
        train(batch, route, part, seen, begin, channel.rank)
    (sums,) = batch.sum_gradients()
    assert sums is not None
    seen.sums = dict(zip(keys_of(route), sums.values.tolist(), strict=True))
    return seen


def train(batch: DistributedBatch, route: Route, part: int, seen: Seen, begin: dict[str, int], rank: int) -> None:
    """Reads the features of a micro-batch, and returns gradients."""
    rows = batch.rows(part)
    embeddings = Embeddings(FEATURES, route.batch.groups, part, rows, route.batch.bags)
    joined = torch.cat([embeddings[name] for name in BAGS], dim=1)
    assert torch.equal(embeddings.side_by_side(BAGS), joined)
    assert embeddings.pooled_sets() == [["b_sum", "a_mean", "a_sum"]]
    for name in FEATURES.features:
        value = embeddings[name] if name in BAGS else embeddings.sequence(name).values
        assert isinstance(value, Tensor)
        seen.values[name] += value.tolist()
        gradients = [gradient_of(rank, name, begin[name] + i) for i in range(len(value))]
        begin[name] += len(value)
        if gradients:
            value.backward(torch.stack(gradients), retain_graph=True)
    batch.return_gradients(part, [group.take_gradient() for group in rows])


class Loops:
    """The same with a loop over keys."""

    def __init__(self, batches: list[Batch], num_parts: int) -> None:
        self.batches, self.num_parts = batches, num_parts

    def sample(self, rank: int, name: str, sample: int) -> list[tuple[Key, Tensor]]:
        """Returns the keys of a sample and their weights."""
        jagged, table = self.batches[rank].keys[name], FEATURES.features[name].table.name
        places = range(*jagged.offsets[sample : sample + 2].tolist())
        weights = torch.ones(len(jagged.values)) if jagged.weights is None else jagged.weights
        keys = [((table, int(jagged.values[i])), weights[i]) for i in places]
        return [(key, weight) for key, weight in keys if name == "a_sum" or key[1] != PADDING]

    def factor(self, rank: int, name: str, sample: int) -> Tensor:
        total = torch.zeros(())
        for _, weight in self.sample(rank, name, sample):
            total = total + weight
        return 1 / total if name == "a_mean" and total != 0 else torch.ones(())

    def pooled(self, rank: int, name: str, sample: int) -> list[float]:
        result = torch.zeros(DIM)
        for number in range(len(self.batches)):
            partial, keys = torch.zeros(DIM), self.sample(rank, name, sample)
            for key, weight in keys:
                if owner(key[1], key[0], len(self.batches)) == number:
                    partial = partial + weight * row_of(key)
            result = result + self.factor(rank, name, sample) * partial
        values: list[float] = result.tolist()
        return values

    def gradients(self) -> dict[Key, list[float]]:
        """Returns the gradient of each key: first the rows of all ranks, then the bags."""
        totals: dict[Key, Tensor] = {}
        for rank in range(len(self.batches)):
            for key, slot in self._rows(rank).items():
                totals[key] = totals.get(key, torch.zeros(DIM)) + slot
        bags: dict[Key, Tensor] = {}
        for rank, batch in enumerate(self.batches):
            for part in torch.arange(len(batch)).tensor_split(self.num_parts):
                for name in BAGS:
                    for sample in part.tolist():
                        gradient = self.factor(rank, name, sample) * gradient_of(rank, name, sample)
                        for key, weight in self.sample(rank, name, sample):
                            bags[key] = bags.get(key, torch.zeros(DIM)) + weight * gradient
        for key, added in bags.items():
            totals[key] = totals.get(key, torch.zeros(DIM)) + added
        return {key: total.tolist() for key, total in totals.items()}

    def _rows(self, rank: int) -> dict[Key, Tensor]:
        """Returns the sums of a requester over its micro-batches."""
        jagged, slots = self.batches[rank].keys["a_rows"], dict[Key, Tensor]()
        for part in torch.arange(len(self.batches[rank])).tensor_split(self.num_parts):
            sums = dict[Key, Tensor]()
            for sample in part.tolist():
                for i in range(*jagged.offsets[sample : sample + 2].tolist()):
                    key = "a", int(jagged.values[i])
                    sums[key] = sums.get(key, torch.zeros(DIM)) + gradient_of(rank, "a_rows", i)
            for key, total in sums.items():
                slots[key] = slots[key] + total if key in slots else total
        return slots


@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("seed", [0, 1])
def test_sums_are_those_of_loops(size: int, num_parts: int, seed: int) -> None:
    """Rank 2 has no samples. Some ranks have weights, others have not."""
    batches = [batch_of(rank, seed) for rank in range(size)]
    ranks, loops = on_threads(size, on_rank, batches, num_parts), Loops(batches, num_parts)
    for rank, seen in enumerate(ranks):
        for name in BAGS:
            assert seen.values[name] == [loops.pooled(rank, name, s) for s in range(len(batches[rank]))]
    expected = loops.gradients()
    assert {key: total for seen in ranks for key, total in seen.sums.items()} == expected
    assert all(owner(key[1], key[0], size) == rank for rank, seen in enumerate(ranks) for key in seen.sums)


def test_a_device_adds_partial_sums_like_the_host() -> None:
    """Forward and backward. Some bags have no partial sum."""
    counts = torch.tensor([2, 0, 1, 3, 0, 2])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    for factors in (None, torch.rand(8) + 0.5):
        part = BagPart(offsets, factors, torch.repeat_interleave(torch.arange(6), counts), 2, 3)
        sums, gradients = torch.randn(8, DIM), torch.randn(2, 3, DIM)
        results = []
        for is_on_device in (False, True):
            rows = sums.clone().requires_grad_()
            pooled = on_device.gather(part.device_occurrences, rows, [3, 3]) if is_on_device else part.pool(rows)
            torch.autograd.backward(pooled, list(gradients))
            results.append([*(value.tolist() for value in pooled), rows.grad.tolist()])
        assert results[0] == results[1]


def test_a_key_outside_its_table_is_an_error() -> None:
    """It names the feature and the sample."""
    small = Table("small", DIM, num_keys=9)
    features = group_features({"tags": Pooled(small, where="owner")}, pools_at_owner=True)
    batch = Batch({"tags": Jagged.from_lists([[1, 2], [], [8, 9]])})
    with pytest.raises(ValueError, match=r"feature 'tags', sample 2: key 9 is outside 0 \.\. 8"):
        dedup_batch(features, batch, 1, 2)


def test_clustering_ignores_bags() -> None:
    """Samples go together by the keys whose rows travel."""
    batch = batch_of(0, 0)
    rows_alone = group_features({"a_rows": Sequence(A)})
    others = Batch({"a_rows": batch.keys["a_rows"]}, {"number": torch.arange(NUM_SAMPLES)})
    both = Batch(batch.keys, others.inputs)
    parts = [
        [part["number"].tolist() for part in dedup_batch(features, one, 3, 2, clustering=BY_KEYS).inputs]
        for features, one in ((rows_alone, others), (FEATURES, both))
    ]
    assert parts[0] == parts[1]
    bags_alone = group_features({"a_sum": Pooled(A, where="owner")}, pools_at_owner=True)
    alone = Batch({"a_sum": batch.keys["a_sum"]}, others.inputs)
    in_order = [part.tolist() for part in torch.arange(NUM_SAMPLES).tensor_split(3)]
    dedup = dedup_batch(bags_alone, alone, 3, 2, clustering=BY_KEYS)
    assert [part["number"].tolist() for part in dedup.inputs] == in_order
