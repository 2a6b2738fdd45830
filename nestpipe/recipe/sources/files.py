"""Samples in files: a user's Parquet or Arrow files, and folders that `nestpipe data prepare` wrote."""

from typing import Any

from nestpipe.data.dataset import Dataset, FirstSamples
from nestpipe.data.files.parquet import ParquetData
from nestpipe.data.files.prepared import CLICK_FEATURES, NUM_DENSE, Prepared, read_prepared
from nestpipe.data.files.schema import Schema
from nestpipe.data.negatives import Negatives
from nestpipe.datasets.published import Published
from nestpipe.recipe.config import Config
from nestpipe.recipe.source import ClickSource, HeldOut, HistorySource, Source
from nestpipe.recipe.value import ConfigError
from nestpipe.registry import datasets


@datasets.register("parquet")
class ParquetSource(ClickSource):
    """Clicks in Parquet or Arrow files of your own; [schema] names their columns."""

    own_keys = ("data.paths", "data.held_out", "schema.keys")

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        needed = {
            "data.paths": config.data.paths,
            "schema.keys": config.schema.keys,
            "schema.dense": config.schema.dense,
        }
        for key, value in needed.items():
            if not value:
                raise ConfigError(f"data.kind = 'parquet' needs {key}, a list of at least one")
        self.num_dense = len(config.schema.dense)

    def training(self) -> Dataset:
        return _first(ParquetData(self.config.data.paths, self._schema(), **training_options(self.config)), self.config)

    def held_out(self, num_samples: int) -> HeldOut | None:
        paths = self.config.data.held_out
        if not paths or num_samples == 0:
            return None
        dataset = ParquetData(paths, self._schema(), **held_out_options(self.config))
        return HeldOut(FirstSamples(dataset, num_samples))

    def feature_names(self) -> tuple[str, ...]:
        return self.config.schema.keys

    def _schema(self) -> Schema:
        section = self.config.schema
        num_keys = {
            table.name: table.num_keys
            for table in self.config.tables
            if table.num_keys is not None and table.name in section.keys
        }
        return Schema(section.keys, {"dense": section.dense}, {"click": section.label}, section.weight, num_keys)


class PreparedClicks(ClickSource):
    """Clicks of a prepared folder."""

    own_keys = ("data.path",)
    num_dense = NUM_DENSE

    def __init__(self, config: Config, published: Published) -> None:
        super().__init__(config)
        self.split = config.evaluate.split or "validation"
        self._prepared = open_prepared(config, published)

    def training(self) -> Dataset:
        return _first(self._prepared.clicks("train", **training_options(self.config)), self.config)

    def held_out(self, num_samples: int) -> HeldOut | None:
        if num_samples == 0:
            return None
        assert self.split is not None
        dataset = self._prepared.clicks(self.split, **held_out_options(self.config))
        return HeldOut(FirstSamples(dataset, num_samples))

    def feature_names(self) -> tuple[str, ...]:
        return CLICK_FEATURES


class PreparedHistories(HistorySource):
    """Histories of a prepared folder. The test split is for runs in which no evaluation chooses the model."""

    own_keys = ("data.path",)

    def __init__(self, config: Config, published: Published) -> None:
        super().__init__(config)
        self.split = config.evaluate.split or ("validation" if config.chooses else "test")
        self._prepared = open_prepared(config, published)
        self.num_items = self._prepared.num_items
        model = config.model
        self._negatives = Negatives(self.num_items, model.num_negatives, model.negatives_per, config.data.seed)

    def training(self) -> Dataset:
        config = self.config
        length, crop = config.model.max_length, config.data.crop
        histories = self._prepared.histories("train", length, crop, self._negatives, **training_options(config))
        return _first(histories, config)

    def held_out(self, num_samples: int) -> HeldOut | None:
        if num_samples == 0:
            return None
        assert self.split is not None
        options, length = held_out_options(self.config), self.config.model.max_length
        dataset = self._prepared.histories(self.split, length, negatives=self._negatives, **options)
        return HeldOut(FirstSamples(dataset, num_samples))


def prepared_source(config: Config, published: Published) -> Source:
    return (PreparedHistories if published.samples == "histories" else PreparedClicks)(config, published)


def open_prepared(config: Config, published: Published) -> Prepared:
    data = config.data
    if data.path is None:
        raise ConfigError(
            f"data.kind = {data.kind!r} needs prepared data: `nestpipe data prepare {published.name} SRC DST`, then "
            "--set data.path=DST"
        )
    prepared = read_prepared(data.path)
    manifest = prepared.manifest
    if manifest.source != data.kind:
        raise ConfigError(
            f"data.kind is {data.kind!r}, but {data.path} was prepared from {manifest.source!r}; --set "
            f"data.kind={manifest.source}, or give another data.path"
        )
    if manifest.kind != published.samples:
        raise ConfigError(
            f"{data.path} has {manifest.kind}, but {data.kind} must be {published.samples}; prepare it again"
        )
    return prepared


def training_options(config: Config) -> dict[str, Any]:
    data = config.data
    return {**_options(config), "seed": data.seed, "window": data.window, "num_epochs": data.num_epochs}


def held_out_options(config: Config) -> dict[str, Any]:
    """Returns options to read files once, in their order."""
    return {**_options(config), "shuffle": False, "window": 1, "num_epochs": 1}


def _options(config: Config) -> dict[str, Any]:
    return {"num_threads": config.data.num_threads, "skip_bad": config.data.skip_bad}


def _first(dataset: Dataset, config: Config) -> Dataset:
    num_samples = config.data.num_samples
    return dataset if num_samples is None else FirstSamples(dataset, num_samples)
