"""Clustering: samples of a batch that share keys go together into a micro-batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.data.batch import Jagged
from nestpipe.store import cluster
from nestpipe.store.interface import check_integer

CLUSTER_METHODS = ("spectral", "minhash", "none")
CLUSTER_COSTS = ("keys", "length_squared")


@dataclass(frozen=True)
class Clustering:
    """Distributes the samples of a batch over micro-batches; see docs/clustering.md."""

    method: str = "spectral"
    """"spectral", "minhash", or "none" for parts of nearly equal size in the given order."""
    cost: str = "keys"
    """Cost by which the parts are balanced: "keys", the number of a sample's keys, or "length_squared", its square, for
    models dominated by attention."""
    seed: int = 0

    def __post_init__(self) -> None:
        for what, value, choices in (
            ("method", self.method, CLUSTER_METHODS),
            ("cost", self.cost, CLUSTER_COSTS),
        ):
            if value not in choices:
                raise ValueError(f"cluster {what} {value!r} is none of {', '.join(choices)}")
        check_integer("cluster seed", self.seed, 0, 2**64 - 1)

    def parts(self, features: Sequence[Jagged], num_distinct: int, num_parts: int) -> list[Tensor]:
        """Returns the samples of each part, ascending.

        The values of the features are not keys but their numbers among the distinct keys of all tables:
        0 .. num_distinct - 1, or -1 for padding.
        """
        if not features:
            raise ValueError("clustering needs at least one feature: without any, the number of samples is unknown")
        num_samples = len(features[0])
        if self.keeps_order(num_parts):
            return in_order(num_samples, num_parts)
        lists = [(feature.values, feature.offsets) for feature in features]
        cost = self.costs(features)
        order, part_offsets = cluster(lists, num_distinct, cost, num_parts, self.method, self.seed)
        return list(order.tensor_split(part_offsets[1:-1]))

    def keeps_order(self, num_parts: int) -> bool:
        """Returns whether the samples stay in the given order."""
        return self.method == "none" or num_parts == 1

    def costs(self, features: Sequence[Jagged]) -> Tensor:
        """Returns the cost of each sample [num_samples]. Padding counts, and a sample without keys costs 1."""
        num_keys = torch.stack([feature.lengths for feature in features]).sum(0).clamp(min=1).double()
        return num_keys.square() if self.cost == "length_squared" else num_keys


def in_order(num_samples: int, num_parts: int) -> list[Tensor]:
    """Returns parts of nearly equal size; the last ones are empty if there are too few samples."""
    return list(torch.arange(num_samples).tensor_split(num_parts))


BY_KEYS, GIVEN_ORDER = Clustering(), Clustering("none")
