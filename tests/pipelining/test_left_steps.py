"""Steps that fail in an exchange, are interrupted, or are used in the wrong way.

Fails if Executor.wait ignores the error of an operation that is done, or if Stages.collect_gradients leaves the
gradients in the rows.
"""

import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nestpipe import World
from nestpipe.embedding.exchange.local import LocalBatch
from tests.exactness.cases import Case, SmallModel, features_of, global_batches, make_pipeline, make_trainer
from tests.schedules import OUTER

CASE = Case("adagrad", "shared", 2, steps=8)


@pytest.mark.parametrize("schedule", ["serial", "intra", "nested"])
@pytest.mark.parametrize("stage", ["send_rows", "return_gradients"])
def test_an_exchange_that_fails(schedule: str, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the step is applied, and its own error is raised. Fails if Executor.wait ignores the error of an
    operation that is done."""
    trainer = make_trainer(World(), replace(CASE, num_micro_batches=3, schedule=schedule))
    before = trainer.digest()
    original = getattr(LocalBatch, stage)

    def fails(self: LocalBatch, micro_batch: int, *arguments) -> None:
        if micro_batch == 1:
            raise MemoryError("no memory for this exchange")
        if stage == "return_gradients":
            time.sleep(0.05)  # the failed operation is done before the wait for it
        original(self, micro_batch, *arguments)

    monkeypatch.setattr(LocalBatch, stage, fails)
    with pytest.raises(MemoryError, match="no memory for this exchange"):
        trainer.fit(global_batches(2))
    monkeypatch.undo()
    assert trainer.num_steps == 0
    assert trainer.digest() == before


def late_backward(schedule: str) -> None:
    case = replace(CASE, schedule=schedule)
    model = SmallModel({name: feature.table.dim for name, feature in features_of(case).items()})
    with make_pipeline(World(), case, global_batches(1)) as pipeline:
        for step in pipeline:
            losses = [model(micro_batch.embeddings, micro_batch.inputs) for micro_batch in step]
            sum(losses).backward()
            step.update_rows()


@pytest.mark.parametrize("schedule", OUTER)
def test_a_backward_after_its_turn(schedule: str) -> None:
    with pytest.raises(RuntimeError, match="call backward for each micro-batch within its turn of the loop"):
        late_backward(schedule)


def test_micro_batches_are_iterated_over_once() -> None:
    with make_pipeline(World(), CASE, global_batches(1)) as pipeline:
        step = next(iter(pipeline))
        for micro_batch in step:
            sum(value.sum() for value in micro_batch.embeddings.values() if isinstance(value, Tensor)).backward()
        with pytest.raises(RuntimeError, match="can be iterated over only once"):
            list(step)


def test_an_interrupted_batch_is_trained_by_the_next_fit() -> None:
    """Fails if Ctrl-C marks the batch in training as refused, as an error of the model does."""
    trainer = make_trainer(World(), CASE)
    batches = iter(global_batches(6))

    original = trainer.model.forward
    calls = 0

    def forward(*arguments):
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt
        return original(*arguments)

    trainer.check_split = False
    trainer.model.forward = forward
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(batches)
    trainer.fit(batches)
    assert trainer.num_steps == 6


@pytest.mark.parametrize("schedule", OUTER)
def test_a_batch_that_is_being_read_when_the_model_fails_is_not_lost(schedule: str) -> None:
    """Fails if BatchSource.pull gives a late batch to the run that was given up."""
    trainer = make_trainer(World(), replace(CASE, num_micro_batches=1, schedule=schedule))
    trainer.check_split = False
    seen: list[float] = []
    original = trainer.model.forward

    def slow_reader():
        for number, batch in enumerate(global_batches(7)):
            time.sleep(0.5 if number == 3 else 0.0)  # longer than a run that is given up waits for its lanes
            yield replace(batch, inputs={**batch.inputs, "number": torch.full((len(batch),), float(number))})

    def forward(embeddings, inputs) -> Tensor:
        seen.append(float(inputs["number"][0]))
        if len(seen) == 3:
            raise ValueError("a fault of the model")
        return original(embeddings, inputs)

    trainer.model.forward = forward
    batches = slow_reader()
    with pytest.raises(ValueError, match="a fault of the model"):
        trainer.fit(batches)
    trainer.fit(batches)
    assert seen == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]  # the batch at fault is not trained again
