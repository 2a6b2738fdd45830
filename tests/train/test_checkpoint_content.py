"""A checkpoint holds all of the state and nothing else, and is loaded whole or not at all.

Fails, for example, if ShardFile writes whole buffers of rows, if check_dense does not compare kinds, or if `load` does
not put back what it had set before another rank refused.
"""

import ctypes
import math
import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import nestpipe
from nestpipe import Batch, Jagged, World
from nestpipe.checkpoint import CheckpointError, find_checkpoint
from nestpipe.embedding.optim import Adagrad, RowOptimizer
from nestpipe.train.trainer import Trainer
from tests.checkpoint.saved import content_of, shards_of
from tests.exactness.cases import Case, Momentum, global_batches, make_trainer, on_ranks, share_of
from tests.ranks import run_ranks

CASE = Case("adam", "shared", 1)
CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 0x40000


class Scale(nn.Module):
    """One dense parameter, a buffer that counts what this rank has seen, and extra state."""

    def __init__(self, extra: object = None, width: int = 4) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.register_buffer("seen", torch.zeros(()))
        self.extra = extra

    def forward(self, embeddings, inputs) -> Tensor:
        if self.training:
            self.seen += 1 + inputs["rank"].sum()
        return (embeddings["item"] * self.scale).square().sum()

    def get_extra_state(self) -> object:
        return self.extra

    def set_extra_state(self, state: object) -> None:
        self.extra = state


def make(
    world: World | None = None,
    extra: object = None,
    row_optimizer: RowOptimizer | None = None,
    optimizer=torch.optim.Adam,
    max_rows: int | None = None,
    width: int = 4,
    **options,
) -> Trainer:
    table = nestpipe.Table("item", 4, optimizer=row_optimizer or Adagrad(0.1), max_rows=max_rows)
    return Trainer(
        Scale(extra, width),
        {"item": nestpipe.Pooled(table)},
        dense_optimizer=lambda p: optimizer(p, 0.1),
        world=world or World(),
        check_split=False,
        **options,
    )


def batch(*keys: int, rank: int = 0) -> Batch:
    return Batch({"item": Jagged.one_each(torch.tensor(keys))}, {"rank": torch.full((len(keys),), float(rank))})


def test_no_memory_but_the_rows(tmp_path: Path) -> None:
    """Version 0.1 also saved spare capacity, 1,024 rows and an eighth, with arbitrary memory contents."""
    trainer = make()
    trainer.fit([batch(*range(5000))])
    contents = []
    for name in ("one", "two"):
        trainer.save(tmp_path / name)
        contents.append(content_of(find_checkpoint(tmp_path / name)))
        torch.full((100_000,), 7.0)  # freed memory, which the next save may reuse
    assert contents[0] == contents[1]
    num_bytes = sum(shard.stat().st_size for shard in shards_of(find_checkpoint(tmp_path / "one")))
    assert num_bytes < 5000 * (8 + 8 + 2 * 4 * 4) + 4096


class NumpyOptimizer(torch.optim.SGD):
    """Keeps a NumPy number in its state."""

    def step(self, closure=None) -> None:
        super().step(closure)
        self.state[self.param_groups[0]["params"][0]]["scale"] = np.float64(0.5)


class ObjectOptimizer(torch.optim.SGD):
    def step(self, closure=None) -> None:
        super().step(closure)
        self.state[self.param_groups[0]["params"][0]]["history"] = {"where": [Path()]}


