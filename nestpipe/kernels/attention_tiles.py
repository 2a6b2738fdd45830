"""What the kernels of attention work on: blocks of tokens, and tiles, which are pairs of blocks."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers = NDArray[np.int64]

SIZES = {torch.bfloat16: 64, torch.float32: 32}
"""tokens in a block, by dtype; products of float32 are not made by tensor cores and need more registers"""
LARGEST_DIM = 128
"""of q, k and v: what a multiprocessor's own memory has room for"""


class Tiles:
    """Every sample cut into blocks of `size` tokens; a tile is a block of queries with one of keys not behind it.

    All lists are made from the lengths in host memory and travel once, without waiting for the device. What all layers
    share is the bucket of time of each query and key, a byte each: about (length + size) / 2 bytes a token. That grows
    with the length, but q, k, v and u of one layer, 512 columns each in bfloat16, have 4096 bytes a token.
    """

    def __init__(self, lengths: Sequence[int], times: Tensor, bounds: Tensor, size: int) -> None:
        """times [num_samples, max_length + 1]; bounds int64: the smallest difference in each bucket but the first."""
        self.size = size
        self.max_length = int(times.shape[1]) - 1
        self.num_tokens = sum(lengths)
        self._times, self._bounds = times, bounds
        of_sample = np.asarray(lengths, dtype=np.int64)
        num_blocks = -(-of_sample // size)
        self.num_blocks = int(num_blocks.sum())
        self.most_blocks = int(num_blocks.max(initial=0))
        """of one sample"""
        num_tiles = num_blocks * (num_blocks + 1) // 2
        self.num_tiles = int(num_tiles.sum())
        samples = np.repeat(np.arange(len(of_sample)), num_blocks)
        numbers = np.arange(self.num_blocks) - _starts(num_blocks)[samples]
        blocks = np.stack(
            [numbers, _starts(of_sample)[samples], of_sample[samples], _starts(num_tiles)[samples], samples], axis=1
        )
        queries = np.repeat(np.arange(self.num_blocks), numbers + 1)
        distances = np.arange(self.num_tiles) - np.repeat(_starts(numbers + 1), numbers + 1)
        order = np.argsort(distances, kind="stable")
        of_distance = np.bincount(distances, minlength=self.most_blocks + 1)
        parts = [
            blocks,
            np.stack([queries[order], distances[order]], axis=1),
            np.concatenate([_starts(of_distance), [self.num_tiles]]),
        ]
        self.blocks, self.pairs, self.starts = _in_one_piece(parts, times.device)
        """blocks [num_blocks, 5]: number in its sample; of that, first token, length, first tile, and number.
        pairs [num_tiles, 2]: block of queries, how many blocks before it the keys are; by rising distance.
        starts [most_blocks + 2]: where the pairs of each distance begin. The last distance has none."""

    @cached_property
    def buckets(self) -> Tensor:
        """[num_tiles, size, size] uint8, of each query and key; a sample's tiles by block of queries, then of keys"""
        from nestpipe.kernels.attention import time_buckets  # where Triton is imported

        return time_buckets(self, self._times, self._bounds)


def upload(values: Tensor, device: torch.device) -> Tensor:
    """From host memory, without waiting for the device."""
    if device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def _starts(counts: Numbers) -> Numbers:
    return np.cumsum(counts) - counts


def _in_one_piece(parts: list[Numbers], device: torch.device) -> list[Tensor]:
    """As int32."""
    packed = upload(torch.from_numpy(np.concatenate([part.ravel() for part in parts]).astype(np.int32)), device)
    pieces = packed.split([part.size for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]
