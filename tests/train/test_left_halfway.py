"""After a step that ends between the dense optimizer and the rows, training and saving are refused.

Fails, for example, if _train does not set is_partially_updated when it is left by an exception.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nestpipe import World
from nestpipe.pipelining.schedule import SCHEDULES
from nestpipe.pipelining.step import Step
from tests.exactness.cases import Case, global_batches, make_trainer

CASE = Case("adam", "shared", 2)


class EndsAt(torch.optim.lr_scheduler.LRScheduler):
    """A schedule that raises after its last step."""

    def __init__(self, optimizer: torch.optim.Optimizer, end: int) -> None:
        self.end = end
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        if self.last_epoch > self.end:
            raise ValueError(f"the schedule has {self.end} steps")
        return [group["lr"] for group in self.optimizer.param_groups]


def past_the_end_of_a_schedule(trainer, monkeypatch: pytest.MonkeyPatch) -> type[BaseException]:
    trainer.lr_schedule = EndsAt(trainer.optimizer, 4)
    return ValueError


def interrupted(trainer, monkeypatch: pytest.MonkeyPatch) -> type[BaseException]:
    """Presses Ctrl-C just after the dense optimizer has stepped."""
    original = Step.update_rows

    def update_rows(step: Step, scale: float) -> None:
        if step.number == 4:
            raise KeyboardInterrupt
        original(step, scale)

    monkeypatch.setattr(Step, "update_rows", update_rows)
    return KeyboardInterrupt


def interrupted_afterwards(trainer, monkeypatch: pytest.MonkeyPatch) -> type[BaseException]:
    """Presses Ctrl-C when rows and dense parameters both have the step."""
    original = Step.update_rows

    def update_rows(step: Step, scale: float) -> None:
        original(step, scale)
        if step.number == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(Step, "update_rows", update_rows)
    return KeyboardInterrupt


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("leave", [past_the_end_of_a_schedule, interrupted])
def test_refused_until_a_checkpoint_is_loaded(
    leave, schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 0.1 went on with dense parameters of step 5 and rows of step 4."""
    trainer, batches = make_trainer(World(), replace(CASE, schedule=schedule)), global_batches(6)
    error = leave(trainer, monkeypatch)
    trainer.fit(batches[:3])
    trainer.save(tmp_path)
    with pytest.raises(error):
        trainer.fit(batches[3:])
    for refused in (lambda: trainer.fit(batches), lambda: trainer.save(tmp_path), trainer.digest):
        with pytest.raises(RuntimeError, match=r"a step was left halfway.*Load a checkpoint to go on"):
            refused()
    trainer.load(tmp_path)
    monkeypatch.undo()
    trainer.lr_schedule = None
    trainer.fit(batches[3:])
    whole = make_trainer(World(), CASE)
    whole.fit(batches)
    assert trainer.digest() == whole.digest()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_whole_step_counts(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if an interruption after update_rows makes the trainer unusable."""
    trainer, batches = make_trainer(World(), replace(CASE, schedule=schedule)), global_batches(6)
    with pytest.raises(interrupted_afterwards(trainer, monkeypatch)):
        trainer.fit(batches)
    monkeypatch.undo()
    trainer.fit(batches[trainer.num_steps :])
    whole = make_trainer(World(), CASE)
    whole.fit(batches)
    assert (trainer.num_steps, trainer.digest()) == (6, whole.digest())