def test_what_could_not_be_loaded(tmp_path: Path) -> None:
    """Version 0.1 saved both, and could load neither."""
    trainer = make(optimizer=NumpyOptimizer, schedule_lr=partial(torch.optim.lr_scheduler.MultiStepLR, milestones=[3]))
    trainer.lr_schedule.base_lrs = [np.float32(0.1)]
    trainer.fit([batch(1, 2)] * 2)
    trainer.save(tmp_path / "numbers")
    again = make(optimizer=NumpyOptimizer, schedule_lr=partial(torch.optim.lr_scheduler.MultiStepLR, milestones=[3]))
    again.load(tmp_path / "numbers")
    for one in (trainer, again):
        one.fit([batch(1, 2)] * 3)
    assert trainer.digest() == again.digest()
    trainer = make(optimizer=ObjectOptimizer)
    trainer.fit([batch(1, 2)])
    entry = "['optimizer']['state'][0]['history']['where'][0] is a pathlib.PosixPath, which could be saved but not"
    with pytest.raises(CheckpointError, match=re.escape(entry)):
        trainer.save(tmp_path / "objects")
    for value in (np.datetime64("2020-01-01"), np.longdouble(1), np.ones(2)):
        with pytest.raises(CheckpointError, match=r"\['extra'\]\['value'\] is a numpy"):
            make().save(tmp_path / "objects", extra={"value": value})
    assert not (tmp_path / "objects").exists()


def test_max_rows_may_change(tmp_path: Path) -> None:
    """The message of a full table tells the user to raise max_rows."""
    trainer = make(max_rows=3)
    trainer.fit([batch(1, 2, 3)])
    trainer.save(tmp_path)
    with pytest.raises(ValueError, match="Raise max_rows"):
        trainer.fit([batch(4)])
    larger = make(max_rows=4)
    larger.load(tmp_path)
    larger.fit([batch(4)])
    assert larger.store.size("item") == 4
    with pytest.raises(CheckpointError, match="max_rows"):
        make(max_rows=2).load(tmp_path)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (lambda: make(optimizer=torch.optim.AdamW), "the dense optimizer is Adam in the checkpoint, AdamW here"),
        (lambda: make(optimizer=torch.optim.SGD), "the dense optimizer is Adam in the checkpoint, SGD here"),
        (lambda: make(row_optimizer=Momentum(0.1)), "row_optimizer is adagrad in the checkpoint, momentum here"),
        (lambda: make(row_optimizer=nestpipe.optim.SGD(0.1)), "state_width is 4 in the checkpoint, 0 here"),
        (lambda: make(width=3), "size mismatch for scale"),
        (lambda: make(seed=1), "seed is 0 in the checkpoint, 1 here"),
    ],
)
def test_refused_and_left_as_it_was(other, text: str, tmp_path: Path) -> None:
    """In version 0.1 the first three loaded, and the fifth had replaced the buffer before it failed."""
    saved = make()
    saved.fit([batch(1, 2)] * 3)
    saved.save(tmp_path)
    trainer = other()
    before = trainer.digest()
    with pytest.raises(CheckpointError, match=text):
        trainer.load(tmp_path)
    assert trainer.digest() == before
    assert trainer.num_steps == 0


def refuse_what_was_saved(state: object) -> None:
    if state == "saved":
        raise ZeroDivisionError


def one_rank_refuses(world: World, path: Path) -> tuple[str, bool]:
    """Loads a state that rank 1's model refuses after rank 0's has accepted it."""
    saved = make(world, extra="saved")
    saved.fit([batch(1, 2, rank=world.rank)])
    saved.save(path)
    trainer = make(world)
    before = trainer.digest()
    if world.rank == 1:
        trainer.model.set_extra_state = refuse_what_was_saved
    message = ""
    try:
        trainer.load(path)
    except CheckpointError as error:
        message = str(error)
    return message, trainer.digest() == before


def test_no_rank_keeps_what_another_refused(tmp_path: Path) -> None:
    """Fails if `load` sets the dense state without asking the other ranks."""
    for message, is_as_before in on_ranks(2, one_rank_refuses, tmp_path):
        assert "rank 1: ZeroDivisionError" in message
        assert is_as_before


