"""What ends collectives of device memory once a rank is lost: groups abort together, once, and never hold this rank up.

Groups are stand-ins here; tests/gpu/test_nccl_on_one_device.py aborts those of NCCL. Fails if a failure of this rank
itself aborts nothing (return early in Watch.report), or if groups abort one after another.
"""

import threading

import pytest
import torch
import torch.distributed as dist

from nestpipe import World
from nestpipe.distributed import RankError, backend, link
from tests.ranks import run_ranks


class Group:
    """Stands in for a group of NCCL, and its backend."""

    calls: list[str]

    def __init__(self, calls: list[str], number: int) -> None:
        self.calls, self.number = calls, number

    def _get_backend(self, device: object) -> "Group":
        return self

    def _group_start(self) -> None:
        self.calls.append("start")

    def _group_end(self) -> None:
        self.calls.append("end")

    def abort(self) -> None:
        self.calls.append(f"abort {self.number}")


def test_groups_abort_together() -> None:
    calls: list[str] = []
    backend.abort_all([Group(calls, number) for number in range(2)])
    assert calls == ["start", "abort 0", "abort 1", "end"]


def take_part(world: World) -> None:
    if world.rank == 1:
        raise LookupError("no such file")
    world.control.all_reduce_sum(torch.zeros(1))


def fail(world: World, fails: str) -> tuple[list[str], str]:
    calls: list[str] = []
    make = dist.new_group
    dist.new_group = lambda *_, **options: Group(calls, 0)
    assert world._link is not None
    world._link.new_group("nccl")
    world._link.new_group("nccl")
    dist.new_group = make
    if fails == "hangs":
        link.ABORT_SECONDS = 0.1
        link.abort_all = lambda groups: calls.append("begun") or threading.Event().wait(60)
    with pytest.raises((RankError, LookupError)) as caught, world.watch.reporting():
        take_part(world)
    world._link._device_groups.clear()  # else the process would end at once
    return calls, str(caught.value)


@pytest.mark.parametrize("fails", ["nothing", "hangs"])
def test_a_failure_aborts_once_on_every_rank(fails: str) -> None:
    for calls, text in run_ranks(2, fail, fails):
        assert calls == (["begun"] if fails == "hangs" else ["start", "abort 0", "abort 0", "end"])
        assert "no such file" in text
