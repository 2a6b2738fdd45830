"""Exchange in two hops: what it refuses, ranks that die in it, and checkpoints of other hosts.

Fails if check_hosts leaves an option out, if a lost rank is named by its number on its host (`rank` for
`self._neighbours.ranks[rank]` in shared_memory.py), or if the manifest of a checkpoint does not have the hosts.
"""

import gc
import os
import re
import signal
import warnings
from pathlib import Path
from weakref import ReferenceType, ref

import pytest
import torch

from nestpipe import Trainer, World
from nestpipe.distributed import RankError
from nestpipe.distributed.watch import LostConnectionError
from nestpipe.embedding.exchange.two_hops import TwoHopBatch
from nestpipe.recipe.run import run
from nestpipe.recipe.text import load_config
from tests.exactness.cases import Case, make_trainer
from tests.exactness.test_x_across_batches import batches_of, trainer_of
from tests.ranks import run_fragile_ranks, run_ranks
from tests.recipe.test_checkpoint_keys import QUICK

RANKS = 4

REFUSED = {
    'exchange.window = "resend"': ({"window": "resend"}, {}),
    "pipeline.stale": ({}, {"stale": True}),
    "memory.device_budget_bytes": ({}, {"device_budget_bytes": 10**9}),
    'placement = "replicated"': ({"replicated": ("tag",)}, {}),
}


def refusals(world: World) -> list[str]:
    texts = []
    for settings, options in REFUSED.values():
        trainer = make_trainer(world, Case("adam", "pooled_sum", 2, schedule="nested", **settings), **options)
        with pytest.raises(ValueError, match=r"exchange\.hosts") as caught:
            trainer.fit(batches_of("some", world))
        texts.append(str(caught.value))
    return texts


def test_options_that_do_not_combine() -> None:
    expected = [
        f"{name} does not combine with exchange.hosts; leave one of them out (docs/large-clusters.md)"
        for name in REFUSED
    ]
    assert run_ranks(RANKS, refusals, hosts=2) == [expected] * RANKS


# ---- memory ----


def kept_batches(world: World) -> int:
    """Returns how many exchanges of batches are alive after all, without the garbage collector."""
    made: list[ReferenceType[TwoHopBatch]] = []
    begin = TwoHopBatch.__init__

    def noted(batch: TwoHopBatch, *arguments: object) -> None:
        begin(batch, *arguments)
        made.append(ref(batch))

    TwoHopBatch.__init__ = noted
    gc.disable()
    trainer_of(world, Case("adam", "shared", 2, schedule="nested")).fit(batches_of("some", world))
    assert len(made) > 1
    return sum(reference() is not None for reference in made)


def test_a_batch_gives_its_memory_back() -> None:
    """Fails if a relay keeps the exchange that keeps the relay, as `relays[0].owner = self` in TwoHopBatch."""
    assert run_ranks(RANKS, kept_batches, hosts=2) == [0] * RANKS


# ---- ranks that die ----


def train_until_lost(world: World, dying: int) -> str:
    """The last rank dies with rows of the second step that it has received and not handed on. Returns the error."""
    calls = 0

    def dies(batch: TwoHopBatch, micro_batch: int) -> None:
        nonlocal calls
        calls += 1
        batch._between.send_rows(micro_batch)
        if world.rank == dying and calls == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        batch._inside.send_rows(micro_batch)

    TwoHopBatch.send_rows = dies
    trainer = trainer_of(world, Case("adam", "shared", 2, schedule="nested"))
    with pytest.raises((RankError, LostConnectionError)) as caught:
        trainer.fit(batches_of("some", world))
    return str(caught.value)


def test_a_relay_that_dies_between_the_hops() -> None:
    """All others end, and name it."""
    dying, options = RANKS - 1, {"device": "cpu", "hosts": 2, "timeout_seconds": 10.0}
    errors = run_fragile_ranks(RANKS, train_until_lost, dying, num_results=RANKS - 1, **options)
    assert sorted(errors) == [rank for rank in range(RANKS) if rank != dying]
    for text in errors.values():
        assert re.search(rf"rank {dying}\b", text), text


