"""E1: runs repeat to the bit, and both windows give the same bits, at 1 to 4 ranks.

Fails, for example, if Window.take returns, in one window mode only, a gradient that was summed in another order; or if
route_keys ends the run when the first rank, instead of the last, is out of data.
"""

from dataclasses import replace

import pytest
import torch

from nestpipe.data import Batch, Jagged
from nestpipe.distributed import World
from tests.exactness.cases import Case, make_trainer, train
from tests.ranks import run_ranks
from tests.streams import key_streams


def digests(size: int, function, *arguments) -> set[str]:
    if size == 1:
        return {function(World(), *arguments)[0]}
    return {result[0] for result in run_ranks(size, function, *arguments)}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "case", [Case("adam", "shared", 4, steps=8), Case("adagrad", "pooled_mean", 5, steps=8)], ids=str
)
def test_runs_repeat_and_windows_agree(size: int, case: Case) -> None:
    first = digests(size, train, case)
    assert len(first) == 1
    assert digests(size, train, case) == first
    assert digests(size, train, replace(case, window="resend")) == first


def stream_batches(stream: str, world: World) -> list[Batch]:
    """The stream's keys, dealt out to the ranks; rank 1 has no data at all in "one_rank_empty"."""
    keys_of_batches = key_streams()["random" if stream == "one_rank_empty" else stream]
    if stream == "one_rank_empty" and world.rank == 1:
        return []
    if stream == "ragged_end" and world.rank > 0:
        keys_of_batches = keys_of_batches[: -world.rank]
    batches = []
    for keys in keys_of_batches:
        mine = keys[world.rank :: world.size].contiguous()
        labels = (mine % 2).double()
        batches.append(Batch({"items": Jagged.one_each(mine), "tags": Jagged.one_each(mine % 60)}, {"label": labels}))
    return batches


def train_stream(world: World, stream: str, case: Case) -> tuple[str, int, int]:
    trainer = make_trainer(world, case)
    result = trainer.fit(stream_batches(stream, world))
    return trainer.digest(), len(result.losses), result.num_skipped


STREAMS = [*key_streams(), "one_rank_empty"]


@pytest.mark.parametrize("stream", STREAMS)
def test_streams(stream: str) -> None:
    """Empty batches, empty ranks, ragged ends: no hang, nothing dropped, the same on every rank and in both windows."""
    case = Case("rowwise_adagrad", "shared", 3)
    results = run_ranks(3, train_stream, stream, case)
    assert len(set(results)) == 1
    assert run_ranks(3, train_stream, stream, replace(case, window="resend")) == results
    num_batches = len(key_streams()["random" if stream == "one_rank_empty" else stream])
    num_empty = sum(len(keys) == 0 for keys in key_streams().get(stream, []))
    assert results[0][1:] == (num_batches - num_empty, num_empty)


def test_ranks_do_not_matter_for_rows() -> None:
    """One rank with the whole stream and three with a share each train the same rows, up to rounding."""

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
