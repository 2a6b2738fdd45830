"""Part robustness of `bench h200`: its cases, and a small run on CPUs."""

from collections.abc import Iterator

import pytest
import torch

from nestpipe.bench.h200 import robustness
from nestpipe.bench.h200.robustness import FULL, SMALL, cases
from nestpipe.bench.harness.report import Record
from nestpipe.bench.harness.targets import find_misses, load_targets
from nestpipe.distributed import World


def test_every_case_changes_one_size() -> None:
    """The values are the published ones. Fails if a case changes two sizes, or a range loses an end."""
    base, *others = cases(FULL)
    sizes = ("dim", "num_layers", "length")
    assert [getattr(base, name) for name in sizes] == [512, 4, 512]
    for case in others:
        assert [name for name in sizes if getattr(case, name) != getattr(base, name)] == [case.varied]
    values = {name: sorted({getattr(case, name) for case in cases(FULL)}) for name in sizes}
    assert values == {"dim": [512, 768, 1024], "num_layers": [2, 4, 8], "length": [512, 1024, 2048]}


def test_the_largest_table_fits_into_host_memory() -> None:
    """Fails with the 20M rows of part one-rank."""
    largest = max(case.dim for case in cases(FULL))
    assert FULL.num_rows * (largest + 1) * 4 < 40e9


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_small_run() -> None:
    """A record answers every target, and batches of longer sequences have as many tokens."""
    made = list(robustness.records(World(), quick=True))
    assert [record["varied"] for record in made] == [
        "base",
        *(name for name in ("num_layers", "length", "dim") for _ in range(2)),
    ]
    assert made[0]["robustness_difference"] == 0.0
    for record in made[1:]:
        difference = record["step_over_dense_unsplit"] - made[0]["step_over_dense_unsplit"]
        assert record["robustness_difference"] == pytest.approx(difference)
    assert {record["batch_size"] * record["length"] for record in made} == {8 * 8}
    assert all(isinstance(value, int | float | str) for record in made for value in record.values())
    misses = find_misses(load_targets("h200-robustness"), made)
    assert not [miss for miss in misses if "no record answers it" in miss]


def test_a_batch_without_room_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it fits. Fails if the error ends the benchmark, or the batch is not the smaller one."""
    tried = []

    def record(world: World, size: object, case: object, store: object, batch_size: int) -> Record:
        tried.append(batch_size)
        if batch_size > 4:
            raise torch.OutOfMemoryError("no room")
        return {"batch_size": batch_size}

    monkeypatch.setattr(robustness, "_record", record)
    (base, *_), store = cases(SMALL), None
    assert robustness._measured(World(), SMALL, base, store) == {"batch_size": 4}  # type: ignore[arg-type]
    assert tried == [8, 4]
