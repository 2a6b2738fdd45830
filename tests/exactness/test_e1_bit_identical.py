"""E1: runs repeat to the bit; every schedule and both windows give the same bits, at 1 to 4 ranks, on hostile streams.

Fails, for example, if Requester.collect returns its sums in window "resend", if route_keys ends the run when the first
rank, instead of the last, is out of data, if sync_overlap leaves out the row state, if `leaving` omits slots, or if the
host lane retrieves b + 1 before it writes b - 1 back.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nestpipe.data import Batch, Jagged
from nestpipe.distributed import World
from nestpipe.embedding.cluster import CLUSTER_METHODS
from nestpipe.embedding.plan import WINDOWS
from nestpipe.pipelining.schedule import SCHEDULES, WINDOWED
from tests.exactness.cases import OPTIMIZERS, Case, make_trainer, on_ranks, train
from tests.ranks import run_ranks
from tests.streams import key_streams


def digests(world: World, case: Case) -> list[str]:
    """Returns the digests of serial, and of every schedule in both windows."""
    runs = [case, *(replace(case, schedule=s, window=w) for s in SCHEDULES for w in WINDOWS)]
    return [train(world, run)[0] for run in runs]


ADAM, ADAGRAD = Case("adam", "shared", 4, steps=8), Case("adagrad", "pooled_mean", 5, steps=8)
FEW_STEPS = Case("rowwise_adagrad", "sequence", 3, steps=5)
SLOW = [pytest.param(size, case, marks=pytest.mark.slow) for size, case in ((3, ADAM), (4, ADAGRAD))]


@pytest.mark.parametrize(("size", "case"), [(1, ADAM), (2, ADAGRAD), (4, FEW_STEPS), *SLOW], ids=str)
def test_runs_repeat_and_windows_agree(size: int, case: Case) -> None:
    assert len({digest for results in on_ranks(size, digests, case) for digest in results}) == 1


def stream_batches(stream: str, world: World) -> list[Batch]:
    """Returns this rank's share of a stream. Rank 1 has no data in "one_rank_empty"."""
    batch_keys = key_streams()["random" if stream == "one_rank_empty" else stream]
    if stream == "one_rank_empty" and world.rank == 1:
        return []
    if stream == "ragged_end" and world.rank > 0:
        batch_keys = batch_keys[: -world.rank]
    return [keys_batch(keys[world.rank :: world.size].contiguous()) for keys in batch_keys]


def keys_batch(keys: torch.Tensor) -> Batch:
    labels = (keys % 2).double()
    return Batch({"items": Jagged.one_each(keys), "tags": Jagged.one_each(keys % 60)}, {"label": labels})


def train_stream(world: World, stream: str, case: Case) -> tuple[str, int, int]:
    trainer = make_trainer(world, case)
    trainer.check_split = False
    result = trainer.fit(stream_batches(stream, world))
    return trainer.digest(), len(result.losses), result.num_skipped


STREAMS = [*key_streams(), "one_rank_empty"]
NUM_MICRO_BATCHES = (1, 2, 5, 8)


def runs_of(case: Case) -> list[Case]:
    """Returns the serial run, then all that must have its result. Windowed schedules also resend rows."""
    once = [replace(case, schedule=s) for s in SCHEDULES]
    return [*once, *(replace(case, schedule=s, window="resend") for s in WINDOWED)]


def some_of(case: Case, number: int) -> list[Case]:
    """Returns the serial run, and every other schedule in one window each."""
    others = [s for s in SCHEDULES if s != "serial"]
    windows = [WINDOWS[(number + i) % 2] for i in range(len(others))]
    return [case, *(replace(case, schedule=s, window=w) for s, w in zip(others, windows, strict=True))]


def train_some(world: World, optimizer: str, first: int) -> list[tuple[str, list[tuple[str, int, int]]]]:
    """Trains on each stream, with other micro-batches, window and clustering than on the previous one."""
    results = []
    for number, stream in enumerate(STREAMS, start=first):
        case = Case(optimizer, "shared", NUM_MICRO_BATCHES[number % 4], method=CLUSTER_METHODS[number % 3])
        results.append((stream, [train_stream(world, stream, run) for run in some_of(case, number)]))
    return results


def train_all(world: World, optimizer: str, num_micro_batches: int) -> list[tuple[str, list[tuple[str, int, int]]]]:
    """Trains on each stream, with another window and clustering than on the previous one."""
    results = []
    for number, stream in enumerate(STREAMS):
        case = Case(optimizer, "shared", num_micro_batches, method=CLUSTER_METHODS[number % 3])
        results.append((stream, [train_stream(world, stream, run) for run in some_of(case, number)]))
    return results


