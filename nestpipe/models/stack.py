"""The layers of a model, one after another; on a device in the fewest launches."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from nestpipe.device.graphs import Graph
from nestpipe.ops.attention import product_dtype
from nestpipe.ops.sequences import Sequences

MOST_GRAPHS = 16


class Stack:
    """Layers that take and give ([num_tokens, dim], Sequences).

    Where they work on tiles, tokens are filled up to a round number, so that micro-batches of about the same size are
    of the same; and what is trained twice in one size is recorded as a graph, which is replayed from then on. The bits
    are the same either way.
    """

    def __init__(self, layers: nn.ModuleList) -> None:
        self._layers = layers
        self._graphs: dict[tuple[Any, ...], tuple[Graph, Any] | None] = {}
        """with its tiles; None: seen once"""
        self._pool: Any = None
        self._parameters: list[tuple[dict[str, Any], str, str, nn.Parameter]] = []
        """those that are trained: where each is, its name there and as the layers' state has it"""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Stack":
        return Stack(deepcopy(self._layers, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return Stack, (self._layers,)

    def __call__(self, x: Tensor, sequences: Sequences) -> Tensor:
        size = self.tile_size(x)
        if size is None or len(x) == 0:
            return self._run(x, sequences)
        graph = self._graph(x, sequences, size)
        if graph is not None:
            return graph(x)
        tiles = sequences.in_tiles(size).filled_up()
        filled_up = F.pad(x, (0, 0, 0, tiles.num_tokens - len(x)))
        return self._run(filled_up, sequences.with_tiles(tiles))[: len(x)]

    def _run(self, x: Tensor, sequences: Sequences) -> Tensor:
        for layer in self._layers:
            x = layer(x, sequences)
        return x

    def _run_with(self, parameters: dict[str, Tensor], x: Tensor, sequences: Sequences) -> Tensor:
        """The same with these in place of the layers' own, by name."""
        for number, layer in enumerate(self._layers):
            prefix = f"{number}."
            own = {name.removeprefix(prefix): p for name, p in parameters.items() if name.startswith(prefix)}
            x = functional_call(layer, own, (x, sequences))
        return x

    def tile_size(self, x: Tensor) -> int | None:
        """None: layers do not work on tiles, or not all on the same."""
        if torch.compiler.is_compiling():
            return None
        sizes = {_tile_size(layer, x) for layer in self._layers}
        return sizes.pop() if len(sizes) == 1 else None

    def _graph(self, x: Tensor, sequences: Sequences, size: int) -> Graph | None:
        if not (x.is_cuda and torch.is_grad_enabled() and self._layers.training):
            return None
        parameters = self._trained()
        tiles, dtype = sequences.in_tiles(size), product_dtype(x)
        key = (*tiles.sizes, x.device, x.dtype, dtype, *(parameter.data_ptr() for parameter in parameters.values()))
        if key not in self._graphs:
            if len(self._graphs) < MOST_GRAPHS:
                self._graphs[key] = None
            return None
        if self._graphs[key] is None:
            self._graphs[key] = self._recorded(x, sequences, size, parameters)
        found = self._graphs[key]
        if found is None or found[0].is_in_use:
            return None
        graph, twin = found
        tiles.copy_to(twin)
        return graph

    def _trained(self) -> dict[str, nn.Parameter]:
        """Without going through all modules each time, which takes as long as ten launches."""
        if not self._parameters or any(
            there.get(name) is not parameter or not parameter.requires_grad
            for there, name, _, parameter in self._parameters
        ):
            self._parameters = [
                (module._parameters, name, f"{path}.{name}", parameter)
                for path, module in self._layers.named_modules()
                for name, parameter in module._parameters.items()
                if parameter is not None and parameter.requires_grad
            ]
        return {path: parameter for *_, path, parameter in self._parameters}

    def _recorded(
        self, x: Tensor, sequences: Sequences, size: int, parameters: Mapping[str, Tensor]
    ) -> tuple[Graph, Any]:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        twin = sequences.in_tiles(size).twin()
        of_twin = sequences.with_tiles(twin)
        memory = x.new_empty(twin.num_tokens, x.shape[1])

        def run(x: Tensor, leaves: list[Tensor]) -> Tensor:
            return self._run_with(dict(zip(parameters, leaves, strict=True)), x, of_twin)

        kind = x.device.type
        # What autocast keeps of the parameters would be that of the recording for ever.
        with torch.autocast(kind, product_dtype(x), torch.is_autocast_enabled(kind), cache_enabled=False):
            return Graph(run, memory, list(parameters.values()), self._pool), twin


def _tile_size(layer: Any, x: Tensor) -> int | None:
    """A layer that says nothing of tiles does not work on them."""
    size: int | None = layer.tile_size(x) if hasattr(layer, "tile_size") else None
    return size
