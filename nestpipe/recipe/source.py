"""Sources: the data that a recipe names in data.kind."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

from nestpipe.data.dataset import Dataset
from nestpipe.embedding.table import Feature, Pooled, Sequence, Table
from nestpipe.recipe.config import Config, TableSection
from nestpipe.recipe.value import ConfigError

ITEM_TABLE = "item"


class HeldOut(NamedTuple):
    """Samples to evaluate on."""

    dataset: Dataset
    position: int = 0
    """Position of the first sample of the evaluation."""


class Source(ABC):
    """Data that a recipe can name: samples to train and to evaluate on, and the tables that their keys need.

    A source of your own derives from ClickSource, HistorySource or this class, is built with the recipe's Config, and
    finds its own settings in config.data.args.
    """

    samples: ClassVar[str]
    """Kind of samples, "clicks" or "histories"; a model's `learns_from` names one of them."""
    metrics: ClassVar[tuple[str, ...]] = ()
    """Default of evaluate.metrics."""
    own_keys: ClassVar[tuple[str, ...]] = ()
    """Keys of `file_keys` that this source reads; the others must not be set."""
    split: str | None = None
    """Name of the held-out split; None if the data has no named splits."""
    num_workers: ClassVar[int] = 0
    """Default of data.num_workers on an accelerator: processes for data whose reading holds Python's lock for long."""
    num_dense: int = 0
    """Width of the input "dense"."""
    num_items: int | None = None
    """Number of items that a model ranks, 0 .. num_items - 1; None if there is no corpus."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._check_keys()

    @abstractmethod
    def training(self) -> Dataset:
        """Returns the samples to train on."""

    @abstractmethod
    def held_out(self, num_samples: int) -> HeldOut | None:
        """Returns samples to evaluate on, at most num_samples; None if there are none."""

    @abstractmethod
    def tables(self) -> dict[str, TableSection]:
        """Returns the tables by name, with their defaults; [[tables]] of the recipe changes them."""

    @abstractmethod
    def features(self, tables: Mapping[str, Table]) -> dict[str, Feature]:
        """Returns the features of a batch by name."""

    def _check_keys(self) -> None:
        for key, value in file_keys(self.config).items():
            if value and key not in self.own_keys:
                raise ConfigError(_misplaced(key, self.config.data.kind))


def file_keys(config: Config) -> dict[str, object]:
    """Returns the keys that only data in files reads."""
    data = config.data
    paths = {"data.path": data.path, "data.paths": data.paths, "data.held_out": data.held_out}
    return {**paths, "schema.keys": config.schema.keys}


def _misplaced(key: str, kind: str) -> str:
    if key == "data.path":
        return f"data.path is set, but data.kind = {kind!r} is not prepared data; leave out one of them"
    return f"{key} is set, but data.kind is {kind!r}; it needs data.kind = 'parquet'"


class ClickSource(Source):
    """Clicks: each sample has keys, dense inputs and a label. Each feature has a table of its name and is pooled."""

    samples = "clicks"
    metrics = ("clicks",)

    @abstractmethod
    def feature_names(self) -> tuple[str, ...]: ...

    def tables(self) -> dict[str, TableSection]:
        return {name: TableSection(name) for name in self.feature_names()}

    def features(self, tables: Mapping[str, Table]) -> dict[str, Feature]:
        return {name: Pooled(table) for name, table in tables.items()}


class HistorySource(Source):
    """Histories: each sample has a user's items, a next item and negatives, sequences that share one table."""

    samples = "histories"
    metrics = ("ranking",)
    has_known_items: ClassVar[bool] = True
    """True if every key is below num_items, so that the table can refuse others."""

    def tables(self) -> dict[str, TableSection]:
        num_keys = self.num_items if self.has_known_items else None
        return {ITEM_TABLE: TableSection(ITEM_TABLE, init="truncated_normal", num_keys=num_keys)}

    def features(self, tables: Mapping[str, Table]) -> dict[str, Feature]:
        table = tables[ITEM_TABLE]
        # With negatives for each position, the loss reads a few rows at a time: all of them would not fit into memory.
        by_index = self.config.model.negatives_per == "position"
        items = {name: Sequence(table, by_index=by_index) for name in ("target", "negatives")}
        return {"history": Sequence(table), **items}
