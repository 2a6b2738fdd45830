"""A loop of one's own saves and loads by its pipeline, and continues exactly."""

from pathlib import Path

import pytest
import torch

import nestpipe
from nestpipe import World
from nestpipe.checkpoint import CheckpointError
from tests import clicks
from tests.ranks import run_ranks

STEPS, FIRST = 6, 4


def train(world: World, path: Path | None, steps: int, loads: bool) -> tuple[int, list[torch.Tensor]]:
    """Returns the sum of the rows' hashes over ranks, and the dense parameters. Saves after each second step."""
    torch.manual_seed(0)
    model = clicks.model()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    parts = {"model": model, "optimizer": optimizer, "lr_schedule": schedule}
    reducer = nestpipe.DenseReducer(model, world)
    data = clicks.batches(world)
    with nestpipe.pipeline(clicks.features(), data, world=world, steps=steps, seed=5, num_micro_batches=2) as pipeline:
        if loads and path is not None:
            assert pipeline.load(path, **parts) == {"note": FIRST}
        for step in pipeline:
            for micro_batch in step:
                (model(micro_batch.embeddings, micro_batch.inputs) / step.weight).backward()
            reducer.finish(step)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step.update_rows()
            if path is not None and not loads and step.number % 2 == 1:
                pipeline.save(path, **parts, extra={"note": step.number + 1})
    store = pipeline.store
    texts = world.control.share_text(str(sum(store.digest_part(table.name) for table in pipeline.tables)))
    return sum(map(int, texts)) % 2**256, [p.detach().clone() for p in model.parameters()]


def in_two_parts(world: World, path: Path) -> tuple[bool, bool]:
    whole_rows, whole = train(world, None, STEPS, loads=False)
    train(world, path, FIRST + 1, loads=False)  # its last step is not saved
    rows, dense = train(world, path, STEPS - FIRST, loads=True)
    return rows == whole_rows, all(torch.equal(a, b) for a, b in zip(dense, whole, strict=True))


@pytest.mark.parametrize("size", [1, 2])
def test_continues_exactly(size: int, tmp_path: Path) -> None:
    """Fails if Pipeline.load does not move the data, or does not set the number of the next step."""
    for has_same_rows, has_same_dense in run_ranks(size, in_two_parts, tmp_path / "save"):
        assert has_same_rows
        assert has_same_dense


def test_a_load_that_fails_leaves_no_rows(tmp_path: Path) -> None:
    """Fails if Pipeline.load does not empty the store after an error."""
    train(World(), tmp_path / "save", 2, loads=False)
    shard = sorted((tmp_path / "save").rglob("*.rows"))[-1]
    shard.write_bytes(shard.read_bytes()[:-64] + bytes(64))
    pipeline = nestpipe.pipeline(clicks.features(), clicks.batches(World()), world=World(), seed=5)
    with pytest.raises(CheckpointError, match="checksum"):
        pipeline.load(tmp_path / "save", model=clicks.model())
    assert not any(pipeline.store.sizes([table.name for table in pipeline.tables]))


def test_only_into_a_new_pipeline(tmp_path: Path) -> None:
    """Fails if Pipeline.load does not look for rows."""
    pipeline = nestpipe.pipeline(clicks.features(), clicks.batches(World()), world=World(), seed=5)
    table = pipeline.tables[0].name
    record = pipeline.store.gather(table, torch.tensor([1])).records
    pipeline.store.scatter(table, torch.tensor([1]), record, step=0)
    with pytest.raises(RuntimeError, match="load into a new pipeline"):
        pipeline.load(tmp_path / "save")
