"""Work of a thread while its message travels. Fails if Channel.all_to_all calls `meanwhile` after it has waited: rank 1
sends nothing before rank 0 has called it, so both would wait until they give up."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nestpipe import World
from nestpipe.distributed import Lane
from tests.ranks import run_ranks


def exchanged(world: World, on_lane: bool) -> tuple[list[int], list[int]]:
    seen = torch.full((1,), world.rank + 1)
    message, received = torch.full((2,), world.rank, dtype=torch.uint8), torch.zeros(2, dtype=torch.uint8)

    def meet() -> None:
        world.control.all_reduce_sum(seen)

    def exchange() -> None:
        if world.rank == 1:
            meet()
        world.rows.all_to_all(message, [1, 1], received, [1, 1], meet if world.rank == 0 else lambda: None)

    if on_lane:
        world.watch.wait(Lane("rows").submit(exchange), "row exchange")
    else:
        exchange()
    return received.tolist(), seen.tolist()


@pytest.mark.parametrize("on_lane", [False, True])
def test_meanwhile_runs_while_the_message_travels(on_lane: bool) -> None:
    assert run_ranks(2, exchanged, on_lane) == [([0, 1], [3])] * 2


def failed(world: World, on_lane: bool) -> tuple[str, list[int]]:
    """Raises an error meanwhile, and then exchanges again."""

    def fail() -> None:
        raise ValueError("not this way")

    def exchange(meanwhile: Callable[[], None] = lambda: None) -> Tensor:
        message, received = torch.full((2,), world.rank, dtype=torch.uint8), torch.zeros(2, dtype=torch.uint8)
        world.rows.all_to_all(message, [1, 1], received, [1, 1], meanwhile)
        return received

    lane = Lane("rows")

    def run(work: Callable[[], Tensor]) -> Tensor:
        return world.watch.wait(lane.submit(work), "row exchange") if on_lane else work()

    with pytest.raises(ValueError, match="not this way") as error:
        run(lambda: exchange(fail))
    return str(error.value), run(exchange).tolist()


@pytest.mark.parametrize("on_lane", [False, True])
def test_an_error_meanwhile_is_raised(on_lane: bool) -> None:
    assert run_ranks(2, failed, on_lane) == [("not this way", [0, 1])] * 2
