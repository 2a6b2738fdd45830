"""CUDA graphs of a function and its backward: hundreds of launches at the cost of one."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nestpipe.device.streams import Streams

_streams: dict[torch.device, Streams] = {}


def can_record(x: Tensor) -> bool:
    """Returns whether a function of x can be recorded. Only CUDA has graphs."""
    return x.is_cuda


def autocast_while_recording(x: Tensor, products: torch.dtype) -> torch.autocast:
    """Returns the current autocast of x's device, with products of this dtype, but without its cache.

    The graph would otherwise replay with the casts of the parameters that were cached while it was recorded.
    """
    kind = x.device.type
    return torch.autocast(kind, products, torch.is_autocast_enabled(kind), cache_enabled=False)


class _Use:
    """Marks a graph's memory as used, from a forward until its backward has run or can no longer be called."""


class Graph:
    """A recorded function of x and of parameters, with its backward.

    x has at most as many rows as in the recording, and the parameters stay where they are. The graph owns the memory it
    works on. Its output and the gradient of x are views of that memory, which the next replay overwrites. So a graph
    has one user at a time.
    """

    def __init__(
        self, function: Callable[[Tensor, list[Tensor]], Tensor], x: Tensor, parameters: Sequence[Tensor], pool: Any
    ) -> None:
        """Records `function`, which must have run with this shape before: nothing may be compiled during a recording.

        Graphs of one pool share memory, so the backward of one must come before the forward of the next.
        """
        self.parameters = parameters
        self._x = torch.zeros_like(x).requires_grad_()
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # "thread_local" lets other threads go on. The generator is restored: a recording advances it but draws nothing.
        options = {"pool": pool, "stream": _recording(x.device), "capture_error_mode": "thread_local"}
        state = torch.cuda.get_rng_state(x.device)
        try:
            with torch.cuda.device(x.device), torch.enable_grad(), torch.cuda.graph(self._forward, **options):
                # The parameters themselves may be tied to another stream, by hooks or by live autograd graphs.
                detached = [parameter.detach().requires_grad_() for parameter in parameters]
                out = function(self._x, detached)
            self._gradient = torch.zeros_like(out)
            with (  # a training's backward runs outside of autocast
                torch.cuda.device(x.device),
                torch.autocast(x.device.type, enabled=False),
                torch.cuda.graph(self._backward, **options),
            ):
                self._gradients = torch.autograd.grad(out, (self._x, *detached), self._gradient, allow_unused=True)
        finally:
            torch.cuda.set_rng_state(state, x.device)
        self._out = out.detach()
        self._use: weakref.ref[_Use] | None = None

    @property
    def is_in_use(self) -> bool:
        return self._use is not None and self._use() is not None

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the function of x, which may have fewer rows than the recording; the others are zeros."""
        out: Tensor = _Replayed.apply(self, x, *self.parameters)  # type: ignore[no-untyped-call]
        return out

    def forward(self, x: Tensor, use: _Use) -> Tensor:
        self._use = weakref.ref(use)
        _fill(self._x.detach(), x)
        self._forward.replay()
        return self._out[: len(x)]

    def backward(self, gradient: Tensor, use: _Use) -> tuple[Tensor | None, ...]:
        if self._use is None or self._use() is not use:
            raise RuntimeError(
                "backward was called twice for one forward of a graph, which keeps what it needs for the first only; "
                "call the model again before the second one"
            )
        _fill(self._gradient, gradient)
        self._backward.replay()
        self._use = None
        d_x, *d_parameters = self._gradients
        return None if d_x is None else d_x[: len(gradient)], *d_parameters


def _recording(device: torch.device) -> torch.cuda.Stream:
    """Returns a stream that no lane uses: what a lane enqueues during a recording must not become part of it."""
    if device not in _streams:
        _streams[device] = Streams(device, is_exclusive=True)
    stream = _streams[device].stream("recording")
    return torch.cuda.Stream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )


def _fill(memory: Tensor, rows: Tensor) -> None:
    memory[: len(rows)].copy_(rows)
    if len(rows) < len(memory):
        memory[len(rows) :].zero_()


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: Graph, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.graph, ctx.use = graph, _Use()
        return graph.forward(x, ctx.use)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.graph.backward(gradient, ctx.use)
