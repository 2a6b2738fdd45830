"""A checkpoint of format 2, which an early 0.2 wrote, loads at any world size, and training goes on exactly."""

import hashlib
import json
from pathlib import Path

import pytest
import torch

from nestpipe import World
from nestpipe.checkpoint import LoadReport
from nestpipe.checkpoint.manifest import MANIFEST
from nestpipe.checkpoint.match import describe_dense, describe_tables
from tests.checkpoint.saved import OWN_FILES
from tests.exactness.cases import Case, global_batches, make_trainer, on_ranks, share_of

CASE = Case("adam", "pooled_mean", 2)
STEPS = 3


def save_as_format_2(world: World, folder: Path) -> str:
    """Trains and writes the files that the early 0.2 wrote. Returns the digest."""
    trainer = make_trainer(world, CASE)
    trainer.fit(share_of(global_batches(STEPS), world))
    checkpoint = folder / f"step-{STEPS:08d}"
    checkpoint.mkdir(parents=True, exist_ok=True)
    pieces = {table.name: tuple(trainer.store.export_piece(table.name, 0, 65536)) for table in trainer.tables}
    pieces = {name: tuple(array.clone() for array in piece) for name, piece in pieces.items()}
    torch.save({"rows": pieces, "data": {"position": 7}}, checkpoint / f"rank{world.rank}.pt")
    parts = {"model": trainer.model, "optimizer": trainer.optimizer}
    if world.rank == 0:
        (folder / OWN_FILES[0]).write_text(json.dumps({"written by": "nestpipe", "holds": ""}))
        torch.save({**{name: part.state_dict() for name, part in parts.items()}, "extra": {}}, checkpoint / "dense.pt")
    world.control.share_text("all files are there")
    if world.rank == 0:
        files = [checkpoint / "dense.pt", *(checkpoint / f"rank{rank}.pt" for rank in range(world.size))]
        manifest = {
            "format": 2,
            "world_size": world.size,
            "num_steps": STEPS,
            "seed": trainer.seed,
            "tables": describe_tables(trainer.tables, trainer.seed),
            "dense": describe_dense(trainer.model, trainer.optimizer, None),
            "recipe": None,
            "checksums": {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files},
            "sizes": {file.name: file.stat().st_size for file in files},
        }
        (checkpoint / MANIFEST).write_text(json.dumps(manifest, indent=2))
    return trainer.digest()


def load_and_go_on(world: World, folder: Path) -> tuple[str, object, str, str]:
    """Returns the loaded digest and position, the digest after two more steps, and that of a run without a break."""
    trainer, whole = make_trainer(world, CASE), make_trainer(world, CASE)
    trainer.load(folder)
    loaded, position = trainer.digest(), trainer.data_state()
    batches = share_of(global_batches(STEPS + 2), world)
    trainer.fit(batches[STEPS:])
    whole.fit(batches)
    trainer.save(folder)
    return loaded, position, trainer.digest(), whole.digest()


@pytest.mark.parametrize(
    "sizes", [(2, 1), *(pytest.param(s, marks=pytest.mark.slow) for s in ((1, 1), (2, 2), (1, 3)))], ids=str
)
def test_loads_and_goes_on(sizes: tuple[int, int], tmp_path: Path) -> None:
    """Fails if read_old_rank takes all rows of a file, or only those of one file."""
    num_saved, size = sizes
    saved = on_ranks(num_saved, save_as_format_2, tmp_path)[0]
    for loaded, position, continued, whole in on_ranks(size, load_and_go_on, tmp_path):
        assert loaded == saved
        assert position == {"position": 7}
        assert continued == whole or num_saved != size
    assert sorted(child.name for child in tmp_path.iterdir()) == [*OWN_FILES, f"step-{STEPS + 2:08d}"]


def test_a_report_of_nothing() -> None:
    assert str(LoadReport()) == "taken: nothing; made new: nothing; dropped: nothing"