def closed_connection(world: World) -> str:
    """Returns what a rank hears of the other one of its host, which dies."""
    if world.rank == RANKS - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if world.rank != RANKS - 2:
        return ""
    none = torch.empty(8, dtype=torch.uint8)
    transfer = world.hosts.inside.rows.transport.begin_all_to_all(none, [0, 8], none.clone(), [0, 8])
    with pytest.raises(LostConnectionError) as caught:
        all(not transfer.advance(0.1) for _ in range(1000))
    return str(caught.value)


def test_a_lost_rank_has_its_number_in_the_world() -> None:
    heard = run_fragile_ranks(RANKS, closed_connection, num_results=RANKS - 1, device="cpu", hosts=2)
    assert heard == {0: "", 1: "", 2: "the connection to rank 3 has closed"}


# ---- checkpoints ----


def rows_of(trainer: Trainer) -> torch.Tensor:
    piece = trainer.store.export_piece("item", 0, 65536)
    return piece.records[piece.keys.argsort()]


def trained(world: World, folder: Path, saves: bool) -> tuple[torch.Tensor, list[str]]:
    """Trains the first batches and saves, or loads and trains the others. Returns rows, and what is said of hosts."""
    trainer, batches = trainer_of(world, Case("adam", "shared", 2, schedule="nested")), batches_of("some", world)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if saves:
            trainer.fit(batches[:3])
            trainer.save(folder)
        else:
            trainer.load(folder)
            trainer.fit(batches[3:])
    trainer.flush()
    return rows_of(trainer), [str(text.message) for text in said if "goes on" in str(text.message)]


def test_going_on_with_other_hosts(tmp_path: Path) -> None:
    """E2, and rank 0 says so. With the same hosts, nothing is said."""
    run_ranks(RANKS, trained, tmp_path / "hops", True, hosts=2)
    same = run_ranks(RANKS, trained, tmp_path / "hops", False, hosts=2)
    other = run_ranks(RANKS, trained, tmp_path / "hops", False)
    assert [said for _, said in same] == [[]] * RANKS
    assert [len(said) for _, said in other] == [1, 0, 0, 0]
    assert "was trained in two hops, with hosts 0 1 | 2 3, and goes on in one hop" in other[0][1][0]
    for (rows, _), (expected, _) in zip(other, same, strict=True):
        assert float((rows - expected).abs().max() / expected.abs().max()) < 1e-10


def summary_of(world: World, settings: tuple[str, ...]) -> tuple[str, str | None, int]:
    summary = run(load_config(None, (*QUICK, *settings)).resolved(1, 1), world)
    return summary["digest"], summary["hosts"], summary["resumed_from_step"]


def test_a_recipe_resumes_with_its_hosts(tmp_path: Path) -> None:
    settings = f"checkpoint.dir={tmp_path / 'out'}", "pipeline.num_micro_batches=2", "exchange.hosts=2"
    whole = run_ranks(RANKS, summary_of, (*settings[1:], "train.steps=6"), hosts=2)
    run_ranks(RANKS, summary_of, (*settings, "train.steps=3"), hosts=2)
    resumed = run_ranks(RANKS, summary_of, (*settings, "train.steps=6"), hosts=2)
    assert [(digest, hosts) for digest, hosts, _ in resumed] == [(whole[0][0], "0 1 | 2 3")] * RANKS
    assert {step for *_, step in resumed} == {3}


def misfit(world: World) -> str:
    with pytest.raises(ValueError, match=r"exchange\.hosts is 2, but the world was made with hosts=None") as caught:
        summary_of(world, ("exchange.hosts=2",))
    return str(caught.value)


def test_a_world_with_other_hosts_than_the_recipe() -> None:
    assert len(set(run_ranks(2, misfit))) == 1
