"""`bench peer`: both systems get the same work, and its figures are what they say."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from nestpipe.bench.peer import environment, measure, workload
from nestpipe.bench.peer.group import started
from nestpipe.bench.peer.turns import Task
from nestpipe.bench.peer.workload import QUICK, WORKLOADS


def test_the_same_batches_in_every_process() -> None:
    """Fails if the frequent keys depend on the rank, or if all ranks get the same samples."""
    work = QUICK["sequences"]
    first, again, other = (workload.make_batches(work, rank) for rank in (0, 0, 1))
    assert all(a.keys.equal(b.keys) and a.labels.equal(b.labels) for a, b in zip(first, again, strict=True))
    assert not any(a.keys.equal(b.keys) for a, b in zip(first, other, strict=True))
    most = [torch.stack([b.keys[0] for b in batches]).flatten().mode().values.item() for batches in (first, other)]
    assert most[0] == most[1]


def test_initial_rows_differ() -> None:
    """Fails if a row does not depend on its table, or all columns of a row are the same."""
    keys = torch.arange(100)
    one, two = (workload.initial_rows(table, keys, 8) for table in (0, 1))
    assert one.abs().max() <= 0.05
    assert len(one.unique(dim=0)) == 100
    assert not one.equal(two)
    assert workload.initial_rows(0, keys[40:50], 8).equal(one[40:50])
    assert len(one[3].unique()) == 8


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_dense_model_takes_a_sample(name: str) -> None:
    work = QUICK[name]
    losses = workload.Dense(work)(torch.zeros(5, work.width), torch.ones(5))
    assert losses.shape == (5,)


def test_embedding_speed() -> None:
    """Fails if the denominator has no lower limit, or the dense part is not subtracted on both sides."""
    assert measure.embedding_speed(30.0, 15.0, 10.0) == 4.0
    assert measure.embedding_speed(30.0, 10.1, 10.0) == 20.0 / 0.5
    assert measure.embedding_speed(30.0, 9.0, 10.0) == 20.0 / 0.5


def test_the_faster_one_counts() -> None:
    times = {"plain": [5.0, 1.0, 4.0], "pipelined": [3.0, 3.0, 9.0]}
    assert measure.fastest(times, measure.THEIRS) == "pipelined"


def test_weights_that_are_apart(tmp_path: Path) -> None:
    """Fails if only the first tensor is compared, or a missing one is not an error."""
    one, other, less = (tmp_path / f"{name}.npz" for name in ("one", "other", "less"))
    rows, bias = np.array([1.0, -2.0]), np.array([0.5])
    np.savez(one, rows=rows, bias=bias)
    np.savez(other, rows=rows, bias=bias + 0.01)
    np.savez(less, rows=rows)
    assert measure._apart(one, one) == 0.0
    assert measure._apart(one, other) == pytest.approx(0.02)
    with pytest.raises(RuntimeError, match=r"less.npz has \['rows'\]"):
        measure._apart(one, less)


def test_a_folder_of_somebody_else(tmp_path: Path) -> None:
    """Fails if find_or_make installs into, or removes, a folder that it has not made."""
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not an environment of this benchmark"):
        environment.find_or_make(tmp_path, lambda line: None)
    assert [child.name for child in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.slow
def test_an_environment_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if find_or_make leaves half an environment behind: the next run would take it for a whole one."""
    monkeypatch.setattr(environment, "TORCH", "no-such-package==0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    lines: list[str] = []
    with pytest.raises(RuntimeError, match="no-such-package"):
        environment.find_or_make(tmp_path / "env", lines.append)
    assert not (tmp_path / "env").exists()
    assert len(lines) == 1


def test_a_rank_that_dies() -> None:
    """Fails if answers are read rank by rank: the first one waits for ever."""
    task = Task("pooled", "sgd", "dense", 1, is_quick=True)
    program = "import os, sys, time; int(os.environ['RANK']) == 1 and sys.exit('no memory'); time.sleep(60)"
    with (
        pytest.raises(RuntimeError, match=r"rank 1, exit code 1:\s*no memory"),
        started([sys.executable, "-c", program], task, 1, ()),
    ):
        pass


@pytest.mark.slow
@pytest.mark.timeout(170)
@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.skipif(
    not (environment.default_folder() / environment._MADE).exists(),
    reason="TorchRec is not installed; `make bench-peer` makes its environment",
)
def test_both_train_the_same(name: str) -> None:
    """Fails if one of them starts from other rows, gives the features to the model in another order, or sums gradients
    over ranks in another way."""
    peer = measure.Peer(environment.find_or_make(environment.default_folder(), print), quick=True)
    record = peer.on_one_host(name, "sgd")
    for way in ("pipelined", "serial", "nested"):
        assert float(record[f"{way}_weights_apart"]) < 1e-3
