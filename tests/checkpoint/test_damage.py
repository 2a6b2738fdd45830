"""Damaged checkpoints are never loaded: the newest good one is found, and what was wrong is said."""

from collections.abc import Callable
from pathlib import Path

import pytest

from nestpipe import World
from nestpipe.checkpoint import CheckpointError, find_checkpoint
from tests.checkpoint.saved import DENSE, OWN_FILES, PART, SHARD, STATE, edit_manifest, flip, shards_of
from tests.clicks import batches, make_trainer
from tests.ranks import run_ranks

FIRST, SECOND = "step-00000001", "step-00000002"


def save_twice(path: Path, complete_every: int = 1) -> tuple[str, str]:
    """Returns the digests of two checkpoints."""
    trainer, digests, data = make_trainer(World()), [], batches(World())
    for _ in range(2):
        trainer.fit(data, 1)
        trainer.save(path, keep=2, complete_every=complete_every)
        digests.append(trainer.digest())
    return digests[0], digests[1]


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


SPOILT: list[tuple[str, Callable[[Path], None], str]] = [
    ("manifest.json", lambda file: flip(file, 200), "damaged"),
    ("manifest.json", lambda file: file.write_text("[]"), "is not the manifest"),
    ("manifest.json", lambda file: edit_manifest(file.parent, checksums={}), "checksum"),
    (PART, lambda file: flip(file, 100), "damaged"),
    (PART, Path.unlink, "cannot be read"),
    (STATE, lambda file: flip(file, -5), "damaged"),
    (STATE, Path.unlink, "No such file"),
    (DENSE, lambda file: flip(file, -5), "damaged"),
    (DENSE, cut, "damaged"),
    (SHARD, lambda file: flip(file, 20), "header"),
    (SHARD, lambda file: flip(file, 64 + 20), "header"),
    (SHARD, lambda file: flip(file, 128 + 3), "checksum"),
    (SHARD, lambda file: flip(file, -64 - 9), "checksum"),
    (SHARD, cut, "bytes instead of"),
    (SHARD, Path.unlink, "No such file"),
]


@pytest.mark.parametrize(("name", "spoil", "text"), SPOILT)
def test_the_older_one_is_loaded(name: str, spoil: Callable[[Path], None], text: str, tmp_path: Path) -> None:
    """Fails if `load` does not go on to the next candidate, or if a reader does not compare its checksum."""
    older, newer = save_twice(tmp_path / "save")
    spoil(tmp_path / "save" / SECOND / name)
    trainer = make_trainer(World())
    trainer.load(tmp_path / "save")
    assert trainer.digest() == older
    assert len(trainer.load_problems) == 1
    assert text in trainer.load_problems[0]
    assert str(tmp_path / "save" / SECOND) in trainer.load_problems[0]
    trainer.fit(batches(World(), position=64), 1)
    assert trainer.digest() == newer
    trainer.save(tmp_path / "save")  # of the same step as the damaged one
    assert (tmp_path / "save" / f"{SECOND}.damaged").is_dir()
    again = make_trainer(World())
    again.load(tmp_path / "save")
    assert again.digest() == newer
    assert again.load_problems == ()


def test_only_what_was_damaged_is_renamed(tmp_path: Path) -> None:
    """A later save may have the name of the damaged one, and another folder may have a good one of that name.

    Fails if DamagedCheckpoint.is_at compares names only: a good checkpoint would be renamed.
    """
    save_twice(tmp_path / "save")
    save_twice(tmp_path / "other")
    flip(tmp_path / "save" / SECOND / DENSE, -5)
    trainer, data = make_trainer(World()), batches(World(), position=64)
    trainer.load(tmp_path / "save")
    for steps in (2, 3, 4):
        trainer.fit(data, 1)
        trainer.save(tmp_path / "save", keep=2)
        trainer.save(tmp_path / "other", keep=9)
        names = {f"step-{step:08d}" for step in (steps - 1, steps)}
        assert {child.name for child in (tmp_path / "save").iterdir()} == {*OWN_FILES, f"{SECOND}.damaged", *names}
    names = {FIRST, SECOND, f"{SECOND}-r1", "step-00000003", "step-00000004"}
    assert {child.name for child in (tmp_path / "other").iterdir()} == {*OWN_FILES, *names}


@pytest.mark.parametrize("name", [STATE, DENSE])
def test_only_the_rows_of_a_base_are_needed(name: str, tmp_path: Path) -> None:
    """Fails if problem_of looks for all files of a base."""
    newer = save_twice(tmp_path / "save", complete_every=2)
    (tmp_path / "save" / FIRST / name).unlink()
    assert find_checkpoint(tmp_path / "save").name == SECOND
    trainer = make_trainer(World())
    trainer.load(tmp_path / "save")
    assert trainer.digest() == newer[1]


@pytest.mark.parametrize("spoil", ["missing", "damaged", "replaced"])
def test_a_base_that_is_not_good(spoil: str, tmp_path: Path) -> None:
    """A checkpoint of changes without its base is none. Fails if `chain` does not compare the ids of saves."""
    save_twice(tmp_path / "save", complete_every=2)
    save_twice(tmp_path / "other")
    base = tmp_path / "save" / FIRST
    if spoil == "damaged":
        flip(shards_of(base)[0], 150)
    else:
        base.rename(tmp_path / "away")
        if spoil == "replaced":
            (tmp_path / "other" / FIRST).rename(base)
    trainer = make_trainer(World())
    with pytest.raises(CheckpointError) as raised:
        trainer.load(tmp_path / "save" / SECOND)
    assert FIRST in str(raised.value)


def load_what_is_damaged(world: World, path: Path) -> str:
    trainer = make_trainer(world)
    try:
        trainer.load(path)
    except CheckpointError as error:
        return str(error)
    return ""


def test_all_are_damaged(tmp_path: Path) -> None:
    """Every rank says so, and none starts anew. Fails if `load` raises the error of the last one only."""
    save_twice(tmp_path / "save")
    for checkpoint in (FIRST, SECOND):
        flip(tmp_path / "save" / checkpoint / DENSE, -5)
    for message in run_ranks(2, load_what_is_damaged, tmp_path / "save"):
        assert message.startswith(f"every checkpoint in {tmp_path}/save is damaged: ")
        assert FIRST in message
        assert SECOND in message
