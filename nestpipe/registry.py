"""Registries: the models, data sets, row optimizers and metrics that a recipe can name.

An entry registers itself where it is defined, with a decorator:

    @models.register("dlrm")
    class DLRM(nn.Module): ...

A package of your own registers entries by entry points of the same names, in its pyproject.toml:

    [project.entry-points."nestpipe.models"]
    two-tower = "my_package.towers:TwoTower"

Without any registration a recipe names an entry by its place: "my_package.towers:TwoTower".
"""

import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from inspect import getdoc
from typing import Any, TypeVar

T = TypeVar("T")


class RegistryError(ValueError):
    """There is no entry of a name, or it cannot be imported."""


@dataclass(frozen=True)
class Entry:
    """A name and what it stands for."""

    name: str
    value: Any
    is_shipped: bool
    """True if it is a part of nestpipe."""

    @property
    def summary(self) -> str:
        """Returns the first sentence of the value's docstring."""
        text = (getdoc(self.value) or "").split("\n\n")[0].replace("\n", " ")
        return text.split(". ")[0].rstrip(".")


class Registry:
    """Entries of one kind by name. Modules and packages are imported when a name is first looked up, not before."""

    def __init__(self, kind: str, plural: str, *folders: str) -> None:
        """folders: modules of nestpipe in which entries register. For a package, all its modules are imported."""
        self.kind = kind
        self.plural = plural
        self._unread = list(folders)
        self._entries: dict[str, Entry] = {}

    def register(self, *names: str) -> Callable[[T], T]:
        """Returns a decorator that registers a class, a function or any other object by these names."""

        def add(value: T) -> T:
            for name in names:
                if name in self._entries:
                    raise RegistryError(
                        f"two {self.plural} are called {name!r}: {self._entries[name].value} and {value}"
                    )
                self._entries[name] = Entry(name, value, is_shipped=True)
            return value

        return add

    def names(self) -> tuple[str, ...]:
        """Returns all names: ours in the order of registration, then those of other packages."""
        self._read_all()
        return (*self._entries, *(name for name in self._entry_points() if name not in self._entries))

    def entries(self) -> Iterator[Entry]:
        for name in self.names():
            yield self.find(name)

    def find(self, name: str) -> Entry:
        """Returns the entry of a name, or of a place such as "package.module:Class"."""
        while name not in self._entries and self._unread:
            self._read(self._unread.pop(0))
        if name in self._entries:
            return self._entries[name]
        point = self._entry_points().get(name)
        if point is None and ":" in name:
            point = EntryPoint(name, name, self._group)
        if point is None:
            raise RegistryError(
                f"there is no {self.kind} {name!r}; there are {', '.join(self.names())}, or give the place of one of "
                f"your own, as in 'package.module:Class'"
            )
        return Entry(name, self._load(point), is_shipped=False)

    def holds(self, value: object) -> bool:
        """Returns whether a value is registered by nestpipe itself."""
        self._read_all()
        return any(entry.value is value for entry in self._entries.values())

    def _load(self, point: EntryPoint) -> Any:
        try:
            return point.load()
        except Exception as error:  # a module of the user's may raise anything
            text = f"{type(error).__name__}: {error}"
            raise RegistryError(
                f"the {self.kind} {point.name!r} cannot be imported from {point.value}: {text}"
            ) from error

    @property
    def _group(self) -> str:
        return f"nestpipe.{self.plural}"

    def _entry_points(self) -> dict[str, EntryPoint]:
        points: dict[str, EntryPoint] = {}
        for point in entry_points(group=self._group):
            if point.name in points and point.value != points[point.name].value:
                places = f"{points[point.name].value} and {point.value}"
                raise RegistryError(f"two installed packages have a {self.kind} {point.name!r}: {places}")
            points[point.name] = point
        return points

    def _read_all(self) -> None:
        while self._unread:
            self._read(self._unread.pop(0))

    def _read(self, folder: str) -> None:
        module = import_module(folder)
        for info in pkgutil.iter_modules(getattr(module, "__path__", [])):
            import_module(f"{folder}.{info.name}")


models = Registry("model", "models", "nestpipe.models")
datasets = Registry("data set", "datasets", "nestpipe.recipe.sources", "nestpipe.datasets")
optimizers = Registry("row optimizer", "optimizers", "nestpipe.embedding.optim")
metrics = Registry("metric", "metrics", "nestpipe.evaluation")
