"""Checkpoints of changes: whatever happens to their bases, or to the save, the newest good state is found.

Fails, for example, if remove_older removes bases first, if Save._make_staging does not look whether the base is still
there, or if `chain` does not compare the ids of saves.
"""

import os
import shutil
from copy import copy
from pathlib import Path

import pytest

from nestpipe import Trainer, World
from nestpipe.checkpoint import CheckpointError, folder
from nestpipe.checkpoint.manifest import MANIFEST, read_manifest
from tests.checkpoint.saved import OWN_FILES, edit_manifest, flip, shards_of
from tests.exactness.cases import Case, global_batches, make_trainer
from tests.train.test_checkpoint_folder import CALLS, die_at

CASE = Case("adam", "shared", 1)
BATCHES = global_batches(12)


class Run:
    """A trainer that saves to one folder, and the digest of each step."""

    def __init__(self, path: Path, complete_every: int = 4, keep: int = 2) -> None:
        self.path, self.options = path, {"complete_every": complete_every, "keep": keep}
        self.trainer = make_trainer(World(), CASE)
        self.digests: dict[int, str] = {}

    def train(self) -> None:
        self.trainer.fit([BATCHES[self.trainer.num_steps]])
        self.digests[self.trainer.num_steps] = self.trainer.digest()

    def save(self) -> str:
        """Trains a step and saves it. Returns what kind of checkpoint it is."""
        self.train()
        self.trainer.save(self.path, **self.options)
        base = read_manifest(self.checkpoint(self.trainer.num_steps))["base"]
        return "complete" if base is None else f"based on {int(base['name'][5:])}"

    def checkpoint(self, step: int) -> Path:
        return self.path / f"step-{step:08d}"

    def loaded(self) -> Trainer:
        trainer = make_trainer(World(), CASE)
        trainer.load(self.path)
        assert trainer.digest() == self.digests[trainer.num_steps]
        return trainer


def test_a_base_that_has_gone(tmp_path: Path) -> None:
    """While a run goes on, its last checkpoint is removed, replaced, or made anew. The next save is complete.

    Fails if Save._make_staging does not compare the save's id with that of the base.
    """
    run = Run(tmp_path / "save", complete_every=9)
    assert [run.save() for _ in range(2)] == ["complete", "based on 1"]
    shutil.rmtree(run.checkpoint(2))
    assert run.save() == "complete"
    assert run.save() == "based on 3"
    edit_manifest(run.checkpoint(4), save_id="0" * 32)
    assert run.save() == "complete"
    assert run.save() == "based on 5"
    assert run.loaded().num_steps == 6


def test_a_base_behind_the_base_that_is_damaged(tmp_path: Path) -> None:
    """The save that would need it fails, and leaves what is good. The next one is complete.

    Fails if publish looks only at the new files.
    """
    run = Run(tmp_path / "save", complete_every=9)
    assert [run.save() for _ in range(3)] == ["complete", "based on 1", "based on 2"]
    shards_of(run.checkpoint(1))[0].write_bytes(b"short")
    with pytest.raises(CheckpointError, match=r"step-00000001/rank00000-shard000.rows has 5 bytes"):
        run.save()
    assert run.save() == "complete"
    assert run.loaded().num_steps == 5


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Seven checkpoints, and the digest of an eighth step."""
    run = Run(tmp_path_factory.mktemp("saved") / "save", complete_every=4, keep=4)
    kinds = [run.save() for _ in range(7)]
    assert kinds == ["complete", "based on 1", "based on 2", "based on 3", "complete", "based on 5", "based on 6"]
    run.train()
    return run


@pytest.mark.parametrize("kind", ["missing", "replaced", "flipped", "cut", "its own base"])
def test_passed_over(kind: str, saved: Run, tmp_path: Path) -> None:
    """Checkpoints 6 and 7 are changes since 5. If 5 is not good, 4, which is kept with its bases, is loaded."""
    run = copy(saved)
    run.path = tmp_path / "save"
    shutil.copytree(saved.path, run.path)
    base, shard = run.checkpoint(5), shards_of(run.checkpoint(5))[1]
    if kind == "flipped":
        flip(shard, shard.stat().st_size - 70)
    elif kind == "cut":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif kind == "its own base":
        edit_manifest(base, base={"name": base.name, "save_id": read_manifest(base)["save_id"]})
    else:
        shutil.rmtree(base)
        if kind == "replaced":
            shutil.copytree(run.checkpoint(4), base)
    trainer = run.loaded()
    assert trainer.num_steps == 4  # also of the one that was put in the place of 5
    wrong = [7, 6] if kind in ("missing", "replaced") else [7, 6, 5]
    assert len(trainer.load_problems) == len(wrong)
    for step, problem in zip(wrong, trainer.load_problems, strict=True):
        assert base.name in problem or run.checkpoint(step).name in problem
    trainer.fit(BATCHES[trainer.num_steps : 8])
    trainer.save(run.path, keep=1)
    assert run.loaded().num_steps == 8
    left = {child.name for child in run.path.iterdir() if not child.name.endswith(".damaged")}
    assert left == {*OWN_FILES, "step-00000008"}


@pytest.mark.parametrize(
    ("num_saves", "stride"),
    [(3, 5), *(pytest.param(*case, marks=(pytest.mark.slow, pytest.mark.timeout(170))) for case in [(2, 1), (3, 1)])],
)
def test_killed_at_any_moment(num_saves: int, stride: int, tmp_path: Path) -> None:
    """Killed during a save of changes, or during the complete one after which three others are removed: the one before
    or the new one loads.

    Fails if remove_older is called before publish, or if _remove does not rename a checkpoint first.
    """
    run = Run(tmp_path / "save", complete_every=3, keep=1)
    for _ in range(num_saves):
        run.save()
    run.train()
    shutil.copytree(run.path, tmp_path / "before")
    endings = set()
    for number in range(0, 200, stride):
        shutil.rmtree(run.path)
        shutil.copytree(tmp_path / "before", run.path)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                die_at(number, CALLS, run.trainer, run.path, **run.options)
                code = 0
            finally:
                os._exit(code)
        was_killed = os.waitpid(child, 0)[1] != 0
        survivor = run.loaded()
        assert survivor.load_problems == ()
        endings.add(survivor.num_steps)
        if not was_killed or number % 10 == 0:  # leftovers do not disturb the next save
            survivor.save(run.path, keep=1)
            assert run.loaded().num_steps == survivor.num_steps
            assert len(list(run.path.iterdir())) == len(OWN_FILES) + 1
        if not was_killed:
            break
    assert number > 15
    assert endings == {num_saves, num_saves + 1}


def test_what_is_left_of_a_long_run(tmp_path: Path) -> None:
    """Every checkpoint that is kept loads to the digest of its moment, at each moment of the run."""
    run = Run(tmp_path / "save", complete_every=4, keep=3)
    for step in range(1, 12):
        kind = run.save()
        assert kind == ("complete" if step % 4 == 1 else f"based on {step - 1}")
        kept = folder.checkpoints(run.path)
        first = max(1, step - 2)  # the oldest of the last three
        oldest = first - (first - 1) % 4  # the complete one that it needs
        assert [checkpoint.name for checkpoint in kept] == [f"step-{s:08d}" for s in range(oldest, step + 1)]
    for checkpoint in kept:
        trainer = make_trainer(World(), CASE)
        trainer.load(checkpoint)
        assert trainer.digest() == run.digests[trainer.num_steps]
        assert (checkpoint / MANIFEST).is_file()
