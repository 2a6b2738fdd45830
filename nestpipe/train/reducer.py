"""Sums dense gradients over ranks, in buckets whose order is fixed."""

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from nestpipe.device.numerics import all_finite
from nestpipe.device.streams import Mark, use_here, wait_for
from nestpipe.distributed.world import World
from nestpipe.pipelining.commit import NonFiniteError
from nestpipe.pipelining.step import Step


class DenseReducer:
    """Sums the gradients of a model's parameters over ranks, in place.

    The buckets are a pure function of the parameters and `bucket_bytes`. They go from the last parameter to the first,
    which is nearly the order in which a backward completes gradients. A parameter counts as zero on ranks that did not
    use it; if no rank used it, its gradient is None afterwards.
    """

    def __init__(self, model: nn.Module, world: World, bucket_bytes: int = 1 << 22) -> None:
        self.world = world
        self.model = model
        self.parameters: list[nn.Parameter] = []
        """Trainable parameters, as of this step."""
        self.buckets: list[list[nn.Parameter]] = []
        self._bucket_bytes = bucket_bytes
        self._bucket_of: dict[Tensor, int] = {}
        self._num_missing: list[int] = []
        """Parameters of each bucket whose gradient the current backward has not completed."""
        self._begun: list[Future[tuple[Tensor, Mark]]] = []
        """Pending sums of the first buckets."""
        self._versions: list[list[int]] = []
        """Versions of the gradients in each pending bucket."""
        world.when_left(self)
        self._update_buckets()

    @contextmanager
    def overlap(self, is_last: bool) -> Iterator[None]:
        """Wraps the backward of a micro-batch. In the last one, buckets start while the backward runs.

        A bucket starts as soon as its gradients and all buckets before it are complete; `finish` starts the rest. Where
        one thread issues all collectives, `finish` starts every bucket: at their last backward, ranks differ in how
        many micro-batches they still have to return.
        """
        if is_last:
            self._update_buckets()  # otherwise `finish` does
        if not is_last or not self.buckets or self.world.issuer is not None:
            yield
            return
        self._num_missing = [len(bucket) for bucket in self.buckets]
        hooks = [parameter.register_post_accumulate_grad_hook(self._mark_ready) for parameter in self.parameters]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def finish(self, step: Step | None = None, loss: Tensor | None = None) -> None:
        """Sums gradients, and `loss`, over ranks in place. Call it between the last backward and the optimizer's step.

        It commits the step: all ranks raise if one of them must not apply it. On a device, a value that is not finite
        is detected later, see Step.commit. Without a step, the host waits for the sums and checks them.
        """
        if step is not None:
            step.check_complete()
            step.trace.enter("dense")
        self._update_buckets()
        self._check_untouched()
        with nullcontext() if step is None else step.trace.span("reduce"):
            self._begin_rest()
        used = torch.tensor([parameter.grad is not None for parameter in self.parameters], dtype=torch.float64)
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        # With buckets, their sums show what is not finite in the gradients of any rank.
        non_finite = ~all_finite([] if self.buckets else gradients, self.world.device)
        if step is None:
            sums = self._sums()
            used = self._agree(used, non_finite | ~all_finite(sums, self.world.device), loss)
        else:
            agreement = step.begin_commit(loss, non_finite, used)
            with step.trace.span("reduce"):
                sums = self._sums()
            # Every rank has the same sums, so this needs no agreement.
            used = step.finish_commit(agreement, ~all_finite(sums, self.world.device), loss)
        self._assign(sums, (used > 0).tolist())

    def _agree(self, used: Tensor, non_finite: Tensor, loss: Tensor | None) -> Tensor:
        """Returns how many ranks used each parameter, in a loop without steps. All ranks raise if one is not finite."""
        own_loss = torch.zeros((), dtype=torch.float64) if loss is None else loss.detach().double().cpu()
        flag_and_loss = torch.stack([(non_finite.cpu() | ~own_loss.isfinite()).double(), own_loss])
        sums = torch.cat([flag_and_loss, used])
        self.world.dense.all_reduce_sum(sums)
        if sums[0] > 0:
            text = "a loss or a gradient is not finite on some rank; nothing was applied"
            raise self.world.watch.agreed(NonFiniteError(text))
        if loss is not None:
            loss.detach().copy_(sums[1])
        return sums[2:]

    def _assign(self, sums: list[Tensor], any_used: list[bool]) -> None:
        for bucket, flat in zip(self.buckets, sums, strict=True):
            for parameter, reduced in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                parameter.grad = reduced.view_as(parameter)
        for parameter, is_used in zip(self.parameters, any_used, strict=True):
            if not is_used:
                parameter.grad = None

    def _update_buckets(self) -> None:
        """Rebuilds the buckets if layers were frozen or unfrozen since the last step, on all ranks alike."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        if self._begun or [id(p) for p in parameters] == [id(p) for p in self.parameters]:
            return
        self.parameters = parameters
        self.buckets = _buckets(parameters[::-1], self._bucket_bytes) if self.world.size > 1 else []
        self._bucket_of = {parameter: i for i, bucket in enumerate(self.buckets) for parameter in bucket}

    def _check_untouched(self) -> None:
        """Refuses sparse gradients, and gradients that changed while they were being summed."""
        for parameter in self.parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise ValueError("a dense parameter has a sparse gradient; give the model's nn.Embedding sparse=False")
        for bucket, versions in zip(self.buckets, self._versions, strict=False):
            if _versions(bucket) != versions:
                raise RuntimeError(
                    "a dense gradient was changed between `reducer.overlap` and `reducer.finish`, while it was being "
                    "summed over ranks; scale or clip gradients after finish"
                )

    def _mark_ready(self, parameter: Tensor) -> None:
        bucket = self._bucket_of[parameter]
        if bucket < len(self._begun):
            raise RuntimeError(
                "a gradient changed while it was being summed over ranks: there must be one backward, the step's last, "
                "within `with reducer.overlap(True)`, and no layer that is recomputed in it more than once (reentrant "
                "checkpointing of a shared layer): leave overlap out for such a model"
            )
        self._num_missing[bucket] -= 1
        while len(self._begun) < len(self.buckets) and self._num_missing[len(self._begun)] == 0:
            self._begin_next()

    def _begin_next(self, has_other_work: bool = True) -> None:
        bucket = self.buckets[len(self._begun)]
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in bucket]
        self._versions.append(_versions(bucket))
        self._begun.append(self.world.dense.begin_sum(gradients, has_other_work))

    def _begin_rest(self) -> None:
        while len(self._begun) < len(self.buckets):
            self._begin_next(has_other_work=False)

    def _sums(self) -> list[Tensor]:
        begun, self._begun, self._versions = self._begun, [], []
        return self._wait(begun)

    def _wait(self, begun: list[Future[tuple[Tensor, Mark]]]) -> list[Tensor]:
        sums = []
        for pending in begun:
            flat, moment = self.world.watch.wait(pending, "dense reduction")
            wait_for(moment)
            use_here(flat)
            sums.append(flat)
        return sums

    @property
    def has_begun(self) -> bool:
        return len(self._begun) > 0

    def complete(self) -> None:
        """Completes sums that only some ranks have begun, and throws them away."""
        self._begin_rest()
        self._sums()


def _versions(bucket: list[nn.Parameter]) -> list[int]:
    """Returns the version of each gradient, which every change in place advances; -1 if there is no gradient."""
    return [-1 if parameter.grad is None else parameter.grad._version for parameter in bucket]


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
