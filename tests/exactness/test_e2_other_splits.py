"""E2: any number of micro-batches and any clustering give the same rows and parameters, up to rounding.

Fails if Trainer divides a micro-batch's loss by its own number of samples, or if Jagged.split gives a part the offsets
of another one. The digests differ by rounding.
"""

from dataclasses import replace

import pytest
import torch

from nestpipe import World
from nestpipe.embedding.cluster import CLUSTER_METHODS
from nestpipe.pipelining.schedule import WINDOWED
from tests.exactness.cases import OPTIMIZERS, Case, on_ranks, train

STEPS, FEW_STEPS = 100, 25
SPLITS = [(1, "none"), (5, "minhash"), (8, "spectral")]


def train_splits(world: World, case: Case, splits: list[tuple[int, str]]) -> list:
    return [train(world, replace(case, num_micro_batches=n, method=method)) for n, method in splits]


def check(size: int, case: Case, splits: list[tuple[int, str]], timeout: float = 50) -> None:
    for results in on_ranks(size, train_splits, case, splits, timeout=timeout):
        assert_all_close(results)
        assert any(digest != results[0][0] for digest, *_ in results[1:])


def assert_all_close(results: list) -> None:
    """Compares the losses, dense parameters and rows of several trainings."""
    _, losses, dense, rows = results[0]
    for _, other_losses, other_dense, other_rows in results[1:]:
        assert other_losses == pytest.approx(losses, rel=1e-10)
        for name, expected in dense.items():
            assert_close(other_dense[name], expected)
        for name, (keys, expected) in rows.items():
            assert other_rows[name][0].tolist() == keys.tolist()
            assert_close(other_rows[name][1], expected)


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    if len(expected) > 0:
        assert (got - expected).abs().max() / expected.abs().max() < 1e-10


@pytest.mark.parametrize(
    ("schedule", "size", "case"),
    [
        ("intra", 1, Case("adam", "pooled_mean", steps=FEW_STEPS)),
        ("nested", 2, Case("adagrad", "shared", steps=FEW_STEPS)),
        pytest.param("intra", 1, Case("adam", "pooled_mean", steps=STEPS), marks=pytest.mark.slow),
        pytest.param("nested", 2, Case("adagrad", "shared", steps=STEPS), marks=pytest.mark.slow),
        pytest.param("nested", 3, Case("adagrad", "shared", steps=STEPS), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_other_splits(schedule: str, size: int, case: Case) -> None:
    check(size, replace(case, schedule=schedule), SPLITS)


@pytest.mark.slow
@pytest.mark.timeout(300)  # eight runs with up to four ranks on few cores
@pytest.mark.parametrize("schedule", WINDOWED)
@pytest.mark.parametrize(("size", "layout"), [(1, "sequence"), (2, "shared"), (4, "sequence")])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_other_splits_everywhere(schedule: str, size: int, optimizer: str, layout: str) -> None:
    splits = [(1, "none"), (2, "none"), *((n, method) for n in (5, 8) for method in CLUSTER_METHODS)]
    check(size, Case(optimizer, layout, steps=STEPS, schedule=schedule), splits, timeout=290)