def train_every_way(world: World, case: Case) -> list[tuple[str, list[tuple[str, int, int]]]]:
    return [(stream, [train_stream(world, stream, run) for run in runs_of(case)]) for stream in STREAMS]


def check_streams(results: list[list[tuple[str, list[tuple[str, int, int]]]]]) -> None:
    first, *others = results
    assert all(other == first for other in others)
    for stream, runs in first:
        assert runs == [runs[0]] * len(runs), stream
        num_batches = len(key_streams()["random" if stream == "one_rank_empty" else stream])
        num_empty = sum(len(keys) == 0 for keys in key_streams().get(stream, []))
        assert runs[0][1:] == (num_batches - num_empty, num_empty)


SOME = [(1, "adam"), (1, "sgd"), (2, "adagrad"), (3, "rowwise_adagrad"), (4, "own")]


@pytest.mark.parametrize(
    ("size", "optimizer"), [*SOME[:-2], *(pytest.param(*some, marks=pytest.mark.slow) for some in SOME[-2:])]
)
def test_streams(size: int, optimizer: str) -> None:
    """Streams have empty batches, empty ranks and ragged ends. Nothing is dropped; all ranks and schedules agree."""
    check_streams(on_ranks(size, train_some, optimizer, SOME.index((size, optimizer))))


@pytest.mark.slow
@pytest.mark.parametrize("num_micro_batches", NUM_MICRO_BATCHES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_streams_everywhere(size: int, optimizer: str, num_micro_batches: int) -> None:
    check_streams(on_ranks(size, train_all, optimizer, num_micro_batches))


@pytest.mark.slow
@pytest.mark.parametrize("method", CLUSTER_METHODS)
@pytest.mark.parametrize("num_micro_batches", [2, 5, 8])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_streams_in_every_way(size: int, num_micro_batches: int, method: str) -> None:
    """Covers every schedule, window and clustering, for the row optimizer with most state."""
    check_streams(on_ranks(size, train_every_way, Case("adam", "shared", num_micro_batches, method=method)))


RANK_BATCHES = st.lists(  # for each batch and each of three ranks: some keys, or no batch
    st.lists(st.one_of(st.none(), st.lists(st.integers(0, 12), max_size=6)), min_size=3, max_size=3),
    min_size=1,
    max_size=6,
)


def train_drawn(world: World, drawn: list[list[list[list[int] | None]]]) -> list[set[str]]:
    """Returns the digests of all schedules, for each drawn stream."""
    results = []
    for stream in drawn:
        mine = [batches[world.rank] for batches in stream]
        while mine and mine[-1] is None:
            mine.pop()  # a rank that is out of data stays so
        batches = [keys_batch(torch.tensor(keys or [], dtype=torch.int64)) for keys in mine]
        digests = set()
        for schedule in SCHEDULES:
            trainer = make_trainer(world, Case("adam", "shared", 2, schedule=schedule))
            trainer.fit(batches)
            digests.add(trainer.digest())
        results.append(digests)
    return results


@settings(max_examples=40, deadline=None, derandomize=True)
@given(RANK_BATCHES)
def test_any_stream_on_one_rank(stream: list[list[list[int] | None]]) -> None:
    (digests,) = train_drawn(World(), [stream])
    assert len(digests) == 1


@settings(max_examples=2, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(RANK_BATCHES, min_size=5, max_size=5))
def test_any_stream_on_three_ranks(streams: list[list[list[list[int] | None]]]) -> None:
    results = run_ranks(3, train_drawn, streams)
    for digests in zip(*results, strict=True):
        assert len(set.union(*digests)) == 1


def test_ranks_do_not_matter_for_rows() -> None:
    """One rank with the whole stream and three ranks with a share each train the same rows, up to rounding."""

    (alone,) = [rows_of(World(), "random")]
    shared = run_ranks(3, rows_of, "random")
    keys = torch.cat([keys for keys, _ in shared])
    rows = torch.cat([rows for _, rows in shared])
    assert sorted(keys.tolist()) == sorted(alone[0].tolist())
    order, expected = keys.argsort(), alone[0].argsort()
    assert torch.allclose(rows[order], alone[1][expected], rtol=1e-10, atol=1e-12)


def rows_of(world: World, stream: str) -> tuple[torch.Tensor, torch.Tensor]:
    trainer = make_trainer(world, Case("adam", "shared", 2))
    trainer.fit(stream_batches(stream, world))
    piece = trainer.store.export_piece("item", 0, 65536)
    return piece.keys, piece.records
