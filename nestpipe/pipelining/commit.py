"""Commit: all ranks agree whether a step counts.

A step does not count if on any rank a loss or a gradient is not finite, or a table has no room for its new rows. The
agreement has its own channel, so it works alike with DenseReducer, DDP or FSDP.

In host memory the result is known before anything is applied, and an error is raised on every rank. On a device the
host learns it later: a flag on the device masks the updates of rows from the first step that is not finite, and the
host raises two steps later. The host knows about room in both cases.
"""

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nestpipe.device.streams import Mark, use_here, wait_for
from nestpipe.distributed import World

Sum = Future[tuple[Tensor, Mark]]

LATE_STEPS = 2
"""Steps after which the host reads the outcome of a step on a device."""

REMEDY = (
    "Lower the learning rate, clip gradients, or look for bad inputs in this batch. In a form with fewer bytes "
    "(exchange.gradient_dtype), numbers may be too large sooner: in float16 above 65,504"
)


class NonFiniteError(ArithmeticError):
    """A loss or gradient was not finite. Nothing of that step was applied to rows."""


def late_error(number: int) -> NonFiniteError:
    """Returns the error for a step that was not finite on a device, while the host went on."""
    return NonFiniteError(
        f"step {number}: a loss or a gradient is not finite on some rank; no row was changed by this step or after it, "
        f"but the dense parameters were: go on from a checkpoint. {REMEDY}"
    )


@dataclass(frozen=True)
class Outcome:
    """Result of a step on a device, as read back by the host."""

    loss: float
    is_masked: bool


@dataclass(frozen=True)
class Ballot:
    """Contribution of one rank to the agreement on a step."""

    step: int
    non_finite: Tensor
    """One bool on the model's device: True if a loss or gradient of this rank is not finite."""
    loss: Tensor
    """This rank's part of the loss."""
    problem: Exception | None
    """Reason not to apply the step; None if there is none."""
    extra: Tensor
    """More numbers to sum over ranks, in host memory."""


class Agreement(Protocol):
    """An agreement that has begun."""

    def finish(self, any_non_finite: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the loss of the global batch, the summed extra numbers, and whether the step is not finite (on a
        device). Raises on all ranks if the step does not count.

        any_non_finite: True if a dense sum is not finite; every rank passes the same value.
        """


def begin_commit(world: World, ballot: Ballot) -> Agreement:
    """Begins the agreement. Work done before it is finished hides its time."""
    if not world.runs_ahead:
        return _HostAgreement(world, ballot)
    return _DeviceAgreement(world, ballot) if world.size > 1 else _LoneAgreement(world, ballot)


class _HostAgreement:
    def __init__(self, world: World, ballot: Ballot) -> None:
        self._world = world
        self._ballot = ballot
        numbers = torch.tensor([bool(ballot.non_finite), ballot.problem is not None, ballot.loss], dtype=torch.float64)
        self._sum = world.commit.begin_sum([numbers, ballot.extra], has_other_work=False)

    def finish(self, any_non_finite: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sums, _ = self._world.watch.wait(self._sum, "commit")
        num_non_finite, num_problems = sums[:2].tolist()
        if num_problems > 0:
            _raise_problem(self._world, self._ballot.problem)
        if num_non_finite > 0 or bool(any_non_finite):
            raise self._world.watch.agreed(
                NonFiniteError(
                    f"step {self._ballot.step}: a loss or a gradient is not finite on some rank; nothing of this step "
                    f"was applied. {REMEDY}"
                )
            )
        return sums[2], sums[3:], any_non_finite


class _DeviceAgreement:
    def __init__(self, world: World, ballot: Ballot) -> None:
        self._world = world
        self._ballot = ballot
        on_device = torch.stack([ballot.non_finite.double(), ballot.loss.double()])
        problems = torch.tensor([float(ballot.problem is not None)], dtype=torch.float64)
        self._on_device = world.commit.begin_sum([on_device])
        self._in_host = world.commit.begin_sum([problems, ballot.extra])

    def finish(self, any_non_finite: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        in_host, _ = self._world.watch.wait(self._in_host, "commit")
        if in_host[0] > 0:
            _raise_problem(self._world, self._ballot.problem)
        on_device, moment = self._world.watch.wait(self._on_device, "commit")
        wait_for(moment)
        use_here(on_device)
        return on_device[1], in_host[1:], (on_device[0] != 0) | any_non_finite


class _LoneAgreement:
    """That of a world of one, on a device."""

    def __init__(self, world: World, ballot: Ballot) -> None:
        self._world = world
        self._ballot = ballot

    def finish(self, any_non_finite: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self._ballot.problem is not None:
            raise self._world.watch.agreed(self._ballot.problem)
        return self._ballot.loss, self._ballot.extra, self._ballot.non_finite | any_non_finite


def _raise_problem(world: World, problem: Exception | None) -> None:
    """Raises on all ranks: each its own problem, or an error that quotes the others."""
    channel = world.commit
    failed = channel.all_to_all_equal(torch.full((channel.size, 1), int(problem is not None))).flatten()
    channel.raise_agreed(problem, failed.nonzero().flatten().tolist())
