"""Dense gradients over ranks: buckets in one order, begun during the last backward, completed when a step is left.

Fails if _mark_ready begins a bucket before those before it, if the first bucket waits for finish, or if `complete` does
nothing.
"""

import pytest
import torch
from torch import nn

from nestpipe import DenseReducer, World
from nestpipe.pipelining.schedule import SCHEDULES
from tests.exactness.cases import Case, SmallModel, features_of, global_batches, make_pipeline, on_ranks, share_of


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4, dtype=torch.float64) for _ in range(6)))


def begun_in_backward(world: World) -> tuple[list[int], list[float], list[float]]:
    """Returns the buckets begun when the backward reached each layer, last layer first; the sums; the expected sums."""
    model = layers()
    reducer = DenseReducer(model, world, bucket_bytes=200)  # a layer has 128 + 32 bytes
    begun: list[int] = []

    def observe(module: nn.Module, inputs: object, output: torch.Tensor) -> None:
        output.register_hook(lambda gradient: begun.append(len(reducer._begun)))

    for layer in model:
        layer.register_forward_hook(observe)
    with reducer.overlap(True):
        model(torch.full((3, 4), world.rank + 1.0, dtype=torch.float64)).sum().backward()
    begun.append(len(reducer._begun))
    reducer.finish()
    plain = layers()
    for rank in range(world.size):
        plain(torch.full((3, 4), rank + 1.0, dtype=torch.float64)).sum().backward()
    sums = [float(p.grad.sum()) for p in model.parameters()]
    return begun, sums, [float(p.grad.sum()) for p in plain.parameters()]


def test_buckets_begin_while_the_backward_runs() -> None:
    for begun, sums, expected in on_ranks(2, begun_in_backward):
        assert begun == sorted(begun)
        assert begun[0] == 0
        assert begun[-2] >= 3  # before the backward of the first layer
        assert begun[-1] == 6
        assert sums == pytest.approx(expected, rel=1e-12)


def same_bits(world: World) -> list[list[list[float]]]:
    """Returns gradients without and with overlap. Ranks use different layers; rank 1 has no backward at all."""
    results = []
    for overlaps in (False, True):
        model = layers()
        reducer = DenseReducer(model, world, bucket_bytes=200)
        if world.rank != 1:
            used = model[: 4 + world.rank]
            for i in range(3):
                with reducer.overlap(overlaps and i == 2):
                    used(torch.full((3, 4), world.rank + i + 0.1, dtype=torch.float64)).square().sum().backward()
        reducer.finish()
        results.append([[] if p.grad is None else p.grad.flatten().tolist() for p in model.parameters()])
    return results


def test_overlap_changes_no_bit() -> None:
    results = on_ranks(3, same_bits)
    assert results[0][0] == results[0][1] == results[1][1] == results[2][1]
    assert [len(gradient) > 0 for gradient in results[0][0]] == [True] * 12


def second_backward(world: World) -> str:
    model = layers()
    reducer = DenseReducer(model, world, bucket_bytes=200)
    x = torch.ones(3, 4, dtype=torch.float64)
    text = ""
    with reducer.overlap(True):
        model(x).sum().backward()
        try:
            model(x).sum().backward()
        except RuntimeError as error:
            text = str(error)
    reducer.complete()
    return text


def test_a_second_backward_is_refused() -> None:
    for text in on_ranks(2, second_backward):
        assert "there must be one backward, the step's last" in text


def leave_somewhere(world: World, schedule: str) -> list[float]:
    """Returns the losses of a run, after one whose first step the ranks left at different micro-batches."""
    case = Case("adagrad", "shared", 4, steps=4, schedule=schedule)
    batches = share_of(global_batches(case.steps), world)
    model = SmallModel({name: feature.table.dim for name, feature in features_of(case).items()})
    reducer = DenseReducer(model, world, bucket_bytes=100)
    losses = []
    for leaves_at in (world.rank, None):
        with make_pipeline(world, case, batches) as pipeline:
            for step in pipeline:
                model.zero_grad()
                total = torch.zeros((), dtype=torch.float64)
                for i, micro_batch in enumerate(step):
                    if i == leaves_at:
                        break
                    loss = model(micro_batch.embeddings, micro_batch.inputs) / step.weight
                    with reducer.overlap(micro_batch.is_last or i + 1 == leaves_at):
                        loss.backward()
                    total += loss.detach()
                if leaves_at is not None:
                    break
                reducer.finish(step, total)
                step.update_rows()
                losses.append(float(total))
    return losses


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ranks_may_leave_a_step_at_different_micro_batches(schedule: str) -> None:
    first, *others = on_ranks(3, leave_somewhere, schedule)
    assert len(first) == 4
    assert all(other == first for other in others)
    (alone,) = on_ranks(1, leave_somewhere, "serial")
    assert first == pytest.approx(alone, rel=1e-10)


def unfreeze(world: World) -> tuple[list[float], list[float]]:
    """Returns gradients of a layer that was frozen when the reducer was made, then of one that was frozen later."""
    model = layers()
    model[0].requires_grad_(False)
    reducer = DenseReducer(model, world, bucket_bytes=200)
    x = torch.full((3, 4), world.rank + 1.0, dtype=torch.float64)
    gradients = []
    for layer in (0, 5):
        model.requires_grad_(True)
        model[5 - layer].requires_grad_(False)
        model.zero_grad()
        with reducer.overlap(True):
            model(x).sum().backward()
        reducer.finish()
        gradients.append(model[layer].weight.grad.flatten().tolist())
    return gradients[0], gradients[1]


def test_parameters_may_be_frozen_and_unfrozen() -> None:
    """Fails if the reducer keeps the parameters that it was made with: ranks would differ."""
    first, second = on_ranks(2, unfreeze)
    assert first == second


def left_with_another_reducer(world: World) -> list[float]:
    """Keeps an old reducer of this world alive on rank 0 only."""
    old = DenseReducer(nn.Linear(2, 2), world)
    if world.rank == 1:
        del old
    return leave_somewhere(world, "nested")


def test_a_reducer_that_only_some_ranks_have_is_left_alone() -> None:
    """Fails if World.leave completes every reducer that lives on this rank."""
    first, second = on_ranks(2, left_with_another_reducer)
    assert first == second


def changed_too_early(world: World) -> str:
    model = layers()
    reducer = DenseReducer(model, world, bucket_bytes=200)
    with reducer.overlap(True):
        model(torch.ones(3, 4, dtype=torch.float64)).sum().backward()
    model[5].weight.grad.mul_(0.5)
    try:
        reducer.finish()
    except RuntimeError as error:
        reducer.complete()
        return str(error)
    return ""


def test_gradients_on_their_way_must_not_change() -> None:
    for text in on_ranks(2, changed_too_early):
        assert "scale or clip gradients after finish" in text
