"""State of sharded models: it is saved whole, and each rank loads its own part of it."""

import runpy
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nestpipe import World
from nestpipe.checkpoint import dtensors as sharded_module
from nestpipe.checkpoint.dtensors import is_sharded, shard_like
from nestpipe.checkpoint.state_file import encode, read_state, write_state
from tests.ranks import run_ranks

INPUTS = torch.linspace(-1, 1, 4 * 5).reshape(4, 5)


def new_model() -> nn.Module:
    """Two linear layers. 7 rows do not divide by 2 ranks; the second rank has no part of the last bias."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
    model.register_buffer("seen", torch.zeros(3))
    return model


def sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(INPUTS).square().mean().backward()
        optimizer.step()


def tensors(state: Any) -> dict[str, Tensor]:
    return encode(state, "state").tensors


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def save_and_load(world: World, path: Path) -> dict[str, Any]:
    """Trains a sharded model, saves it on rank 0, and loads it into a new one."""
    model = sharded(new_model())
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    train(model, optimizer, 2)
    state = encode({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "state")
    if world.rank == 0:
        write_state(path, state)
    world.control.share_text("the file is written")
    again = sharded(new_model())
    new_optimizer = torch.optim.AdamW(again.parameters(), 0.7)
    loaded = read_state(path, None)
    again.load_state_dict(shard_like(loaded["model"], again.state_dict()))
    new_optimizer.load_state_dict(shard_like(loaded["optimizer"], new_optimizer))
    spare_bytes = [
        entry.to_local().untyped_storage().nbytes() - entry.to_local().nbytes
        for entries in new_optimizer.state.values()
        for entry in entries.values()
        if is_sharded(entry)
    ]
    assert shard_like(loaded["optimizer"], new_optimizer.state_dict())["state"][0]["exp_avg"].placements
    train(model, optimizer, 1)
    train(again, new_optimizer, 1)
    is_same = equal(
        tensors([model.state_dict(), optimizer.state_dict()]), tensors([again.state_dict(), new_optimizer.state_dict()])
    )
    return {"tensors": state.tensors, "is_same": is_same, "spare_bytes": spare_bytes}


def test_sharded_training_goes_on(tmp_path: Path) -> None:
    """Both ranks encode the full tensors, and the step after loading has the same bits as without.

    Fails if `_encode_sharded` stores `source.to_local()`, or if `_distribute` takes `Replicate` placements.
    """
    results = run_ranks(2, save_and_load, tmp_path / "state")
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    train(model, optimizer, 2)
    unsharded = tensors({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    assert equal(results[0]["tensors"], results[1]["tensors"])
    assert results[0]["tensors"].keys() == unsharded.keys()
    for name, tensor in unsharded.items():
        torch.testing.assert_close(results[0]["tensors"][name], tensor)  # gradients are summed in another order
    for result in results:
        assert result["is_same"]
        assert len(result["spare_bytes"]) == 8
        assert set(result["spare_bytes"]) == {0}


def distributed_tensors(world: World) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    full = torch.arange(15.0).reshape(3, 5)
    by_column = distribute_tensor(full, mesh, [Shard(1)])
    replicated = distribute_tensor(full.clone(), mesh, [Replicate()])
    tied = encode({"a": by_column, "b": by_column.detach(), "c": by_column * 1, "d": replicated}, "state")
    replicated.fill_(-1)
    short = distribute_tensor(torch.ones(1), mesh, [Shard(0)])
    encode([short, short], "state")  # the second rank has no part, so it cannot see that they are one
    with pytest.raises(ValueError, match=r"\['a'\]\[0\] has shape \[2\] in the checkpoint and \[3, 5\] here"):
        shard_like({"a": [torch.ones(2)]}, {"a": [by_column]})
    like = OrderedDict(a=by_column, b=[torch.ones(1), replicated])
    value = OrderedDict(a=full, b=[full, full], c=full)
    value._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    placed = shard_like(value, like)
    return {
        "tied": tied.tensors,
        "type": type(placed),
        "keys": list(placed),
        "metadata": placed._metadata,
        "placements": [str(placed["a"].placements), str(placed["b"][1].placements)],
        "unchanged": placed["b"][0] is full and placed["c"] is full,
        "local": placed["a"].to_local(),
    }


def test_placements() -> None:
    """Fails if `_encode_sharded` passes no identity, if `_store` does not copy, or if `_replaced` drops `_metadata`."""
    full = torch.arange(15.0).reshape(3, 5)
    results = run_ranks(2, distributed_tensors)
    for result in results:
        assert result["tied"].keys() == {"a", "c", "d"}
        assert all(torch.equal(tensor, full) for tensor in result["tied"].values())
        assert result["type"] is OrderedDict
        assert result["keys"] == ["a", "b", "c"]
        assert result["metadata"] == {"": {"version": 1}}
        assert result["placements"] == ["(Shard(dim=1),)", "(Replicate(),)"]
        assert result["unchanged"]
    assert torch.equal(results[0]["local"], full[:, :3])
    assert torch.equal(results[1]["local"], full[:, 3:])


def optimizer_state(world: World) -> list[bool]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    scalar = distribute_tensor(torch.ones(()), mesh, [Replicate()])
    weight = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    entry = {"step": torch.tensor(1.0), "mean": torch.tensor(2.0)}
    value = {"state": {"s": entry, "w": {"step": torch.ones(()), "mean": torch.ones(4)}}, "param_groups": [{"lr": 1}]}
    placed = shard_like(value, {"state": {}, "param_groups": []}, {"s": scalar, "w": weight})
    listed = shard_like({"state": {0: {"mean": torch.ones(4)}, 5: {}}}, {"state": {}}, [weight])
    return [
        is_sharded(tensor)
        for state in (placed["state"]["s"], placed["state"]["w"], listed["state"][0])
        for tensor in state.values()
    ]


def test_state_of_a_new_optimizer() -> None:
    """Fails if `_shard` passes the parameter on for the key "step"."""
    assert run_ranks(2, optimizer_state) == [[False, True, False, True, True]] * 2


def test_without_sharded_tensors() -> None:
    """Fails if `_shard` always makes new lists, or if `_replaced` always copies."""
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    train(model, optimizer, 1)
    state, like = [model.state_dict(), (1, "two")], [model.state_dict(), ()]
    assert shard_like(state, like) is state
    saved = optimizer.state_dict()
    assert shard_like(saved, torch.optim.AdamW(model.parameters()).state_dict(), list(model.parameters())) is saved


def test_does_not_import_dtensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if sharded.py imports DTensor at its top, or if `is_sharded` imports it."""
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", None)  # importing it raises
    module = runpy.run_path(str(sharded_module.__file__))
    value = {"a": torch.ones(2)}
    assert module["shard_like"](value, {"a": torch.ones(2)}) is value
