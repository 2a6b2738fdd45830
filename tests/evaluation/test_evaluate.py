"""Evaluation sees the rows as they are, leaves no trace, and counts what was never trained.

Fails, for example, if Reading writes its resident rows back, if evaluate forgets to put the model back into training
mode, or if it divides by the weight of its own rank's samples.
"""

from itertools import islice

import pytest
import torch
from torch import nn

import nestpipe
from nestpipe import World
from nestpipe.distributed import RankError
from nestpipe.evaluation import ClickMetrics
from tests.clicks import DATA, batches, make_trainer
from tests.ranks import run_ranks


def on_ranks(size: int, function, *arguments) -> list:
    return [function(World(), *arguments)] if size == 1 else run_ranks(size, function, *arguments)


def evaluate_between_steps(world: World) -> tuple[float, float, bool, bool, nestpipe.evaluation.evaluate.Evaluation]:
    """Returns a batch's evaluated loss, its loss in the next step, whether the digest stayed, and the training mode."""
    trainer = make_trainer(world)
    trainer.fit(batches(world), steps=3)
    before = trainer.digest()
    evaluation = nestpipe.evaluate(trainer, islice(batches(world, position=192), 1), [ClickMetrics()])
    same, training = trainer.digest() == before, trainer.model.training
    loss = trainer.fit(batches(world, position=192), steps=1).losses[0]
    return evaluation.loss, loss, same, training, evaluation


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sees_what_the_next_step_sees(size: int) -> None:
    results = on_ranks(size, evaluate_between_steps)
    for evaluated, trained, same, training, evaluation in results:
        assert evaluated == pytest.approx(trained, rel=1e-6)
        assert same
        assert training
        assert evaluation.num_samples == 64 // size * size
        assert evaluation == results[0][4]


def count_untrained(world: World) -> tuple[int, int, int]:
    trainer = make_trainer(world)
    untrained = nestpipe.evaluate(trainer, islice(batches(world), 1))
    trainer.fit(batches(world), steps=1)
    trained = nestpipe.evaluate(trainer, islice(batches(world), 1))
    return (
        untrained.num_untrained_keys,
        trained.num_untrained_keys,
        sum(trainer.store.size(t.name) for t in trainer.tables),
    )


@pytest.mark.parametrize("size", [1, 2])
def test_counts_keys_that_were_never_trained(size: int) -> None:
    results = on_ranks(size, count_untrained)
    sample = DATA.samples(0, 64)
    num_distinct = sum(len(jagged.values.unique()) for jagged in sample.keys.values())
    assert {r[:2] for r in results} == {(num_distinct, 0)}
    assert sum(r[2] for r in results) == num_distinct


def evaluate_unequal(world: World) -> tuple[float, int]:
    """Evaluates with all data on rank 0, and none on rank 1."""
    trainer = make_trainer(world)
    own_batches = [DATA.samples(0, 50), DATA.samples(50, 20)] if world.rank == 0 else []
    evaluation = nestpipe.evaluate(trainer, own_batches, [ClickMetrics()])
    return evaluation.loss, evaluation.num_samples


def test_ranks_with_unequal_data() -> None:
    (expected,) = on_ranks(1, evaluate_unequal)
    for loss, num_samples in on_ranks(2, evaluate_unequal):
        assert loss == pytest.approx(expected[0], rel=1e-6)
        assert num_samples == 70


def broken_reader(world: World) -> tuple[str, str, int]:
    def reader():
        yield from islice(batches(world), 1)
        if world.rank == 1:
            raise OSError("part 7 is truncated")
        yield from islice(batches(world, position=64), 1)

    trainer = make_trainer(world)
    try:
        nestpipe.evaluate(trainer, reader())
    except Exception as error:
        raised = error
    trainer.fit(batches(world), steps=2)  # an agreed error: the ranks go on together
    return type(raised).__name__, str(raised), trainer.num_steps


def test_reader_that_fails_on_one_rank() -> None:
    first, second = run_ranks(2, broken_reader)
    assert first == (RankError.__name__, "rank 1 failed: OSError: part 7 is truncated", 2)
    assert second == ("OSError", "part 7 is truncated", 2)


def test_metrics_need_predict() -> None:
    trainer = make_trainer(World())
    trainer.model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="Linear has no method predict"):
        nestpipe.evaluate(trainer, [], [ClickMetrics()])


def test_modules_keep_their_mode() -> None:
    trainer = make_trainer(World())
    trainer.model.train()
    trainer.model.bottom.eval()
    nestpipe.evaluate(trainer, islice(batches(World()), 1))
    assert trainer.model.training
    assert not trainer.model.bottom.training
    assert torch.is_grad_enabled()
