"""Runs the layers of a model one after another; on CUDA as a graph, to save launches."""

import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from nestpipe.device.graphs import Graph, autocast_while_recording, can_record
from nestpipe.ops.attention import product_dtype
from nestpipe.ops.sequences import Sequences, Tiles

Key = tuple[Any, ...]

MOST_GRAPHS = 16
MOST_SEEN = 256
"""Number of sizes to remember that occurred once."""


class Stack:
    """Calls layers from [num_tokens, dim] and Sequences to [num_tokens, dim].

    Where layers work on tiles, tokens are padded to a round number, so that micro-batches of similar sizes get the same
    size. A size that is trained twice is recorded as a graph, which is replayed from then on. The bits are the same
    either way. A replay only launches kernels: other effects of the layers happen once, in the recording. So layers
    with hooks are not recorded, and non-reentrant checkpointing around the model is not supported.
    """

    def __init__(self) -> None:
        self._seen: dict[Key, None] = {}
        self._graphs: dict[Key, tuple[Graph, Tiles]] = {}
        """Graphs with the tiles they work on."""
        self._pool: Any = None
        self._has_failed = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "Stack":
        return Stack()

    def __reduce__(self) -> tuple[Any, ...]:
        return Stack, ()

    def __call__(self, layers: nn.ModuleList, x: Tensor, sequences: Sequences) -> Tensor:
        size = tile_size(layers, x)
        if size is None or len(x) == 0:
            return run(layers, x, sequences)
        graph = self._graph(layers, x, sequences, size)
        if graph is not None:
            return graph(x)
        tiles = sequences.in_tiles(size).padded()
        padded = F.pad(x, (0, 0, 0, tiles.num_tokens - len(x)))
        return run(layers, padded, sequences.with_tiles(tiles))[: len(x)]

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def _graph(self, layers: nn.ModuleList, x: Tensor, sequences: Sequences, size: int) -> Graph | None:
        if self._has_failed or not (can_record(x) and torch.is_grad_enabled() and x.requires_grad) or x.is_leaf:
            return None
        settings = _settings(layers)
        # Graphs share memory: the backward of one must come before the forward of the next.
        if settings is None or any(graph.is_in_use for graph, _ in self._graphs.values()):
            return None
        tiles = sequences.in_tiles(size)
        key = (*tiles.sizes, x.device, x.dtype, product_dtype(x), *settings)
        if key not in self._graphs and not self._record(key, layers, x, sequences, tiles):
            return None
        graph, twin = self._graphs[key]
        tiles.copy_to(twin)
        return graph

    def _record(self, key: Key, layers: nn.ModuleList, x: Tensor, sequences: Sequences, tiles: Tiles) -> bool:
        """Records a graph if the key was seen before, so that its kernels are compiled and it is likely to recur."""
        if key not in self._seen or len(self._graphs) >= MOST_GRAPHS:
            self._seen[key] = None
            if len(self._seen) > MOST_SEEN:
                del self._seen[next(iter(self._seen))]
            return False
        try:
            self._graphs[key] = self._recorded(layers, x, sequences, tiles)
        except RuntimeError as error:  # out of memory, for example, or a layer that waits for the device
            self._has_failed = True
            warnings.warn(
                f"layers could not be recorded as a graph ({error}); they are launched kernel by kernel from here on, "
                "which is slower and gives the same bits",
                stacklevel=2,
            )
            return False
        return True

    def _recorded(self, layers: nn.ModuleList, x: Tensor, sequences: Sequences, tiles: Tiles) -> tuple[Graph, Tiles]:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        twin = tiles.twin()
        twin_sequences = sequences.with_tiles(twin)
        parameters = {name: p for name, p in layers.named_parameters() if p.requires_grad}

        def run_with(x: Tensor, replacements: list[Tensor]) -> Tensor:
            """Runs the layers with other tensors in place of their parameters."""
            named = dict(zip(parameters, replacements, strict=True))
            for number, layer in enumerate(layers):
                prefix = f"{number}."
                own = {name.removeprefix(prefix): p for name, p in named.items() if name.startswith(prefix)}
                x = functional_call(layer, own, (x, twin_sequences))
            return x

        with autocast_while_recording(x, product_dtype(x)):
            shape = twin.num_tokens, x.shape[1]
            return Graph(run_with, x.new_empty(shape), list(parameters.values()), self._pool), twin


def run(layers: nn.ModuleList, x: Tensor, sequences: Sequences) -> Tensor:
    for layer in layers:
        x = layer(x, sequences)
    return x


def tile_size(layers: nn.ModuleList, x: Tensor) -> int | None:
    """Returns the size of the tiles that all layers work on; None if there is no such size."""
    if torch.compiler.is_compiling():
        return None
    sizes = {_layer_tile_size(layer, x) for layer in layers}
    return sizes.pop() if len(sizes) == 1 else None


def _layer_tile_size(layer: Any, x: Tensor) -> int | None:
    """Returns a layer's tile size; None if the layer does not work on tiles."""
    size: int | None = layer.tile_size(x) if hasattr(layer, "tile_size") else None
    return size


def _settings(layers: nn.ModuleList) -> Key | None:
    """Returns everything that a recording assumes to be constant: modes, modules, parameters, buffers and addresses.

    None if the layers cannot be recorded.
    """
    settings: list[Any] = [torch.backends.cuda.matmul.allow_tf32, torch.are_deterministic_algorithms_enabled()]
    parameter_ids: set[int] = set()
    for module in _modules(layers):
        if not module.training or module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
            return None
        settings += (id(module), getattr(module, "p", None))
        for parameter in module._parameters.values():
            if parameter is None:
                continue
            if id(parameter) in parameter_ids:  # its gradients would be added up in another order
                return None
            parameter_ids.add(id(parameter))
            settings += (id(parameter), parameter.data_ptr(), parameter.requires_grad)
        settings += (buffer.data_ptr() for buffer in module._buffers.values() if buffer is not None)
    return tuple(settings)


def _modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yields what module.modules() does, but repeats shared modules, and takes less time than a launch."""
    yield module
    for child in module._modules.values():
        if child is not None:
            yield from _modules(child)
