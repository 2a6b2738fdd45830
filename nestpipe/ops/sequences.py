"""Jagged sequences of tokens: their places and times, blocks of equal size, and the input layer."""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache, cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from nestpipe.kernels.attention.tiles import Tiles as Tiles
from nestpipe.kernels.dispatch import elements_at_a_time
from nestpipe.kernels.rows.pinned import upload

NUM_TIME_BUCKETS = 129
BLOCK = 64
"""Tokens in a block."""
PAIR_ELEMENTS = 2**18
"""Scores computed at a time in host memory: few enough for a core's cache, enough to be worth a call."""


class Sequences:
    """Jagged sequences: sample s has tokens offsets[s] .. offsets[s + 1] - 1, at most max_length of them."""

    def __init__(self, offsets: Tensor, times: Tensor, lengths: Sequence[int] | None = None) -> None:
        """offsets: [num_samples + 1] int64.
        times: [num_samples, max_length + 1] int64, the time of each token, then of the target; the rest is not read.
        lengths: the samples' lengths if they are known in host memory; otherwise the host waits for the device.
        """
        num_samples = len(offsets) - 1
        if times.dim() != 2 or len(times) != num_samples or times.shape[1] < 2:
            raise ValueError(
                f"times must have a line for each of {num_samples} samples and max_length + 1 columns, "
                f"got {list(times.shape)}"
            )
        if times.is_floating_point():
            raise ValueError(f"times must be integers, got {times.dtype}")
        self.offsets, self.times = offsets, times
        self.max_length = int(times.shape[1]) - 1
        self.lengths: list[int] = offsets.diff().tolist() if lengths is None else list(lengths)
        if len(self.lengths) != num_samples:
            raise ValueError(f"there are {len(self.lengths)} lengths for {num_samples} samples")
        longest = max(self.lengths, default=0)
        if longest > self.max_length:
            raise ValueError(f"a sequence has {longest} tokens; the longest allowed has {self.max_length}")
        self._blocks: dict[int, Blocks] = {}
        self._tiles: dict[int, Tiles] = {}

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @cached_property
    def samples(self) -> Tensor:
        """Sample of each token, [num_tokens]."""
        numbers = torch.arange(len(self.lengths), device=self.offsets.device)
        return torch.repeat_interleave(numbers, self.offsets.diff(), output_size=self.num_tokens)

    @cached_property
    def places(self) -> Tensor:
        """Place of each token in its sample, from 0, [num_tokens]."""
        numbers = torch.arange(self.num_tokens, device=self.offsets.device)
        return numbers - self.offsets.index_select(0, self.samples)

    @cached_property
    def is_last(self) -> Tensor:
        """Flags of the last tokens of their samples, [num_tokens] bool."""
        numbers = torch.arange(self.num_tokens, device=self.offsets.device)
        return numbers + 1 == self.offsets.index_select(0, self.samples + 1)

    def in_blocks(self, size: int) -> "Blocks":
        """Returns the samples cut into blocks of `size` tokens. Layers share one object for each size."""
        if size not in self._blocks:
            self._blocks[size] = Blocks(self, size)
        return self._blocks[size]

    def in_tiles(self, size: int) -> Tiles:
        """Returns the samples cut into tiles for the kernels. Layers share one object for each size."""
        if size not in self._tiles:
            self._tiles[size] = Tiles(self.lengths, self.times, time_bounds(self.times.device), size)
        return self._tiles[size]

    def with_tiles(self, tiles: Tiles) -> "Sequences":
        """Returns the same sequences for layers whose tokens are arranged and padded as these tiles say."""
        sequences = copy(self)
        sequences._tiles = {tiles.size: tiles}
        return sequences


@dataclass(frozen=True)
class Pairs:
    """Blocks of queries and the blocks of keys that lie `distance` blocks before them, all distinct."""

    queries: Tensor
    keys: Tensor
    distance: int


