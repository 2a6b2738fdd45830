"""The input layer of models of histories: each token's value, scaled, and the row of its place in its sample."""

import torch
import torch.nn.functional as F
from torch import Tensor

from nestpipe.ops.sequences import Sequences


def add_positions(
    values: Tensor, positions: Tensor, sequences: Sequences, scale: float, tile_size: int | None
) -> Tensor:
    """[num_tokens, dim]: scale * values[i] + positions[place of token i]. tile_size: None where no kernels run."""
    if tile_size is None or not values.dtype == positions.dtype == torch.float32:
        return scale * values + F.embedding(sequences.places, positions)
    from nestpipe.kernels.layers.positions import add_positions_kernel  # imports Triton

    return add_positions_kernel(values, positions, sequences.in_tiles(tile_size), scale)
