"""Blocks of tokens, and tiles, which are pairs of blocks: what the kernels of attention work on."""

from collections.abc import Sequence
from copy import copy
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.kernels.rows.pinned import upload

Numbers = NDArray[np.int64]

SIZES = {torch.bfloat16: 64, torch.float32: 32}
"""Tokens in a block, by dtype. Products of float32 do not use tensor cores and need more registers."""
LARGEST_DIM = 128
"""Largest dim of q, k and v for which a multiprocessor has enough shared memory."""
NUM_FIELDS = 5
"""Columns of Tiles.blocks."""


class Tiles:
    """Every sample cut into blocks of `size` tokens. A tile is a block of queries with a block of keys not after it.

    All lists are made from the lengths in host memory and uploaded once, without waiting for the device. Layers share
    the bucket of time of each query and key, a byte each: about (length + size) / 2 bytes per token. It grows with the
    length, but q, k, v and u of one layer, 512 columns each in bfloat16, take 4096 bytes per token.

    The lists are padded to round sizes, and tokens may be padded too, so that micro-batches of similar sizes need the
    same launches. Padding tokens are in blocks that attend to themselves only. Other padding blocks, and padding tiles,
    have no tokens.
    """

    def __init__(self, lengths: Sequence[int], times: Tensor, bounds: Tensor, size: int) -> None:
        """times: [num_samples, max_length + 1]. bounds: int64, the smallest difference in each bucket but the first."""
        self.size = size
        self.max_length = int(times.shape[1]) - 1
        self._times: Tensor | None = times
        self._bounds = bounds
        token_counts = np.asarray(lengths, dtype=np.int64)
        self._token_counts = token_counts
        num_blocks = -(-token_counts // size)
        num_tiles = num_blocks * (num_blocks + 1) // 2
        self.num_tokens, self.num_blocks, self.num_tiles = (int(n.sum()) for n in (token_counts, num_blocks, num_tiles))
        self.round_tokens = round_up(self.num_tokens)
        padding = np.arange(self.num_tokens, self.round_tokens, size)  # the first token of each padding block
        self.round_blocks = round_up(self.num_blocks + len(padding) + 1)
        self.round_tiles = round_up(self.num_tiles + 1)
        self.most_blocks = -(-self.max_length // size)
        """Largest number of blocks of a sample."""
        blocks = np.zeros((self.round_blocks, NUM_FIELDS), dtype=np.int32)
        samples = np.repeat(np.arange(len(token_counts)), num_blocks)
        numbers = np.arange(self.num_blocks) - _starts(num_blocks)[samples]
        fields = numbers, _starts(token_counts)[samples], token_counts[samples], _starts(num_tiles)[samples], samples
        blocks[: self.num_blocks] = np.stack(fields, axis=1)
        blocks[self.num_blocks :, 3] = self.num_tiles  # the first padding tile, all of whose times are the same
        others = blocks[self.num_blocks : self.num_blocks + len(padding)]
        others[:, 1], others[:, 2] = padding, np.minimum(size, self.round_tokens - padding)
        pairs = np.zeros((self.round_tiles, 2), dtype=np.int32)
        pairs[self.num_tiles :, 0] = self.round_blocks - 1
        queries = np.repeat(np.arange(self.num_blocks), numbers + 1)
        distances = np.arange(self.num_tiles) - np.repeat(_starts(numbers + 1), numbers + 1)
        order = np.argsort(distances, kind="stable")
        pairs[: self.num_tiles] = np.stack([queries[order], distances[order]], axis=1)
        counts = np.bincount(distances, minlength=self.most_blocks + 1)
        starts = np.concatenate([_starts(counts), [self.num_tiles]])
        self._set_lists(_upload_int32([blocks, pairs, starts], times.device))

    @property
    def num_pairs(self) -> int:
        """Number of queries with a key not after them, without padding. A twin has those of its first batch."""
        return int((self._token_counts * (self._token_counts + 1) // 2).sum())

    def _set_lists(self, lists: Tensor) -> None:
        """Sets the three lists, which are slices of one array.

        blocks: [round_blocks, 5], the block's number in its sample; the sample's first token, length, first tile and
        number.
        pairs: [round_tiles, 2], the block of queries, and how many blocks before it the keys are; by rising distance.
        starts: [most_blocks + 2], where the pairs of each distance begin. The last distance has none.
        """
        self._lists = lists
        sizes = [NUM_FIELDS * self.round_blocks, 2 * self.round_tiles, self.most_blocks + 2]
        blocks, pairs, self.starts = lists.split(sizes)
        self.blocks, self.pairs = blocks.view(-1, NUM_FIELDS), pairs.view(-1, 2)

    @cached_property
    def buckets(self) -> Tensor:
        """Bucket of time of each query and key, [round_tiles, size, size] uint8.

        The tiles of a sample are ordered by block of queries, then by block of keys.
        """
        buckets = self._lists.new_empty(self.round_tiles, self.size, self.size, dtype=torch.uint8)
        self._find_buckets(buckets)
        return buckets

    def _find_buckets(self, out: Tensor) -> None:
        from nestpipe.kernels.attention.attention import time_buckets  # imports Triton

        if self.num_tiles > 0:
            assert self._times is not None
            time_buckets(self, self._times, self._bounds, out)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the lists. Tiles of equal sizes differ in the values of their lists only."""
        return self.size, self.max_length, self.round_tokens, self.round_blocks, self.round_tiles

    def padded(self) -> "Tiles":
        """Returns the same tiles for padded tokens: kernels are launched for all blocks and tiles, padding included."""
        whole = copy(self)
        whole.buckets = self.buckets
        whole.num_tokens, whole.num_blocks, whole.num_tiles = self.round_tokens, self.round_blocks, self.round_tiles
        return whole

    def twin(self) -> "Tiles":
        """Returns padded tiles in their own memory, to which other tiles of the same sizes can be copied."""
        twin = self.padded()
        twin._times = None  # frees the upload of the batch, of which it is a view
        twin._set_lists(self._lists.clone())
        twin.buckets = self.buckets.clone()
        return twin

    def copy_to(self, twin: "Tiles") -> None:
        twin._lists.copy_(self._lists)
        self._find_buckets(twin.buckets)


def round_up(number: int) -> int:
    """Rounds up by at most a sixteenth, to one of 16 numbers between a power of two and the next."""
    step = max(1, 1 << max(0, number.bit_length() - 5))
    return -(-number // step) * step


def _starts(counts: Numbers) -> Numbers:
    return np.cumsum(counts) - counts


def _upload_int32(parts: list[NDArray[Any]], device: torch.device) -> Tensor:
    """Returns the parts as one array of int32 on the device."""
    return upload(torch.from_numpy(np.concatenate([part.ravel() for part in parts]).astype(np.int32)), device)
