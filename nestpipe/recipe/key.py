"""Keys of a recipe: how a field of a section is declared."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from nestpipe.registry import Registry

T = TypeVar("T")


@dataclass(frozen=True)
class Key:
    """The meaning of a key of a recipe, and the values that it takes. Limits of a list hold for its elements."""

    meaning: str
    choices: tuple[str, ...] = ()
    registry: Registry | None = None
    """A value names an entry of it, or the place of one: "package.module:Class\"."""
    option: str | None = None
    """Field of PipelineOptions that the key sets."""
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None


def key(default: T, meaning: str, **allowed: Any) -> T:
    """Declares a field of a section. Reading, checking and describing a recipe all follow this declaration."""
    return field(default=default, metadata={"key": Key(meaning, **allowed)})


def args_key(meaning: str) -> Mapping[str, Any]:
    """Declares a section of a section: keys and values of the user's own, as in [model.args]."""
    return field(default_factory=dict, metadata={"key": Key(meaning)})
