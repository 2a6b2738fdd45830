"""The samples that each rank gets, and continuing at a position.

Fails, for example, if Batches.__next__ does not multiply the rank by the batch size or the step of the position by
the world size, or if the position is a number of batches.
"""

from itertools import chain

import pytest
import torch

from nestpipe.data.batch import Batch, Jagged
from nestpipe.data.dataset import Batches


class Numbers:
    """Sample i has the key i, so that the keys of a batch are its samples."""

    def __init__(self, num_samples: int | None = None) -> None:
        self.num_samples = num_samples

    def samples(self, first: int, count: int) -> Batch:
        assert first >= 0
        assert count >= 0
        assert self.num_samples is None or first + count <= self.num_samples
        positions = torch.arange(first, first + count)
        return Batch({"number": Jagged.one_each(positions)}, {"square": positions.float() ** 2})


def numbers(batch: Batch) -> list[int]:
    return batch.keys["number"].values.tolist()


def rank_batches(num_samples: int | None, batch_size: int, world_size: int) -> list[Batches]:
    return [Batches(Numbers(num_samples), batch_size, rank, world_size) for rank in range(world_size)]


def test_a_rank_takes_its_part_of_each_global_batch() -> None:
    ranks = rank_batches(None, 3, 2)
    assert [[numbers(next(batches)) for batches in ranks] for _ in range(2)] == [
        [[0, 1, 2], [3, 4, 5]],
        [[6, 7, 8], [9, 10, 11]],
    ]


@pytest.mark.parametrize("num_samples", [0, 1, 11, 12, 13, 24, 25])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6])
def test_ranks_together_see_the_batches_of_one_rank(num_samples: int, world_size: int) -> None:
    alone = [numbers(batch) for batch in Batches(Numbers(num_samples), 12)]
    ranks = [
        [numbers(batch) for batch in batches] for batches in rank_batches(num_samples, 12 // world_size, world_size)
    ]
    together = [list(chain(*parts)) for parts in zip(*ranks, strict=True)]  # strict: all ranks end at the same step
    assert together == alone
    assert list(chain(*together)) == list(range(num_samples))


def test_the_rest_is_shared_out_in_order_and_may_be_nothing() -> None:
    ranks = rank_batches(num_samples=5, batch_size=4, world_size=3)
    batches = [next(batches) for batches in ranks]
    assert [numbers(batch) for batch in batches] == [[0, 1, 2, 3], [4], []]
    assert batches[2].keys.keys() == batches[0].keys.keys()
    assert batches[2].inputs["square"].shape == (0,)
    for rank in ranks:
        assert rank.state() == {"position": 5}
        with pytest.raises(StopIteration):
            next(rank)


@pytest.mark.parametrize(("batch_size", "world_size"), [(4, 2), (8, 1), (2, 3), (5, 4)])
def test_goes_on_at_another_world_size_and_batch_size(batch_size: int, world_size: int) -> None:
    before = rank_batches(50, 4, 2)
    seen = [numbers(next(batches)) for _ in range(3) for batches in before]
    states = [batches.state() for batches in before]
    assert states == [{"position": 24}] * 2
    after = rank_batches(50, batch_size, world_size)
    for batches in after:
        batches.load_state(states[0])
    rest = [numbers(batch) for step in zip(*after, strict=True) for batch in step]
    assert list(chain(*seen, *rest)) == list(range(50))


def test_a_saved_state_does_not_move() -> None:
    batches = Batches(Numbers(), 4)
    state = batches.state()
    next(batches)
    assert state == {"position": 0}


@pytest.mark.parametrize("state", [{}, {"step": 3}, {"position": -1}, {"position": 1.5}, {"position": "8"}])
def test_refuses_a_bad_state(state: dict) -> None:
    batches = Batches(Numbers(), 4)
    next(batches)
    with pytest.raises(ValueError, match="must have a 'position', an integer of at least 0"):
        batches.load_state(state)
    assert numbers(next(batches)) == [4, 5, 6, 7]


def test_refuses_a_position_behind_the_end() -> None:
    batches = Batches(Numbers(10), 4)
    batches.load_state({"position": 10})
    assert list(batches) == []
    with pytest.raises(ValueError, match="position 11, but the dataset has 10 samples"):
        batches.load_state({"position": 11})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [((0,), "batch_size is 0"), ((4, 2, 2), r"rank is 2, must be 0 \.\. 1"), ((4, -1, 2), "rank is -1")],
)
def test_refuses_bad_arguments(arguments: tuple[int, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Batches(Numbers(), *arguments)
