"""From a recipe to data in files: prepared folders, and Parquet or Arrow files of the user's own."""

from typing import Any

from nestpipe.data.dataset import Dataset, FirstSamples
from nestpipe.data.files.parquet import ParquetData, Skipped
from nestpipe.data.files.prepared import Prepared, read_prepared
from nestpipe.data.files.schema import Schema
from nestpipe.data.files.user_histories import UserHistories
from nestpipe.data.negatives import Negatives
from nestpipe.recipe.config import PREPARED, PREPARED_CLICKS, PREPARED_HISTORIES, Config
from nestpipe.recipe.value import ConfigError


def is_in_files(config: Config) -> bool:
    return config.data.kind == "parquet" or config.data.kind in PREPARED


def check_files(config: Config) -> None:
    """What the recipe says of files must fit together; they are not opened."""
    data = config.data
    if data.kind in PREPARED:
        prepared(config)
    elif data.path is not None:
        raise ConfigError(
            f"data.path is set, but data.kind = {data.kind!r} is not prepared data; leave out one of them"
        )
    if data.kind != "parquet":
        for key, value in (
            ("data.paths", data.paths),
            ("data.held_out", data.held_out),
            ("schema.keys", config.schema.keys),
        ):
            if value:
                raise ConfigError(f"{key} is set, but data.kind is {data.kind!r}; it needs data.kind = 'parquet'")
        return
    for key, value in (
        ("data.paths", data.paths),
        ("schema.keys", config.schema.keys),
        ("schema.dense", config.schema.dense),
    ):
        if not value:
            raise ConfigError(f"data.kind = 'parquet' needs {key}, a list of at least one")


def prepared(config: Config) -> Prepared:
    data = config.data
    name = data.kind.partition("-")[0]
    if data.path is None:
        raise ConfigError(
            f"data.kind = {data.kind!r} needs prepared data: `nestpipe data prepare {name} SRC DST`, then --set "
            "data.path=DST"
        )
    found = read_prepared(data.path)
    if found.manifest.source != data.kind:
        raise ConfigError(
            f"data.kind is {data.kind!r}, but {data.path} was prepared from {found.manifest.source!r}; --set "
            f"data.kind={found.manifest.source}, or give another data.path"
        )
    expected = "histories" if data.kind in PREPARED_HISTORIES else "clicks"
    if found.manifest.kind != expected:
        raise ConfigError(
            f"{data.path} has {found.manifest.kind}, but {data.kind} must be {expected}; prepare it again"
        )
    return found


def training_files(config: Config) -> Dataset:
    data = config.data
    options = {**_options(config), "seed": data.seed, "window": data.window, "num_epochs": data.num_epochs}
    if data.kind == "parquet":
        return ParquetData(data.paths, _schema(config), **options)
    found = prepared(config)
    if data.kind in PREPARED_CLICKS:
        return found.clicks("train", **options)
    return found.histories("train", config.model.max_length, data.crop, _negatives(config, found), **options)


def held_out_files(config: Config) -> Dataset | None:
    """In the order of the files, once."""
    data = config.data
    options = {**_options(config), "shuffle": False, "window": 1, "num_epochs": 1}
    if data.kind == "parquet":
        return ParquetData(data.held_out, _schema(config), **options) if data.held_out else None
    found, split = prepared(config), evaluated_split(config)
    assert split is not None
    if data.kind in PREPARED_CLICKS:
        return found.clicks(split, **options)
    negatives = _negatives(config, found)
    return found.histories(split, config.model.max_length, negatives=negatives, **options)


def evaluated_split(config: Config) -> str | None:
    """Of prepared data. A test by which the model was chosen would be none; None: the data has no splits."""
    if config.data.kind not in PREPARED:
        return None
    is_test = config.data.kind in PREPARED_HISTORIES and not config.chooses
    return config.evaluate.split or ("test" if is_test else "validation")


def skipped(dataset: Dataset) -> Skipped | None:
    """What was left out of it; None: it is not in files."""
    while not isinstance(dataset, ParquetData):
        if isinstance(dataset, FirstSamples):
            dataset = dataset.dataset
        elif isinstance(dataset, UserHistories):
            dataset = dataset.rows
        else:
            return None
    return dataset.skipped


def _options(config: Config) -> dict[str, Any]:
    return {"num_threads": config.data.num_threads, "skip_bad": config.data.skip_bad}


def _schema(config: Config) -> Schema:
    section = config.schema
    num_keys = {table.name: table.num_keys for table in config.tables if table.num_keys is not None}
    of_keys = {name: number for name, number in num_keys.items() if name in section.keys}
    return Schema(section.keys, {"dense": section.dense}, {"click": section.label}, section.weight, of_keys)


def _negatives(config: Config, found: Prepared) -> Negatives:
    model = config.model
    return Negatives(found.num_items, model.num_negatives, model.negatives_per, config.data.seed)
