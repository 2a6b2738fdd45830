"""E1 with rounded messages: what a codec rounds is the same in every schedule and on every rank.

Fails if own rows are copied without the codec (`memory.copy_rows` in DistributedBatch._send), or own gradients (in
_store_own), if LocalBatch does not round rows or sums, or if early rows travel as they are.
"""

from dataclasses import replace
from itertools import cycle

import pytest
import torch

from nestpipe import Batch
from nestpipe.distributed import World
from nestpipe.embedding.cluster import CLUSTER_METHODS
from nestpipe.pipelining.schedule import SCHEDULES
from tests.exactness.cases import OPTIMIZERS, Case, make_trainer, on_ranks
from tests.exactness.test_e1_bit_identical import STREAMS, keys_batch, stream_batches
from tests.streams import key_streams

DTYPES = [("bfloat16", "bfloat16"), ("int8", "float16"), (None, "int8"), ("float16", None), ("float32", "float32")]
"""Of rows and of gradients."""

Run = tuple[str, tuple[str | None, str | None], Case]


def digest_of(world: World, batches: list[Batch], dtypes: tuple[str | None, str | None], case: Case) -> str:
    trainer = make_trainer(world, case, row_dtype=dtypes[0], gradient_dtype=dtypes[1])
    trainer.check_split = False
    trainer.fit(batches)
    return trainer.digest()


def digests(world: World, runs: list[Run]) -> list[list[str]]:
    """Returns the digests of every schedule, for each run."""
    results = []
    for stream, dtypes, case in runs:
        schedules = [replace(case, schedule=schedule) for schedule in SCHEDULES]
        results.append([digest_of(world, stream_batches(stream, world), dtypes, each) for each in schedules])
    return results


def runs_of(first: int, streams: list[str], dtypes: list[tuple[str | None, str | None]]) -> list[Run]:
    """Combines each stream and each pair of dtypes with other settings than the one before."""
    sizes, methods, kinds = cycle((1, 2, 5, 8)), cycle(CLUSTER_METHODS), cycle([*OPTIMIZERS])
    rows = cycle((torch.float32, torch.float64, torch.float64))
    for _ in range(first):
        next(kinds), next(sizes), next(rows)
    pairs = [(stream, pair) for stream in streams for pair in dtypes]
    return [(*pair, Case(next(kinds), "shared", next(sizes), method=next(methods), dtype=next(rows))) for pair in pairs]


SOME = list(zip(STREAMS, cycle(DTYPES), strict=False))
FAST = {1: SOME[::3], 2: SOME, 4: SOME[1::4]}


@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_schedules_agree(size: int) -> None:
    runs = [run for number, (stream, pair) in enumerate(FAST[size]) for run in runs_of(number, [stream], [pair])]
    first, *others = on_ranks(size, digests, runs)
    assert all(other == first for other in others)
    for run, results in zip(runs, first, strict=True):
        assert len(set(results)) == 1, run


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_schedules_agree_everywhere(size: int, dtypes: tuple[str | None, str | None]) -> None:
    runs = runs_of(size, STREAMS, [dtypes])
    for results in on_ranks(size, digests, runs):
        assert all(len(set(each)) == 1 for each in results)


def alone(world: World) -> list[str]:
    """Returns digests of a stream that rank 0 has; other ranks have no data."""
    batches = [keys_batch(keys) for keys in key_streams()["random"]] if world.rank == 0 else []
    case = Case("adagrad", "shared", 2, schedule="nested")
    return [digest_of(world, batches, dtypes, case) for dtypes in [(None, None), *DTYPES]]


def test_the_owner_of_a_row_does_not_matter() -> None:
    """One rank with all data and all rows has the result of one with all data and half of the rows."""
    results = [*on_ranks(1, alone), *on_ranks(2, alone)]
    assert results == [results[0]] * 3
    assert len(set(results[0][:-1])) == len(DTYPES)  # each rounds in its own way
