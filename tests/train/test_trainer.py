"""Clipping and the schedule of the dense learning rate, against plain torch on the global batch.

Fails, for example, if Trainer._clip does not sum the rows' norm over ranks, or if update_rows ignores gradient_scale.
"""

from pathlib import Path

import pytest
import torch

from nestpipe import World
from tests.exactness.cases import Case, PlainTorch, global_batches, make_trainer, share_of
from tests.ranks import run_ranks

CASE = Case("own", "pooled_sum", 2, steps=12)
CLIP_NORM = 0.05


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)


def make(world: World, clip_rows: bool):
    trainer = make_trainer(world, CASE)
    trainer.clip_norm, trainer.clip_rows = CLIP_NORM, clip_rows
    trainer.lr_schedule = schedule(trainer.optimizer)
    return trainer


def train_clipped(world: World, clip_rows: bool):
    trainer = make(world, clip_rows)
    trainer.fit(share_of(global_batches(CASE.steps), world))
    piece = trainer.store.export_piece("item", 0, 65536)
    return trainer.model.state_dict(), piece.keys, piece.records[:, :5]


class ClippedTorch(PlainTorch):
    def __init__(self, case: Case, clip_rows: bool) -> None:
        super().__init__(case)
        self.clip_rows = clip_rows
        self.scheduler = schedule(self.dense)
        original = self.dense.step

        def clip_and_step(*arguments):
            parameters = [*self.model.parameters(), *(self.rows.values() if self.clip_rows else [])]
            torch.nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
            original(*arguments)

        self.clip_and_step = clip_and_step

    def step(self, batch) -> float:
        before, self.dense.step = self.dense.step, self.clip_and_step
        try:
            return super().step(batch)
        finally:
            self.dense.step = before
            self.scheduler.step()


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("clip_rows", [False, True])
def test_clipped_like_torch(size: int, clip_rows: bool) -> None:
    results = [train_clipped(World(), clip_rows)] if size == 1 else run_ranks(size, train_clipped, clip_rows)
    plain = ClippedTorch(CASE, clip_rows)
    for batch in global_batches(CASE.steps):
        plain.step(batch)
    for name, expected in plain.model.state_dict().items():
        torch.testing.assert_close(results[0][0][name], expected, rtol=1e-9, atol=1e-10)
    keys = torch.cat([keys for _, keys, _ in results])
    rows = torch.cat([rows for _, _, rows in results])
    torch.testing.assert_close(rows, plain.rows["item"].detach()[keys], rtol=1e-9, atol=1e-10)


def test_the_schedule_is_saved_too(tmp_path: Path) -> None:
    batches = global_batches(CASE.steps)
    whole, first, second = (make(World(), True) for _ in range(3))
    whole.fit(batches)
    first.fit(batches[:6])
    first.save(tmp_path / "save")
    second.load(tmp_path / "save")
    second.fit(batches[6:])
    assert second.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"] == 0.01 * 0.5**3
    assert second.digest() == whole.digest()


def test_gradients_of_parameters_without_an_optimizer_do_not_pile_up() -> None:
    """Fails if only the optimizer's parameters are set to zero before a step."""
    case = Case("sgd", "pooled_sum", 1, steps=4)
    trainer = make_trainer(World(), case)
    trainer.optimizer = torch.optim.SGD([trainer.model.first], 0.0)
    norms = []
    trainer.fit([global_batches(1)[0]] * 3, after_step=lambda _: norms.append(float(trainer.model.second.grad.norm())))
    assert norms[2] < 1.5 * norms[0]
