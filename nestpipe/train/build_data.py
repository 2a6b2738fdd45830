"""From a recipe to its data, and to the features that the data has."""

from dataclasses import asdict

from nestpipe.data.dataset import Batches, Dataset
from nestpipe.data.histories import HistoryData, HistoryShape
from nestpipe.data.negatives import WithNegatives
from nestpipe.data.synthetic import ClickData
from nestpipe.distributed import World
from nestpipe.embedding.table import Feature, Pooled, Sequence, Table
from nestpipe.train.config import PREPARED, SEQUENCE_MODELS, Config, TableSection
from nestpipe.train.config_value import ConfigError, suggestion

HELD_OUT = 2**40
"""Sample position from which on nobody trains."""
ITEM_TABLE = "item"
"""of histories: the one table"""
NEEDS = {"dlrm": ("clicks",), **dict.fromkeys(SEQUENCE_MODELS, ("histories",))}
"""data that a model learns from"""


def check_data(config: Config) -> None:
    kind, model = config.data.kind, config.model.kind
    if kind in PREPARED:
        remedy = " or ".join(f"data.kind = {name!r}" for name in NEEDS[model])
        raise ConfigError(
            f"data.kind = {kind!r} needs prepared data; its reader is not part of this version. Until it is, train "
            f"{model} on synthetic data: {remedy}"
        )
    if kind not in NEEDS[model]:
        fitting = " or ".join(name for name, data in NEEDS.items() if kind in data)
        raise ConfigError(
            f"model.kind = {model!r} cannot learn from data.kind = {kind!r}; take data.kind = {NEEDS[model][0]!r}, or "
            f"as model.kind {fitting}"
        )


def build_dataset(config: Config, num_samples: int | None) -> Dataset:
    """All samples up to this number, those that are held out among them."""
    if config.data.kind == "clicks":
        return ClickData(config.data.seed, num_samples, config.data.skew)
    data, model = build_histories(config, num_samples), config.model
    return WithNegatives(data, data.shape.num_items, model.num_negatives, model.negatives_per, config.data.seed)


def build_histories(config: Config, num_samples: int | None) -> HistoryData:
    shape = HistoryShape(**asdict(config.histories), max_length=config.model.max_length)
    return HistoryData(config.data.seed, num_samples, shape)


def held_out(config: Config, world: World) -> Batches:
    """Of this rank, for the evaluation."""
    dataset = build_dataset(config, HELD_OUT + config.evaluate.num_samples)
    batches = Batches(dataset, config.evaluate.batch_size or config.train.batch_size, world.rank, world.size)
    batches.load_state({"position": HELD_OUT})
    return batches


def table_sections(config: Config) -> dict[str, TableSection]:
    """Every table of the data, as [[tables]] says, or as it is without."""
    if config.data.kind == "clicks":
        sections = {name: TableSection(name) for name in ClickData.feature_names}
    else:
        sections = {ITEM_TABLE: TableSection(ITEM_TABLE, init="truncated_normal")}
    names = tuple(sections)
    for section in config.tables:
        if section.name not in sections:
            remedy = suggestion(section.name, names) or f"; there are {', '.join(names)}"
            raise ConfigError(
                f"[[tables]] names {section.name!r}, which is no table of the data {config.data.kind!r}{remedy}"
            )
        sections[section.name] = section
    return sections


def features_of(config: Config, tables: dict[str, Table]) -> dict[str, Feature]:
    """Of clicks, a feature for each table, pooled; of histories, sequences that share the one table."""
    if config.data.kind == "clicks":
        return {name: Pooled(table) for name, table in tables.items()}
    return {name: Sequence(tables[ITEM_TABLE]) for name in ("history", "target", "negatives")}
