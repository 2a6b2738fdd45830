"""The dense gradients of all ranks, summed in buckets whose order is fixed."""

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from nestpipe.distributed.world import World
from nestpipe.pipelining.pipeline import NonFiniteError, Step, are_finite


class DenseReducer:
    """Sums the gradients of a model's parameters over ranks, in place.

    The buckets are a pure function of the parameters and `bucket_bytes`: from the last parameter to the first, because
    that is nearly the order in which a backward ends. A parameter that some ranks did not use counts as zero there; one
    that no rank used keeps no gradient.
    """

    def __init__(self, model: nn.Module, world: World, bucket_bytes: int = 1 << 22) -> None:
        self.world = world
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.buckets = _buckets(self.parameters[::-1], bucket_bytes) if world.size > 1 else []
        self._ranks = range(world.size)
        self._bucket_of = {parameter: i for i, bucket in enumerate(self.buckets) for parameter in bucket}
        self._num_missing: list[int] = []
        """parameters of each bucket whose gradient the backward under way has not completed"""
        self._begun: list[Future[Tensor]] = []
        """sums of the first buckets"""
        world.when_left(self._complete)

    @contextmanager
    def overlap(self, is_last: bool) -> Iterator[None]:
        """Around the backward of a micro-batch. In the last one, each bucket starts as soon as its gradients, and all
        buckets before it, are complete; `finish` starts the rest."""
        if not is_last or not self.buckets:
            yield
            return
        self._num_missing = [len(bucket) for bucket in self.buckets]
        hooks = [parameter.register_post_accumulate_grad_hook(self._mark) for parameter in self.parameters]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def finish(self, step: Step | None = None, loss: Tensor | None = None) -> None:
        """Call it after the last backward and before the optimizer's step. Also sums `loss` over ranks, in place.

        Raises on every rank when on any of them the step must not be applied: NonFiniteError when the loss, a dense
        gradient or a gradient of the step's rows is not finite; a table's error when it has no room.
        """
        if step is not None:
            step.check_complete()
            step.trace.enter("dense")
        self._begin_rest()
        is_finite = loss is None or bool(loss.isfinite())
        is_finite = is_finite and (step is None or step.gradients_are_finite())
        is_finite = is_finite and all(are_finite(p.grad) for p in self.parameters if p.grad is not None)
        with step.trace.span("reduce") if step is not None else nullcontext():
            sums = self._sums()
            any_used = self._agree(step, is_finite, loss)
        for bucket, flat in zip(self.buckets, sums, strict=True):
            for parameter, reduced in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                parameter.grad = reduced.view_as(parameter)
        for parameter, is_used in zip(self.parameters, any_used, strict=True):
            if not is_used:
                parameter.grad = None
        if step is not None:
            step.is_reduced = True

    def _mark(self, parameter: Tensor) -> None:
        bucket = self._bucket_of[parameter]  # type: ignore[index]
        if bucket < len(self._begun):
            raise RuntimeError(
                "a gradient changed while it was being summed over ranks: there must be one backward, the step's last, "
                "within `with reducer.overlap(True)`"
            )
        self._num_missing[bucket] -= 1
        while len(self._begun) < len(self.buckets) and self._num_missing[len(self._begun)] == 0:
            self._begin_next()

    def _begin_next(self) -> None:
        bucket = self.buckets[len(self._begun)]
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in bucket]
        self._begun.append(self.world.dense.begin_sum(gradients))

    def _begin_rest(self) -> None:
        while len(self._begun) < len(self.buckets):
            self._begin_next()

    def _sums(self) -> list[Tensor]:
        begun, self._begun = self._begun, []
        return [self.world.watch.wait(pending, "dense reduction") for pending in begun]

    def _complete(self) -> None:
        """Some ranks may have begun: all do, and throw the sums away."""
        self._begin_rest()
        self._sums()

    def _agree(self, step: Step | None, is_finite: bool, loss: Tensor | None) -> list[bool]:
        """Whether any rank used each parameter; raises on every rank if the step must not be applied on one of them."""
        used = [parameter.grad is not None for parameter in self.parameters]
        has_problem = [step is not None and step.problem is not None and r == self.world.rank for r in self._ranks]
        sums = torch.tensor([*used, not is_finite, *has_problem, 0.0 if loss is None else loss], dtype=torch.float64)
        self.world.dense.all_reduce_sum(sums)
        flags = (sums[:-1] > 0).tolist()
        any_used, any_infinite, failed = flags[: len(used)], flags[len(used)], flags[len(used) + 1 :]
        if step is not None and any(failed):
            self.world.dense.raise_agreed(step.problem, [rank for rank in self._ranks if failed[rank]])
        if any_infinite:
            where = f"step {step.number}: " if step is not None else ""
            error = NonFiniteError(
                f"{where}a loss or a gradient is not finite on some rank; nothing of this step was applied. Lower the "
                "learning rate, clip gradients, or look for bad inputs in this batch"
            )
            raise self.world.watch.agreed(error)
        if loss is not None:
            loss.copy_(sums[-1])
        return any_used


def _buckets(parameters: list[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    buckets: list[list[nn.Parameter]] = []
    filled, dtype = 0, None
    for parameter in parameters:
        if not buckets or parameter.dtype != dtype or filled + parameter.nbytes > bucket_bytes:
            buckets.append([])
            filled, dtype = 0, parameter.dtype
        buckets[-1].append(parameter)
        filled += parameter.nbytes
    return buckets
