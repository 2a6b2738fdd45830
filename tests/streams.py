"""Adversarial key streams for every exactness test: lists of batches, each a tensor of int64 keys."""

import torch
from torch import Tensor

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


def _batches(*batches: list[int] | range) -> list[Tensor]:
    return [torch.tensor(list(batch), dtype=torch.int64) for batch in batches]


def _random(num_batches: int, num_keys: int, high: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(high, (num_keys,), generator=generator) for _ in range(num_batches)]


def key_streams() -> dict[str, list[Tensor]]:
    return {
        "all_equal": _batches(*[[7] * 40] * 6),
        "period_2": _batches(*[range(0, 30), range(30, 60)] * 3),
        "disjoint": _batches(*[range(first, first + 30) for first in range(0, 180, 30)]),
        "full_overlap": _batches(*[range(50)] * 6),
        "empty_batches": _batches([], range(20), [], [], range(10, 30), []),
        "ragged_end": _batches(range(40), range(20, 60), range(3)),
        "huge_keys": _batches(
            [INT64_MIN, INT64_MAX, -1, 0, 1], [INT64_MIN + 1, -1, 2**62, 2**53 + 1], [INT64_MAX, INT64_MIN, 5]
        ),
        "random": _random(8, 60, 200, seed=3),
        "sparse_random": _random(8, 60, 2**40, seed=4),
    }


def pool_streams() -> dict[str, list[Tensor]]:
    """Returns streams that are hard on a row pool."""
    return {
        "period_3": _batches(*[range(0, 20), range(20, 40), range(40, 60)] * 3),
        "thrash": _batches(*[range(first, first + 30) for first in (0, 20, 40, 0, 20, 40, 0)]),
        # Keys 0 to 9 leave when the third batch comes, and return with the fourth.
        "returning": _batches(range(20), range(20, 40), range(40, 60), [*range(10), *range(60, 70)], range(20, 40)),
        "growing": _batches(*[range(0, 10 * size) for size in (1, 2, 4, 3, 6, 1, 5)]),
    }
