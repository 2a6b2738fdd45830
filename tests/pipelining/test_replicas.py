"""Comparing replicas of rows, numbers that their sums cannot have, and what does not combine with them.

Fails if check_replicas leaves out the records (without `_bytes(records)`), or if own sums are not decoded.
"""

import pytest
import torch

from nestpipe import World
from nestpipe.embedding.exchange import distributed
from nestpipe.embedding.exchange.codec import PLAIN, Codec
from nestpipe.pipelining import NonFiniteError
from tests.exactness.cases import Case, global_batches, share_of
from tests.exactness.test_e6_replicas import are_equal, run_on
from tests.exactness.test_x_across_batches import batches_of, trainer_of
from tests.ranks import RankFailedError


class Undecoded(Codec):
    """A codec that leaves the rows of this rank as they are."""

    def __init__(self, codec: Codec) -> None:
        self.row_bytes, self.largest, self.write, self.read = codec.row_bytes, codec.largest, codec.write, codec.read
        self.copy = PLAIN.copy

    row_bytes = largest = write = read = None


def checked(world: World, schedule: str, decodes_own: bool) -> str:
    """Compares replicas every other step, with rounded gradients. Returns the error, or that replicas are equal."""
    case = Case("adam", "shared", 2, schedule=schedule)
    trainer = trainer_of(world, case, gradient_dtype="bfloat16", check_replicas=2)
    original = distributed.sum_over_replicas
    with pytest.MonkeyPatch.context() as patch:
        if not decodes_own:
            undecoded = lambda plan, own, memory, codec, send: original(plan, own, memory, Undecoded(codec), send)  # noqa: E731
            patch.setattr(distributed, "sum_over_replicas", undecoded)
        try:
            trainer.fit(share_of(global_batches(6), world))
        except Exception as error:
            return f"{trainer.num_steps}: {error}"
    return str(are_equal(trainer))


@pytest.mark.parametrize("schedule", ["nested", pytest.param("serial", marks=pytest.mark.slow)])
def test_own_sums_must_be_decoded(schedule: str) -> None:
    """A group that adds its own sums as they were before rounding has other rows than its replicas. The check says so,
    on all ranks."""
    assert run_on(4, 2, checked, schedule, True) == ["True"] * 4
    for error in run_on(4, 2, checked, schedule, False):
        assert error.startswith("2: ")
        assert "step 1: table 'item', bucket " in error
        assert " on rank 0 is not that on rank 2" in error or " on rank 1 is not that on rank 3" in error


def written_on_one_rank(world: World) -> str:
    """Rank 3 changes rows that all batches have, after step 0. Returns the error of the next comparison."""
    trainer, batches = (
        trainer_of(world, Case("sgd", "shared", schedule="nested"), check_replicas=3),
        batches_of("all", world),
    )
    trainer.fit(batches[:1])
    if world.rank == 3:
        keys = trainer.store.export_piece("item", 0, 65536).keys
        trainer.store.scatter("item", keys, trainer.store.gather("item", keys).records * 1.5, step=0)
    with pytest.raises(Exception, match="is not that on rank") as caught:
        trainer.fit(batches[1:])
    return f"{trainer.num_steps}: {caught.value}"


def test_a_row_that_was_changed_on_one_rank() -> None:
    for rank, error in enumerate(run_on(4, 2, written_on_one_rank)):
        assert error.startswith("3: ")
        assert ("rank 1 failed: " in error) == (rank in (0, 2))
        assert "step 2: table 'item', bucket " in error
        assert " on rank 1 is not that on rank 3" in error


def too_large(world: World) -> tuple[str, int]:
    """Gradients that float16 can have, but not the sum of those of a group's ranks."""
    trainer = trainer_of(world, Case("sgd", "shared"), gradient_dtype="float16", clip_norm=None)
    with torch.no_grad():
        trainer.model.second.mul_(3e5)
    try:
        trainer.fit(batches_of("all", world)[:1])
    except NonFiniteError:
        return "not finite", trainer.num_steps
    return str(are_equal(trainer)), trainer.num_steps


def test_sums_that_a_message_cannot_have() -> None:
    """Fails if Codecs.sum_limit does not divide by the ranks of a group: rows become infinite."""
    assert run_on(2, 1, too_large) == [("True", 1)] * 2
    assert run_on(4, 2, too_large) == [("not finite", 0)] * 4


# ---- refusals ----


def refused(world: World, options: dict[str, object]) -> str:
    trainer = trainer_of(world, Case("adam", "shared", schedule="nested"), **options)
    with pytest.raises(ValueError, match=r"exchange\.replicas") as caught:
        trainer.fit(batches_of("all", world))
    return str(caught.value)


@pytest.mark.parametrize(
    ("replicas", "options", "cause"),
    [
        (2, {"device_budget_bytes": 1 << 30}, "memory.device_budget_bytes does not count the sums"),
        (2, {"stale": True}, "pipeline.stale does not combine"),
        (1, {"check_replicas": 5}, "there are no replicas to compare"),
    ],
)
def test_what_does_not_combine(replicas: int, options: dict[str, object], cause: str) -> None:
    for error in run_on(2, replicas, refused, options):
        assert cause in error


def disagree(world: World) -> None:
    World(world.rank, world.size, replicas=1 + world.rank)


def test_ranks_must_agree() -> None:
    with pytest.raises(RankFailedError) as caught:
        run_on(2, 1, disagree)
    assert str(caught.value).count("ValueError: the ranks disagree on exchange.replicas: in order of rank 1, 2") == 2


def test_groups_of_unequal_size() -> None:
    with pytest.raises(RankFailedError, match=r"replicas = 2 does not divide the 3 ranks.* set it to one of 1, 3"):
        run_on(3, 2, refused, {})
    with pytest.raises(ValueError, match=r"replicas = 0 does not divide"):
        World(replicas=0)
