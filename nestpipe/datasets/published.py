"""Published data sets: each registers itself, in its own file, under the names that its variants have in recipes."""

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from nestpipe import datasets as folder
from nestpipe import registry
from nestpipe.data.files.manifest import Kind
from nestpipe.datasets.work import Prepared, PublishedFiles, Work


@dataclass(frozen=True)
class Published:
    """A published data set: how its files are found and prepared, and how files like them are generated.

    The docstring of an object is its own `summary`, which the registry shows.
    """

    name: str
    """Name of the format in `nestpipe data prepare NAME`. In a recipe, data.kind is NAME-VARIANT."""
    variants: tuple[str, ...]
    """The first one is the default of `nestpipe data generate`."""
    samples: Kind
    summary: str
    find: Callable[[Path], PublishedFiles]
    """Finds the files in a folder."""
    prepare: Callable[[Work], Prepared]
    write: Callable[[Path, int, int, str], list[Path]]
    """Writes generated files, given folder, number of rows, seed and variant; returns their paths."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "__doc__", self.summary)

    @property
    def recipe_names(self) -> tuple[str, ...]:
        return tuple(f"{self.name}-{variant}" for variant in self.variants)


_formats: dict[str, Published] = {}


def register(published: Published) -> Published:
    """Makes a data set known to `nestpipe data` and, under the names of its variants, to recipes."""
    registry.datasets.register(*published.recipe_names)(published)
    _formats[published.name] = published
    return published


def published_formats() -> dict[str, Published]:
    """Returns the published data sets by name, in alphabetical order, after importing the modules of this folder."""
    for module in pkgutil.iter_modules(folder.__path__):
        import_module(f"{folder.__name__}.{module.name}")
    return dict(sorted(_formats.items()))


def find_format(name: str) -> Published:
    formats = published_formats()
    if name not in formats:
        raise ValueError(f"there is no format {name!r}; formats are {', '.join(formats)}")
    return formats[name]
