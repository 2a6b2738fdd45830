"""Trial steps leave the run as it is, and all ranks choose the same number of micro-batches.

Fails, for example, if `_untouched` does not restore the model, if `_first_batches` does not give the batches back, or
if choose_num_micro_batches takes each rank's own choice.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import nestpipe
from nestpipe import World
from nestpipe.models import DLRM
from nestpipe.prediction import choose, measure
from nestpipe.prediction.choose import Choice, choose_num_micro_batches
from nestpipe.prediction.measure import crosses_batches
from nestpipe.prediction.split_costs import SplitCosts
from tests import clicks
from tests.ranks import run_ranks

STEPS = 4


class Counting(DLRM):
    """Counts its forwards in a buffer, in training mode."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.register_buffer("num_forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, *arguments: Any) -> Tensor:
        if self.training:
            self.num_forwards += 1
        loss: Tensor = super().forward(*arguments)
        return loss


def make_trainer(world: World, num_micro_batches: int, **options: Any) -> nestpipe.Trainer:
    model = Counting(clicks.NUM_DENSE, clicks.DATA.feature_names, clicks.DIM, bottom=(16,), top=(32,), seed=3)
    return nestpipe.Trainer(
        model,
        clicks.features(),
        dense_optimizer=lambda parameters: torch.optim.Adam(parameters, 3e-3),
        world=world,
        seed=5,
        num_micro_batches=num_micro_batches,
        **options,
    )


def train(trainer: nestpipe.Trainer, data: Any) -> tuple[str, Any, int]:
    trainer.fit(data, STEPS)
    return trainer.digest(), trainer.data_state(), int(trainer.model.num_forwards)


def measure_quickly() -> None:
    """Has one step counted of each kind."""
    measure.WARM_UP_STEPS = measure.COUNTED_STEPS = 1
    measure.FILLING_STEPS = measure.FULL_STEPS = measure.DRAINING_STEPS = 1


def choose_and_train(world: World, schedule: str) -> dict[str, Any]:
    """Trains with a number that trial steps have chosen, then with the same number from the start. Each rank would
    choose another one."""
    costs: list[SplitCosts] = []

    def choice_by(measured: SplitCosts, candidates: list[int]) -> Choice:
        costs.append(measured)
        return Choice(2 + world.rank, "", {num: float(num) for num in candidates})

    choose.choice_by = choice_by
    measure_quickly()
    trainer, data = make_trainer(world, 1, schedule=schedule), clicks.batches(world)
    generators, was_training = torch.get_rng_state(), trainer.model.training
    choice = choose_num_micro_batches(trainer, data)
    kept = {
        "generators": torch.equal(generators, torch.get_rng_state()),
        "mode": trainer.model.training == was_training,
        "gradients": all(parameter.grad is None for parameter in trainer.model.parameters()),
        "rows": not any(trainer.store.sizes([table.name for table in trainer.tables])),
    }
    trainer.split_into(choice.num_micro_batches)
    chosen = train(trainer, data)
    fixed = train(make_trainer(world, choice.num_micro_batches, schedule=schedule), clicks.batches(world))
    return {"choice": choice, "kept": kept, "chosen": chosen, "fixed": fixed, "costs": costs[0]}


def choose_in_schedules(world: World) -> dict[str, dict[str, Any]]:
    return {schedule: choose_and_train(world, schedule) for schedule in ("nested", "intra")}


def test_a_chosen_number_trains_as_a_given_one() -> None:
    by_rank = run_ranks(2, choose_in_schedules)
    for schedule in by_rank[0]:
        results = [by_schedule[schedule] for by_schedule in by_rank]
        for result in results:
            assert result["choice"].num_micro_batches == 2  # that of rank 0
            assert all(result["kept"].values()), result["kept"]
            assert result["chosen"] == result["fixed"]
        check_costs(results[0]["costs"], results[1]["costs"], schedule)


def check_costs(costs: SplitCosts, others: SplitCosts, schedule: str) -> None:
    """Both ranks have measured the same, and everything that is needed for each number."""
    assert repr(costs) == repr(others)
    assert sorted(costs.traffic) == [1, 2, 4, 8, 16]
    totals = [traffic.all_rows for traffic in costs.traffic.values()]
    assert all(len(traffic.rows) == len(traffic.gradients) == num for num, traffic in costs.traffic.items())
    assert min(totals) > 0
    assert max(totals) < 1.5 * min(totals)  # a row travels once, but the busiest rank may be another
    crosses = schedule == "nested"
    assert costs.way.cross_batch == crosses
    assert all((traffic.early_rows > 0) == crosses for traffic in costs.traffic.values())
    assert (costs.late_share > 0) == crosses
    assert 0 < costs.hit_rate < 1
    assert (costs.dense_ms(8) >= costs.dense_ms(1)).all()
    assert len(costs.stages["forward"].unsplit_ms) == 2
    assert sorted(costs.measured_step_ms) == [1, 8]
    assert min(costs.measured_step_ms.values()) > 0


def measure_what_cannot_be_split(world: World) -> list[str]:
    measure_quickly()
    normal = make_trainer(world, 1)
    normal.model.top.insert(0, torch.nn.BatchNorm1d(normal.model.top[0].in_features))
    serial = make_trainer(world, 1, schedule="serial")
    batch = next(iter(clicks.batches(world)))
    single = batch[:1] if world.rank == 1 else batch
    weightless = [replace(batch, weight=0.0)] * 2
    cases = (normal, clicks.batches(world)), (serial, clicks.batches(world)), (make_trainer(world, 1), [single])
    choices = [
        choose_num_micro_batches(trainer, data) for trainer, data in (*cases, (make_trainer(world, 1), weightless))
    ]
    assert all(choice.num_micro_batches == 1 for choice in choices)
    return [choice.why for choice in choices]


def test_what_cannot_be_split() -> None:
    expected = ("BatchNorm1d mixes", "schedule serial exchanges nothing", "fewer than 2 samples", "has weight 0")
    for reasons in run_ranks(2, measure_what_cannot_be_split):
        assert [text in reason for text, reason in zip(expected, reasons, strict=True)] == [True] * 4, reasons


def test_one_rank_is_not_measured() -> None:
    choice = choose_num_micro_batches(make_trainer(World(), 1), iter(()))
    assert (choice.num_micro_batches, choice.predicted_step_ms) == (1, {})
    assert "one rank exchanges nothing" in choice.why
    assert not crosses_batches(make_trainer(World(), 1))
