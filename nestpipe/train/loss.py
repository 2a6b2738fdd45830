"""The loss sums that a model returns."""

from collections.abc import Mapping

import torch
from torch import Tensor


def loss_sums(returned: object, weights: Mapping[str, float]) -> dict[str, Tensor]:
    """Returns a model's loss sums by name. Refuses anything but scalar sums with the names of the batch's weights."""
    named = dict(returned) if isinstance(returned, Mapping) else {"": returned}
    sums: dict[str, Tensor] = {}
    for name, value in named.items():
        if not isinstance(value, Tensor) or value.dim() != 0:
            what = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"the model returned {what} as its loss{f' {name!r}' if name else ''}; it must return the sum of the "
                "samples' losses as a tensor without dimensions, or a dict of such sums"
            )
        sums[name] = value
    if sums.keys() != weights.keys():
        raise ValueError(
            f"the model returned losses {sorted(sums)}, the batch has weights for {sorted(weights)}; they must agree"
        )
    return sums


def weighted_mean(sums: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """Returns the loss sums, each divided by its weight, added up. A loss that nothing has weight for counts as 0."""
    losses = [value / weights[name] if weights[name] > 0 else value * 0.0 for name, value in sums.items()]
    return losses[0] if len(losses) == 1 else torch.stack(losses).sum()
