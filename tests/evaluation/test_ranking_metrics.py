"""Hit rate, NDCG and MRR by their definitions, and through `evaluate` with models of histories.

Fails, for example, if ndcg divides by log2(rank), or if RankMetrics.compute takes its own rank's users only.
"""

import math
from itertools import islice

import pytest
import torch

import nestpipe
from nestpipe import World
from nestpipe.data.dataset import Batches
from nestpipe.data.negatives import WithNegatives
from nestpipe.evaluation.ranking_metrics import RankMetrics, hit_rate, mrr, ndcg
from nestpipe.models import HSTU, FuXi
from tests.histories import NUM_ITEMS, features
from tests.models.test_next_item_trained import DIM, MAX_LENGTH, Histories
from tests.ranks import run_ranks


def test_by_hand() -> None:
    ranks = torch.tensor([1, 2, 10, 11])
    assert hit_rate(ranks, 1) == 0.25
    assert hit_rate(ranks, 10) == 0.75
    assert ndcg(ranks, 10) == pytest.approx((1 + 1 / math.log2(3) + 1 / math.log2(11)) / 4, rel=1e-15)
    assert ndcg(ranks, 1) == 0.25
    assert mrr(ranks) == pytest.approx((1 + 1 / 2 + 1 / 10 + 1 / 11) / 4, rel=1e-15)


def test_order_does_not_matter() -> None:
    ranks = torch.randint(1, 1000, (5000,), generator=torch.Generator().manual_seed(0))
    assert ndcg(ranks, 100) == ndcg(ranks.flip(0), 100)
    assert mrr(ranks) == mrr(ranks.sort().values)


def test_no_users_is_nan() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    assert all(math.isnan(value) for value in (hit_rate(empty, 5), ndcg(empty, 5), mrr(empty)))


def make_trainer(world: World, model_class=HSTU) -> nestpipe.Trainer:
    table = nestpipe.Table("item", DIM, optimizer=nestpipe.optim.Adam(0.01, betas=(0.9, 0.98)))
    return nestpipe.Trainer(
        model_class(DIM, MAX_LENGTH, dim_qk=4, dim_v=4, num_heads=2, dropout=0.0, negatives_per="sample", seed=4),
        features(table),
        dense_optimizer=lambda parameters: torch.optim.AdamW(parameters, 0.01, betas=(0.9, 0.98), weight_decay=0),
        world=world,
        schedule="serial",
    )


def batches(world: World, position: int = 0) -> Batches:
    result = Batches(WithNegatives(Histories(), NUM_ITEMS, 8, "sample"), 24 // world.size, world.rank, world.size)
    result.load_state({"position": position})
    return result


def slow_metrics(trainer: nestpipe.Trainer, num_batches: int, at: int) -> list[float]:
    """Computes metrics on one rank by sorting plain scores for each user."""
    keys, embedding = trainer.export_embedding("item")
    rows = dict(zip(keys.tolist(), torch.nn.functional.normalize(embedding.weight.double(), dim=1), strict=True))
    untrained = trainer.store.gather("item", torch.arange(NUM_ITEMS), rows_only=True).records.double()
    items = torch.stack(
        [rows.get(key, torch.nn.functional.normalize(untrained[key], dim=0)) for key in range(NUM_ITEMS)]
    )
    ranks = []

    class Users:
        method = "encode"

        def update(self, outputs, inputs, keys) -> None:
            scores = outputs.double() @ items.T
            for i in range(len(outputs)):
                target = int(keys["target"].values[i])
                seen = keys["history"].take(torch.tensor([i])).values.tolist()
                left = [item for item in range(NUM_ITEMS) if item == target or item not in seen]
                order = sorted(left, key=lambda item: (-float(scores[i, item]), item))
                ranks.append(order.index(target) + 1)

        def compute(self, channel) -> dict[str, float]:
            return {}

    nestpipe.evaluate(trainer, islice(batches(World(), 2400), num_batches), [Users()])
    hits = [r <= at for r in ranks]
    return [
        sum(hits) / len(ranks),
        sum(1 / math.log2(r + 1) for r in ranks if r <= at) / len(ranks),
        sum(1 / r for r in ranks) / len(ranks),
    ]


@pytest.mark.parametrize("model_class", [HSTU, FuXi])
def test_through_evaluate(model_class) -> None:
    trainer = make_trainer(World(), model_class)
    trainer.fit(batches(World()), steps=12)
    before = trainer.digest()
    metrics = nestpipe.evaluate(
        trainer, islice(batches(World(), 2400), 3), [RankMetrics(trainer, NUM_ITEMS, (3,))]
    ).metrics
    assert trainer.digest() == before
    assert [metrics["hr_at_3"], metrics["ndcg_at_3"], metrics["mrr"]] == pytest.approx(slow_metrics(trainer, 3, 3))
    assert metrics["num_items"] == NUM_ITEMS


def rank_untrained(world: World, num_batches: int) -> dict[str, float]:
    trainer = make_trainer(world)
    data = islice(batches(world), num_batches) if world.rank != 1 else iter(())
    return nestpipe.evaluate(trainer, data, [RankMetrics(trainer, NUM_ITEMS)]).metrics


def test_ranks_agree_and_one_may_have_no_data() -> None:
    first, second = run_ranks(2, rank_untrained, 2)
    assert first == second
    assert first["num_untrained_items"] == NUM_ITEMS
    assert first["hr_at_50"] == 1.0


def test_no_data_at_all() -> None:
    metrics = rank_untrained(World(), 0)
    assert math.isnan(metrics["mrr"])


def test_refusals() -> None:
    trainer = make_trainer(World())
    with pytest.raises(ValueError, match="no feature 'item' to rank by"):
        RankMetrics(trainer, NUM_ITEMS, target="item")
    with pytest.raises(ValueError, match="at is"):
        RankMetrics(trainer, NUM_ITEMS, at=(0,))
    trainer.model = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match="Linear has no method encode"):
        nestpipe.evaluate(trainer, [], [RankMetrics(trainer, NUM_ITEMS)])