class Blocks:
    """Every sample cut into blocks of `size` slots for tokens. The last block of a sample is padded with zeros.

    Padding comes after all tokens of its sample. So in causal attention no token attends to padding, and what padding
    attends to is never read.
    """

    def __init__(self, sequences: Sequences, size: int) -> None:
        self.size = size
        self.max_length = sequences.max_length
        device = sequences.offsets.device
        num_blocks = [-(-length // size) for length in sequences.lengths]
        self.num_blocks = sum(num_blocks)
        self.most_blocks = max(num_blocks, default=0)
        """Largest number of blocks of a sample."""
        self.samples = torch.tensor([s for s, n in enumerate(num_blocks) for _ in range(n)], dtype=torch.int64)
        """Sample of each block, [num_blocks]."""
        self.numbers = torch.tensor([i for n in num_blocks for i in range(n)], dtype=torch.int64)
        """Number of each block in its sample, [num_blocks]."""
        first = upload(torch.tensor([0, *num_blocks]).cumsum(0)[:-1], device)
        self.slots = first.index_select(0, sequences.samples) * size + sequences.places
        """Slot of each token, [num_tokens]."""
        at = sequences.samples * (sequences.max_length + 1) + sequences.places
        times = sequences.times.flatten()
        self.key_times = self.to_slots(times.index_select(0, at)).view(-1, size)
        # A query knows the time of the next item, which it predicts.
        self.query_times = self.to_slots(times.index_select(0, at + 1)).view(-1, size)

    def to_slots(self, tokens: Tensor) -> Tensor:
        """Returns [num_blocks * size, ...] from [num_tokens, ...]."""
        return tokens.new_zeros(self.num_blocks * self.size, *tokens.shape[1:]).index_copy(0, self.slots, tokens)

    def from_slots(self, slots: Tensor) -> Tensor:
        """Returns [num_tokens, ...] from [num_blocks * size, ...]."""
        return slots.index_select(0, self.slots)

    def by_head(self, tokens: Tensor) -> Tensor:
        """Returns [num_blocks, heads, size, dim] from [num_tokens, heads, dim]."""
        slots = self.to_slots(tokens).view(self.num_blocks, self.size, *tokens.shape[1:])
        return slots.transpose(1, 2).contiguous()

    def from_heads(self, blocks: Tensor) -> Tensor:
        """Returns [num_tokens, heads, dim] from [num_blocks, heads, size, dim]."""
        return self.from_slots(blocks.transpose(1, 2).flatten(0, 1))

    def all_heads(self, tokens: Tensor) -> Tensor:
        """Returns [num_blocks, size, heads * dim] from [num_tokens, heads, dim]."""
        return self.to_slots(tokens).view(self.num_blocks, self.size, tokens.shape[1] * tokens.shape[2])

    def pairs(self, num_heads: int) -> Iterator[Pairs]:
        """Yields all pairs, a few at a time, by rising distance: every query meets near keys first, in any batch."""
        device = self.slots.device
        num_elements = elements_at_a_time(self.slots, PAIR_ELEMENTS)
        at_a_time = max(1, num_elements // (num_heads * self.size**2))
        for distance in range(self.most_blocks):
            for queries in upload((self.numbers >= distance).nonzero().flatten(), device).split(at_a_time):
                yield Pairs(queries, queries - distance, distance)

    def position_index(self, distance: int) -> Tensor:
        """Returns [size, size], the index into w_pos of each query and key of a pair of blocks."""
        places = torch.arange(self.size, device=self.slots.device)
        index = self.max_length - 1 - distance * self.size + places - places[:, None]
        return index.clamp_(0, 2 * self.max_length - 2)  # outside: a key after its query, or padding

    def time_buckets(self, pairs: Pairs) -> Tensor:
        """Returns [pairs, size, size], the index into w_ts."""
        query_times, key_times = self.query_times[pairs.queries], self.key_times[pairs.keys]
        return time_buckets(query_times[:, :, None] - key_times[:, None, :])


def time_buckets(differences: Tensor) -> Tensor:
    """Returns min(trunc(ln(max(|difference|, 1)) / 0.301), 128), the same on every device for differences up to 10^12.

    This takes double precision: in single precision a number next to a bound may fall on either side of it.
    """
    logarithms = differences.abs().clamp_(min=1).double().log_()
    return logarithms.div_(0.301).clamp_(max=NUM_TIME_BUCKETS - 1).to(torch.int64)


@cache
def time_bounds(device: torch.device) -> Tensor:
    """Returns [128] int64, the smallest difference in each bucket from 1 on.

    The number of bounds up to a difference is therefore its bucket, exactly and on every device.
    """
    buckets = torch.arange(1, NUM_TIME_BUCKETS)
    below, bounds = torch.zeros_like(buckets), torch.full_like(buckets, 2**62)
    while bool((bounds - below > 1).any()):
        middle = (below + bounds) // 2
        is_in = time_buckets(middle) >= buckets
        below, bounds = torch.where(is_in, below, middle), torch.where(is_in, middle, bounds)
    return bounds.to(device)


def add_positions(
    values: Tensor, positions: Tensor, sequences: Sequences, scale: float, tile_size: int | None
) -> Tensor:
    """Returns [num_tokens, dim]: scale * values[i] + positions[place of token i]. tile_size is None without kernels."""
    if tile_size is None or not values.dtype == positions.dtype == torch.float32:
        return scale * values + F.embedding(sequences.places, positions)
    from nestpipe.kernels.layers.positions import add_positions_kernel  # imports Triton

    return add_positions_kernel(values, positions, sequences.in_tiles(tile_size), scale)
