"""A function and its backward, recorded once and replayed: hundreds of launches at the cost of one."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nestpipe.device.streams import Streams

_streams: dict[torch.device, Streams] = {}


def can_record(x: Tensor) -> bool:
    """Says whether a function of x can be recorded: only CUDA has graphs here."""
    return x.is_cuda


def autocast_while_recording(x: Tensor, products: torch.dtype) -> torch.autocast:
    """Autocast of operations on x as it is now, with products of this dtype, but without its cache: what it keeps of
    the parameters would be that of the recording for ever."""
    kind = x.device.type
    return torch.autocast(kind, products, torch.is_autocast_enabled(kind), cache_enabled=False)


class _Use:
    """Of a graph's memory, from a forward until its backward, or until nobody can call that any more."""


class Graph:
    """Of a function of x, the same shape each time, and of parameters, which stay where they are.

    What it works on lies in memory of its own, that of its last replay, and so do its output and the gradient of x: who
    keeps them beyond the backward sees them change. So it has one user at a time.
    """

    def __init__(
        self, function: Callable[[Tensor, list[Tensor]], Tensor], x: Tensor, parameters: Sequence[Tensor], pool: Any
    ) -> None:
        """The function must have been called for this shape before: nothing can be compiled or loaded while it is
        recorded. Graphs of one pool share memory; each one's backward must come before the next one's forward."""
        self.parameters = parameters
        self._x = torch.zeros_like(x).requires_grad_()
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # Other threads go on with what they do. The random numbers drawn by what is recorded are drawn by no one.
        options = {"pool": pool, "stream": _recording(x.device), "capture_error_mode": "thread_local"}
        state = torch.cuda.get_rng_state(x.device)
        try:
            with torch.cuda.device(x.device), torch.enable_grad(), torch.cuda.graph(self._forward, **options):
                # The parameters themselves may be tied to another stream, by hooks and by graphs that are still alive.
                leaves = [parameter.detach().requires_grad_() for parameter in parameters]
                out = function(self._x, leaves)
            self._gradient = torch.zeros_like(out)
            with (  # as a training's backward, which is outside of autocast
                torch.cuda.device(x.device),
                torch.autocast(x.device.type, enabled=False),
                torch.cuda.graph(self._backward, **options),
            ):
                self._gradients = torch.autograd.grad(out, (self._x, *leaves), self._gradient, allow_unused=True)
        finally:
            torch.cuda.set_rng_state(state, x.device)
        self._out = out.detach()
        self._use: weakref.ref[_Use] | None = None

    @property
    def is_in_use(self) -> bool:
        return self._use is not None and self._use() is not None

    def __call__(self, x: Tensor) -> Tensor:
        """Of as many lines of x as there are; the rest are zeros."""
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
                "backward was called twice for one forward of a graph, which keeps what it needs for the first one only"
            )
        _fill(self._gradient, gradient)
        self._backward.replay()
        self._use = None
        of_x, *of_parameters = self._gradients
        return None if of_x is None else of_x[: len(gradient)], *of_parameters


def _recording(device: torch.device) -> torch.cuda.Stream:
    """A stream that no lane has: what a lane enqueues meanwhile must not be recorded."""
    if device not in _streams:
        _streams[device] = Streams(device, is_exclusive=True)
    found = _streams[device].stream("recording")
    return torch.cuda.Stream(stream_id=found.stream_id, device_index=found.device_index, device_type=found.device_type)


def _fill(memory: Tensor, lines: Tensor) -> None:
    memory[: len(lines)].copy_(lines)
    if len(lines) < len(memory):
        memory[len(lines) :].zero_()


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: Graph, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.graph, ctx.use = graph, _Use()
        return graph.forward(x, ctx.use)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.graph.backward(gradient, ctx.use)
