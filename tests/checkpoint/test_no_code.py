"""A load runs no code from a file: a pickle in the place of any file of a checkpoint is refused.

Fails if `old._read` loads with weights_only=False, or if read_state falls back to torch.load.
"""

import hashlib
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import nestpipe
from nestpipe import World
from nestpipe.checkpoint import CheckpointError, find_checkpoint
from nestpipe.checkpoint.manifest import MANIFEST
from tests import clicks
from tests.checkpoint.saved import DENSE, PART, SHARD, STATE, edit, edit_manifest
from tests.exactness.cases import Case, make_trainer

OLD = Path(__file__).parent.parent / "old_checkpoints" / "v0.1" / "trainer-1"


class Malicious:
    """Would make a folder if it were unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (self.path,)


def by_torch(value: object, **options: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out, **options)
    return out.getvalue()


PICKLES: dict[str, Callable[[object], bytes]] = {
    "pickle": lambda value: pickle.dumps(value, protocol=2),
    "torch": by_torch,
    "torch's old format": lambda value: by_torch(value, _use_new_zipfile_serialization=False),
}


def sha(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def make_it_fit(checkpoint: Path, name: str) -> None:
    """Writes the size and the checksum of a replaced file where a reader compares them, as an attacker would."""
    file, part = checkpoint / name, checkpoint / PART
    if name == STATE:
        edit(part, state=[sha(file), file.stat().st_size])
    elif name == SHARD:
        shards = json.loads(part.read_text())["shards"]
        edit(part, shards=shards | {name: shards[name] | {"bytes": file.stat().st_size}})
    if name == MANIFEST:
        return
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    checksums, sizes = manifest["checksums"], manifest["sizes"]
    if name == DENSE:
        checksums[DENSE], sizes[DENSE] = sha(file), file.stat().st_size
    elif name != PART:
        checksums[PART], sizes[PART] = json.loads(part.read_text())["checksum"], part.stat().st_size
    edit_manifest(checkpoint, checksums=checksums, sizes=sizes)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    trainer = clicks.make_trainer(World())
    trainer.fit(clicks.batches(World()), 1)
    trainer.save(folder)
    return find_checkpoint(folder)


@pytest.mark.parametrize("fits", [False, True])
@pytest.mark.parametrize("name", [MANIFEST, PART, STATE, DENSE, SHARD])
def test_a_pickle_in_the_place_of_a_file(name: str, fits: bool, saved: Path, tmp_path: Path) -> None:
    """Its checksum is wrong, or even right."""
    for number, make in enumerate(PICKLES.values()):
        checkpoint, made = tmp_path / str(number), tmp_path / "made"
        shutil.copytree(saved, checkpoint)
        (checkpoint / name).write_bytes(make({"rows": Malicious(made), "dense": Malicious(made)}))
        if fits:
            make_it_fit(checkpoint, name)
        with pytest.raises(CheckpointError):
            clicks.make_trainer(World()).load(checkpoint)
        if name != STATE:  # the scorer does not read it
            with pytest.raises(CheckpointError):
                nestpipe.evaluation.Scorer(clicks.model(), clicks.features(), checkpoint)
        assert not made.exists()


def test_what_was_not_replaced_loads(saved: Path, tmp_path: Path) -> None:
    """The changes that the other test makes to a manifest are accepted, if the file is good."""
    shutil.copytree(saved, tmp_path / "copy")
    for name in (STATE, SHARD, DENSE):
        make_it_fit(tmp_path / "copy", name)
    clicks.make_trainer(World()).load(tmp_path / "copy")


@pytest.mark.parametrize("name", ["rank0.pt", "dense.pt"])
def test_a_pickle_in_an_old_checkpoint(name: str, tmp_path: Path) -> None:
    """Versions before wrote pickles. Those with code are refused, though their checksums are right."""
    checkpoint, made = tmp_path / "save", tmp_path / "made"
    for make in PICKLES.values():
        shutil.rmtree(checkpoint, ignore_errors=True)
        shutil.copytree(OLD, checkpoint)
        (checkpoint / name).write_bytes(make({"rows": Malicious(made), "model": Malicious(made)}))
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        manifest["checksums"][name] = sha(checkpoint / name)
        (checkpoint / MANIFEST).write_text(json.dumps(manifest))
        with pytest.raises(CheckpointError, match=f"{name} is not a file that version 0.1 or 0.2 wrote"):
            make_trainer(World(), Case("adam", "pooled_mean", 2)).load(checkpoint)
        assert not made.exists()
