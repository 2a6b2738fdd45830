"""Floating-point operations of a step, and the share of the devices' peak that they are."""

from collections.abc import Mapping

import torch

from nestpipe.device.peak import peak_flops
from nestpipe.distributed.backend import device_place
from nestpipe.train.fit_result import FitResult
from nestpipe.train.trainer import Trainer

TRAINED_PER_FORWARD = 3
"""A backward takes two products for each one of the forward: for the gradients of either factor."""


def model_flops(result: FitResult, times: Mapping[str, float], trainer: Trainer) -> dict[str, float]:
    """Returns fields of the summary; none if the operations were not counted. All ranks call it and get the same.

    Operations are those that the model asks for: what a kernel computes again in its backward does not count.
    """
    world = trainer.world
    own = torch.tensor([[-1.0 if result.forward_flops_per_sample is None else result.forward_flops_per_sample]])
    by_rank = world.control.all_to_all_equal(own.double().expand(world.size, -1))
    places = world.control.share_text(device_place(world.device))
    if times["step_ms"] <= 0 or float(by_rank.min()) < 0:
        return {}
    flops_per_second = TRAINED_PER_FORWARD * float(by_rank.mean()) * times["samples_per_second"]
    fields = {"model_flops_per_step": flops_per_second * times["step_ms"] / 1e3}
    peak = peak_flops(world.device, trainer.autocast or torch.float32)
    if peak is not None:
        fields["model_flop_utilisation"] = flops_per_second / (peak * len(set(places)))
    return fields