def keep_what_differs(world: World, path: Path) -> tuple[float, float, object, str, str]:
    """Returns a buffer saved and loaded, loaded extra state, and the digests of both trainers."""
    trainer = make(world, extra={"names": ["a"], "weights": torch.ones(2), "rank": world.rank})
    trainer.model.extra["rank"] = 0  # ranks must start alike
    trainer.fit([batch(1, 2, rank=world.rank)] * 3)
    trainer.model.extra["rank"] = world.rank
    trainer.save(path)
    again = make(world)
    again.load(path)
    return (
        float(trainer.model.seen),
        float(again.model.seen),
        again.model.extra["rank"],
        trainer.digest(),
        again.digest(),
    )


@pytest.mark.parametrize("size", [1, 2])
def test_what_differs_by_rank(size: int, tmp_path: Path) -> None:
    """Version 0.1 gave every rank the buffers of rank 0, and crashed on extra state.

    Fails if load._read does not take the rank's own state.
    """
    results = on_ranks(size, keep_what_differs, tmp_path)
    assert [result[0] for result in results] == [3.0 + 6.0 * rank for rank in range(size)]
    for rank, (seen, loaded, extra, digest, again) in enumerate(results):
        assert seen == loaded
        assert extra == rank
        assert digest == again
    assert len({result[3] for result in results}) == 1


def save_on_a_small_disk(world: World, path: Path) -> tuple[int, str]:
    """Saves twice on a disk of 256 KB, mounted for this process only. Returns the step that loads, and the error."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(CLONE_NEWNS) == 0
    assert libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) == 0
    assert libc.mount(b"none", str(path).encode(), b"tmpfs", 0, b"size=256k") == 0
    trainer = make()
    trainer.fit([batch(1)])
    trainer.save(path / "save")
    trainer.fit([batch(*range(100_000))])
    try:
        trainer.save(path / "save")
        message = "nothing was raised"
    except CheckpointError as error:
        message = str(error)
    again = make()
    again.load(path / "save")
    return again.num_steps, message


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a small disk, which needs root; runs in CI")
def test_full_disk(tmp_path: Path) -> None:
    """Fails if ShardFile._write raises the error without the file's name."""
    ((num_steps, message),) = run_ranks(1, save_on_a_small_disk, tmp_path)
    file = rf"{tmp_path}/save/step-00000002\.partial-[0-9a-f]+/rank00000-shard00\d\.rows"
    assert re.search(f"no space left on the disk: '{file}'", message)
    assert num_steps == 1


def test_extra_comes_back(tmp_path: Path) -> None:
    trainer = make_trainer(World(), replace(CASE, schedule="nested"))
    trainer.fit(share_of(global_batches(2), World()))
    extra = {"best": math.nan, "names": ("a", "b"), 3: {"four": 5}, "tensor": torch.ones(2)}
    trainer.save(tmp_path, extra=extra)
    assert repr(make_trainer(World(), CASE).load(tmp_path)) == repr(extra)


def test_a_sparse_buffer(tmp_path: Path) -> None:
    trainers = [make(), make()]
    for trainer, diagonal in zip(trainers, (torch.eye(3), torch.zeros(3, 3)), strict=True):
        trainer.model.register_buffer("neighbours", diagonal.to_sparse())
    trainers[0].save(tmp_path)
    assert trainers[0].digest() != trainers[1].digest()
    trainers[1].load(tmp_path)
    assert torch.equal(trainers[1].model.neighbours.to_dense(), torch.eye(3))
    assert trainers[0].digest() == trainers[1].digest()


def load_what_differs(world: World, path: Path) -> str:
    trainers = [make(world) for _ in range(2)]
    for number, trainer in enumerate(trainers):
        trainer.fit([batch(1, 2)] * (number + 1))
        trainer.save(path / str(number))
    try:
        make(world).load(path / str(world.rank))
    except CheckpointError as error:
        return str(error)
    return "nothing was raised"


def test_ranks_must_find_the_same(tmp_path: Path) -> None:
    """Fails if `load` does not compare what the ranks have read."""
    assert all("found different checkpoints" in text for text in on_ranks(2, load_what_differs, tmp_path))
