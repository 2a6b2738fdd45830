"""The dense gradients of all ranks, summed in buckets whose order is fixed."""

import torch
from torch import Tensor, nn

from nestpipe.distributed.world import World


class DenseReducer:
    """Sums the gradients of a model's parameters over ranks, in place.

    The buckets are a pure function of the parameters and `bucket_bytes`. A parameter that some ranks did not use counts
    as zero there; one that no rank used keeps no gradient.
    """

    def __init__(self, model: nn.Module, world: World, bucket_bytes: int = 1 << 22) -> None:
        self.world = world
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.buckets = _buckets(self.parameters, bucket_bytes)

    def finish(self, flags: list[bool] | None = None) -> list[bool]:
        """Call it after the last backward. Returns, for each flag, whether any rank raised it."""
        flags = flags or []
        used = [parameter.grad is not None for parameter in self.parameters]
        numbers = torch.tensor([*used, *flags], dtype=torch.float64)
        self.world.all_reduce_sum(numbers)
        any_used, any_flags = numbers[: len(used)] > 0, numbers[len(used) :] > 0
        if self.world.size > 1:
            for bucket in self.buckets:
                self._reduce(bucket)
        for parameter, is_used in zip(self.parameters, any_used.tolist(), strict=True):
            if not is_used:
                parameter.grad = None
        return any_flags.tolist()

    def _reduce(self, bucket: list[nn.Parameter]) -> None:
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in bucket]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        self.world.all_reduce_sum(flat)
        for parameter, reduced in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            parameter.grad = reduced.view_as(parameter)


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


def gradients_are_finite(parameters: list[nn.Parameter]) -> bool:
    gradients: list[Tensor] = [p.grad for p in parameters if p.grad is not None]
    return all(bool(gradient.isfinite().all()) for gradient in gradients)
