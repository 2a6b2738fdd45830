"""From a recipe to its data, and to the features that the data has."""

from dataclasses import asdict, replace

from nestpipe.data.dataset import Batches, Dataset, FirstSamples
from nestpipe.data.files.prepared import CLICK_FEATURES
from nestpipe.data.negatives import WithNegatives
from nestpipe.data.synthetic.clicks import NUM_DENSE, ClickData
from nestpipe.data.synthetic.histories import HistoryData, HistoryShape
from nestpipe.distributed import World
from nestpipe.embedding.table import Feature, Pooled, Sequence, Table
from nestpipe.recipe.build_files import check_files, held_out_files, is_in_files, prepared, training_files
from nestpipe.recipe.config import PREPARED_CLICKS, PREPARED_HISTORIES, SEQUENCE_MODELS, Config, TableSection
from nestpipe.recipe.value import ConfigError, suggestion

HELD_OUT = 2**40
"""Sample position from which on nobody trains."""
ITEM_TABLE = "item"
"""of histories: the one table"""
NEEDS = {
    "dlrm": ("clicks", "parquet", *PREPARED_CLICKS),
    **dict.fromkeys(SEQUENCE_MODELS, ("histories", *PREPARED_HISTORIES)),
}
"""data that a model learns from"""


def check_data(config: Config) -> None:
    kind, model = config.data.kind, config.model.kind
    if kind not in NEEDS[model]:
        fitting = " or ".join(name for name, data in NEEDS.items() if kind in data)
        raise ConfigError(
            f"model.kind = {model!r} cannot learn from data.kind = {kind!r}; take data.kind = {NEEDS[model][0]!r}, or "
            f"as model.kind {fitting}"
        )
    check_files(config)


def training_data(config: Config) -> Dataset:
    num_samples = config.data.num_samples
    if not is_in_files(config):
        return build_dataset(config, num_samples)
    dataset = training_files(config)
    return dataset if num_samples is None else FirstSamples(dataset, num_samples)


def build_dataset(config: Config, num_samples: int | None) -> Dataset:
    """Synthetic: all samples up to this number, those that are held out among them."""
    if config.data.kind == "clicks":
        return ClickData(config.data.seed, num_samples, config.data.skew)
    data, model = build_histories(config, num_samples), config.model
    return WithNegatives(data, data.shape.num_items, model.num_negatives, model.negatives_per, config.data.seed)


def build_histories(config: Config, num_samples: int | None) -> HistoryData:
    shape = HistoryShape(**asdict(config.histories), max_length=config.model.max_length)
    return HistoryData(config.data.seed, num_samples, shape)


def held_out(config: Config, world: World) -> Batches | None:
    """Of this rank, for the evaluation; None: there is nothing to evaluate on."""
    section = config.evaluate
    if not is_in_files(config):
        dataset, position = build_dataset(config, HELD_OUT + section.num_samples), HELD_OUT
    else:
        files, position = held_out_files(config) if section.num_samples > 0 else None, 0
        if files is None:
            return None
        dataset = FirstSamples(files, section.num_samples)
    batches = Batches(dataset, section.batch_size or config.train.batch_size, world.rank, world.size)
    batches.load_state({"position": position})
    return batches


def corpus_size(config: Config) -> int:
    """Of histories: items there are, 0 .. number - 1."""
    return config.histories.num_items if config.data.kind == "histories" else prepared(config).num_items


def num_dense(config: Config) -> int:
    return len(config.schema.dense) if config.data.kind == "parquet" else NUM_DENSE


def table_sections(config: Config) -> dict[str, TableSection]:
    """Every table of the data, as [[tables]] says, or as it is without."""
    if config.model.kind == "dlrm":
        sections = {name: TableSection(name) for name in _click_features(config)}
    else:
        sections = {ITEM_TABLE: TableSection(ITEM_TABLE, init="truncated_normal", num_keys=_num_keys(config))}
    names = tuple(sections)
    for section in config.tables:
        if section.name not in sections:
            remedy = suggestion(section.name, names) or f"; there are {', '.join(names)}"
            raise ConfigError(
                f"[[tables]] names {section.name!r}, which is no table of the data {config.data.kind!r}{remedy}"
            )
        default = sections[section.name]
        sections[section.name] = replace(section, num_keys=section.num_keys or default.num_keys)
    return sections


def _click_features(config: Config) -> tuple[str, ...]:
    kind = config.data.kind
    return ClickData.feature_names if kind == "clicks" else config.schema.keys if kind == "parquet" else CLICK_FEATURES


def _num_keys(config: Config) -> int | None:
    return None if config.data.kind == "histories" else corpus_size(config)


def features_of(config: Config, tables: dict[str, Table]) -> dict[str, Feature]:
    """Of clicks, a feature for each table, pooled; of histories, sequences that share the one table."""
    if config.model.kind == "dlrm":
        return {name: Pooled(table) for name, table in tables.items()}
    return {name: Sequence(tables[ITEM_TABLE]) for name in ("history", "target", "negatives")}
