"""What the kernels of attention work on: blocks of tokens, and tiles, which are pairs of blocks."""

from collections.abc import Sequence
from copy import copy
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.kernels.rows.upload import upload

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

    The lists are filled up to round sizes, and so may tokens be: micro-batches of about the same size look alike to
    whoever launches kernels. What fills up tokens are blocks that see themselves only; other blocks and tiles that fill
    up have no tokens.
    """

    def __init__(self, lengths: Sequence[int], times: Tensor, bounds: Tensor, size: int) -> None:
        """times [num_samples, max_length + 1]; bounds int64: the smallest difference in each bucket but the first."""
        self.size = size
        self.max_length = int(times.shape[1]) - 1
        self._times: Tensor | None = times
        self._bounds = bounds
        of_sample = np.asarray(lengths, dtype=np.int64)
        num_blocks = -(-of_sample // size)
        num_tiles = num_blocks * (num_blocks + 1) // 2
        self.num_tokens, self.num_blocks, self.num_tiles = (int(n.sum()) for n in (of_sample, num_blocks, num_tiles))
        self.round_tokens = round_up(self.num_tokens)
        filling = np.arange(self.num_tokens, self.round_tokens, size)
        """first token of each block that fills up"""
        self.round_blocks = round_up(self.num_blocks + len(filling) + 1)
        self.round_tiles = round_up(self.num_tiles + 1)
        self.most_blocks = -(-self.max_length // size)
        """of one sample"""
        blocks = np.zeros((self.round_blocks, 5), dtype=np.int32)
        samples = np.repeat(np.arange(len(of_sample)), num_blocks)
        numbers = np.arange(self.num_blocks) - _starts(num_blocks)[samples]
        fields = numbers, _starts(of_sample)[samples], of_sample[samples], _starts(num_tiles)[samples], samples
        blocks[: self.num_blocks] = np.stack(fields, axis=1)
        blocks[self.num_blocks :, 3] = self.num_tiles  # the first tile that fills up, which has one time only
        others = blocks[self.num_blocks : self.num_blocks + len(filling)]
        others[:, 1], others[:, 2] = filling, np.minimum(size, self.round_tokens - filling)
        pairs = np.zeros((self.round_tiles, 2), dtype=np.int32)
        pairs[self.num_tiles :, 0] = self.round_blocks - 1
        queries = np.repeat(np.arange(self.num_blocks), numbers + 1)
        distances = np.arange(self.num_tiles) - np.repeat(_starts(numbers + 1), numbers + 1)
        order = np.argsort(distances, kind="stable")
        pairs[: self.num_tiles] = np.stack([queries[order], distances[order]], axis=1)
        of_distance = np.bincount(distances, minlength=self.most_blocks + 1)
        starts = np.concatenate([_starts(of_distance), [self.num_tiles]])
        self._take(_in_one_piece([blocks, pairs, starts], times.device))

    def _take(self, lists: Tensor) -> None:
        """blocks [round_blocks, 5]: number in its sample; of that, first token, length, first tile, and number.
        pairs [round_tiles, 2]: block of queries, how many blocks before it the keys are; by rising distance.
        starts [most_blocks + 2]: where the pairs of each distance begin. The last distance has none."""
        self._lists = lists
        blocks, pairs, self.starts = lists.split([5 * self.round_blocks, 2 * self.round_tiles, self.most_blocks + 2])
        self.blocks, self.pairs = blocks.view(-1, 5), pairs.view(-1, 2)

    @cached_property
    def buckets(self) -> Tensor:
        """[round_tiles, size, size] uint8, of each query and key; a sample's tiles by block of queries, then of keys"""
        buckets = self._lists.new_empty(self.round_tiles, self.size, self.size, dtype=torch.uint8)
        self._find_buckets(buckets)
        return buckets

    def _find_buckets(self, out: Tensor) -> None:
        from nestpipe.kernels.attention.attention import time_buckets  # where Triton is imported

        if self.num_tiles > 0:
            assert self._times is not None
            time_buckets(self, self._times, self._bounds, out)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Two of the same sizes differ in the numbers of their lists only."""
        return self.size, self.max_length, self.round_tokens, self.round_blocks, self.round_tiles

    def filled_up(self) -> "Tiles":
        """The same for tokens that are filled up: kernels are launched for all there is."""
        whole = copy(self)
        whole.buckets = self.buckets
        whole.num_tokens, whole.num_blocks, whole.num_tiles = self.round_tokens, self.round_blocks, self.round_tiles
        return whole

    def twin(self) -> "Tiles":
        """Filled up, in memory of its own, into which others of the same sizes can be copied."""
        twin = self.filled_up()
        twin._times = None  # part of the upload of a whole batch
        twin._take(self._lists.clone())
        twin.buckets = self.buckets.clone()
        return twin

    def copy_to(self, twin: "Tiles") -> None:
        twin._lists.copy_(self._lists)
        self._find_buckets(twin.buckets)


def round_up(number: int) -> int:
    """By at most a sixteenth: to one of 16 numbers between a power of two and the next."""
    step = max(1, 1 << max(0, number.bit_length() - 5))
    return -(-number // step) * step


def _starts(counts: Numbers) -> Numbers:
    return np.cumsum(counts) - counts


def _in_one_piece(parts: list[NDArray[Any]], device: torch.device) -> Tensor:
    """As int32."""
    return upload(torch.from_numpy(np.concatenate([part.ravel() for part in parts]).astype(np.int32)), device)
