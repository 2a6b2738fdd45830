"""A loop of one's own whose dense model FSDP shards: saved by name, and loaded at another number of ranks."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import nestpipe
from nestpipe import World
from tests import clicks
from tests.ranks import run_ranks

STEPS = 6


def make_model(world: World) -> nn.Module:
    torch.manual_seed(0)
    model = clicks.model()
    if world.size > 1:
        mesh = dist.init_device_mesh("cpu", (world.size,))
        fully_shard(model, mesh=mesh)
        model.set_gradient_divide_factor(1.0)
        model.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums
    return model


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def train(
    world: World, steps: int, load_from: Path | None = None, save_to: Path | None = None
) -> tuple[dict[str, Tensor], int]:
    """Returns the dense parameters, and the sum of the rows' hashes, after these steps."""
    model = make_model(world)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    features = clicks.features()
    with nestpipe.pipeline(features, clicks.batches(world), world=world, steps=steps, seed=5) as pipeline:
        if load_from is not None:
            pipeline.load(load_from, model=model, optimizer=optimizer)
        for step in pipeline:
            total = torch.zeros((), dtype=torch.float64)
            for micro_batch in step:
                loss = model(micro_batch.embeddings, micro_batch.inputs) / step.weight
                loss.backward()
                total += loss.detach()
            step.commit(total)
            optimizer.step()
            optimizer.zero_grad()
            step.update_rows()
    if save_to is not None:
        pipeline.save(save_to, model=model, optimizer=optimizer)
    parts = world.control.share_text(str(sum(pipeline.store.digest_part(table.name) for table in pipeline.tables)))
    return {name: full(p).detach().clone() for name, p in model.named_parameters()}, sum(map(int, parts)) % 2**256


def train_in_two_parts(world: World, path: Path) -> tuple[bool, bool]:
    """Returns whether dense parameters and rows are those of a run in one go."""
    whole, whole_rows = train(world, STEPS)
    train(world, STEPS // 2, save_to=path)
    resumed, resumed_rows = train(world, STEPS - STEPS // 2, load_from=path)
    return all(torch.equal(whole[name], resumed[name]) for name in whole), whole_rows == resumed_rows


def load_and_train(world: World, path: Path) -> dict[str, Tensor]:
    return train(world, 1, load_from=path)[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_sharded_by_fsdp(tmp_path: Path) -> None:
    """Fails if Subject.load_dense_state does not shard the optimizer's state, or if the pipeline does not move the
    data."""
    for has_same_dense, has_same_rows in run_ranks(2, train_in_two_parts, tmp_path / "save"):
        assert has_same_dense
        assert has_same_rows
    one, (two, _) = run_ranks(1, load_and_train, tmp_path / "save")[0], run_ranks(2, load_and_train, tmp_path / "save")
    for name in one:
        assert torch.allclose(one[name], two[name], rtol=1e-4, atol=1e-6)
