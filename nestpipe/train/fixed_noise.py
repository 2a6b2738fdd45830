"""Removes randomness from forward passes, so that their results can be compared."""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nestpipe.device.generators import forked_generators, seed_generators

Values = Mapping[str, Any]
"""Arguments of an operation by name, defaults included."""


def _bernoulli(values: Values) -> Any:
    return torch.as_tensor(values["p"] if "p" in values else values["self"]) > 0


# Each value is one that could be drawn, and none is zero: a zero would hide what the model multiplies with it.
FIXED: dict[str, Callable[[Values], Any]] = {
    "bernoulli": _bernoulli,
    "rand": lambda values: 0.5,
    "rand_like": lambda values: 0.5,
    "randn": lambda values: 1.0,
    "randn_like": lambda values: 1.0,
    "uniform": lambda values: (values["from"] + values["to"]) / 2,
    "normal": lambda values: values["mean"] + values["std"],
    "exponential": lambda values: 1.0 / values["lambd"],
}
"""Operation -> the value that replaces what it draws. In-place operations, with a trailing underscore, share it."""

OFF = {"dropout": 0.0, "dropout_p": 0.0, "training": False}
"""Arguments that switch off the randomness of attention, recurrent layers and randomised activations."""

LEFT_ALONE = ("_fused_sdp_choice", "_cudnn_init_dropout_state")
"""Operations that take a dropout probability but draw nothing that reaches the result of this forward."""


class FixedNoise(TorchDispatchMode):
    """Replaces every random draw of a forward by one value for all samples. Dropout of any kind keeps everything.

    It works below autograd and modules, so it catches every dropout: of a module, a function, a fused attention or
    recurrent kernel. Operations without such a value (a random permutation, for example) draw as usual, and `drawn`
    names them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawn: set[str] = set()
        self._generators: dict[torch.Generator, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        if name in LEFT_ALONE:
            return func(*args, **kwargs)
        values = _by_name(func, args, kwargs)
        if OFF.keys() & values.keys():
            return func(*_without_noise(func, args), **{name: OFF.get(name, value) for name, value in kwargs.items()})
        if name in ("native_dropout", "_fused_dropout"):
            kept = args[0].clone()
            return kept, torch.ones_like(kept, dtype=torch.bool)
        self._remember(values.get("generator"))
        drawn = func(*args, **kwargs)
        fixed = FIXED.get(name.removesuffix("_"))
        if fixed is None:
            self.drawn.add(name)
            return drawn
        return drawn.copy_(torch.as_tensor(fixed(values)))

    def restore_generators(self) -> None:
        """Restores the state of the model's own generators."""
        for generator, state in self._generators.items():
            generator.set_state(state)

    def _remember(self, generator: torch.Generator | None) -> None:
        if generator is not None and generator not in self._generators:
            self._generators[generator] = generator.get_state()


def _by_name(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    arguments = func._schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)}
    return {**given, **{name: value for name, value in defaults.items() if name not in given}, **kwargs}


def _without_noise(func: Any, args: tuple[Any, ...]) -> list[Any]:
    names = [argument.name for argument in func._schema.arguments]
    return [OFF.get(name, value) for name, value in zip(names, args, strict=False)]


@contextmanager
def fixed_noise(device: torch.device) -> Iterator[FixedNoise]:
    """Wraps the forwards to compare. Restores every generator afterwards."""
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    noise = FixedNoise()
    # cuDNN keeps the random state of its recurrent layers for the life of the process, where it cannot be restored.
    try:
        with forked_generators(device), torch.backends.cudnn.flags(enabled=False):
            yield noise
    finally:
        noise.restore_generators()
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)


def seed_alike(device: torch.device) -> None:
    """Seeds all default generators. Call it before each forward, so that all make the same random choices."""
    random.seed(0)
    numpy.random.seed(0)
    seed_generators(device, 0)
