"""What a thread does while its message travels. Fails if Channel._run calls `meanwhile` after it has waited: rank 1
sends nothing before rank 0 has been there, so both would wait until they give up."""

import pytest
import torch

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
def test_meanwhile_is_while_it_travels(on_lane: bool) -> None:
    assert run_ranks(2, exchanged, on_lane) == [([0, 1], [3])] * 2


def failed(world: World) -> str:
    def fail() -> None:
        raise ValueError("not this way")

    with pytest.raises(ValueError, match="not this way") as error:
        world.rows.all_to_all(
            torch.zeros(2, dtype=torch.uint8), [1, 1], torch.zeros(2, dtype=torch.uint8), [1, 1], fail
        )
    return str(error.value)


def test_an_error_meanwhile_is_raised() -> None:
    assert run_ranks(2, failed) == ["not this way"] * 2
