"""Builds the Trainer and the data that a recipe describes. Nothing further in reads the config."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from inspect import Parameter, signature
from typing import Any

import torch
from torch import nn

from nestpipe.data.dataset import Batches
from nestpipe.datasets.published import Published
from nestpipe.distributed import World
from nestpipe.embedding.cluster import Clustering
from nestpipe.embedding.optim import RowOptimizer
from nestpipe.embedding.table import Feature, Pooled, Table
from nestpipe.evaluation.evaluate import Metric
from nestpipe.recipe.config import AUTO, Config, DenseOptimizerSection, TableSection
from nestpipe.recipe.source import Source
from nestpipe.recipe.sources.files import prepared_source
from nestpipe.recipe.value import ConfigError, suggestion
from nestpipe.registry import Registry, datasets, metrics, models, optimizers
from nestpipe.store import init
from nestpipe.train.trainer import Trainer

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """A trainer and its data, on this rank."""

    trainer: Trainer
    source: Source
    batches: Batches
    """To train on, at the position that the trainer has reached."""
    held_out: Batches | None
    """To evaluate on; None if the data has nothing held out."""


def build(config: Config, world: World) -> Run:
    """Builds a run on this rank of the world. The config must be resolved."""
    with world.watch.busy():  # files may take long to open
        source = build_source(config)
        dataset = source.training()
        held_out = _held_out(source, world)
    trainer = build_trainer(config, source, world)
    num_workers = config.data.num_workers
    if num_workers is None:
        num_workers = source.num_workers if world.runs_ahead else 0
    batches = Batches(dataset, config.train.batch_size, world.rank, world.size, num_workers)
    return Run(trainer, source, batches, held_out)


def build_trainer(config: Config, source: Source, world: World) -> Trainer:
    assert config.store.num_threads is not None
    features = build_features(config, source)
    return Trainer(
        build_model(config, source, features).to(world.device),
        features,
        dense_optimizer=lambda parameters: _dense_optimizer(config.dense_optimizer, parameters, world.runs_ahead),
        world=world,
        clustering=Clustering(config.cluster.method, config.cluster.cost, config.train.seed),
        clip_norm=config.dense_optimizer.clip_norm,
        clip_rows=config.dense_optimizer.clip_rows,
        schedule_lr=_warmup(config.dense_optimizer.warmup_steps),
        check_split=config.pipeline.check_split,
        autocast=torch.bfloat16 if config.train.precision == "bfloat16" else None,
        compiled=config.train.compiled,
        **_pipeline_options(config),
    )


def _pipeline_options(config: Config) -> Values:
    """Returns the options of the pipeline. A number of micro-batches that is chosen later is 1 until then."""
    options = config.pipeline_options()
    return options | ({"num_micro_batches": 1} if options["num_micro_batches"] == AUTO else {})


def build_source(config: Config) -> Source:
    """Builds the data, and checks that the model can learn from it."""
    kind, model = config.data.kind, config.model.kind
    value = datasets.find(kind).value
    learns_from = getattr(models.find(model).value, "learns_from", None)
    samples = getattr(value, "samples", None)
    if None not in (learns_from, samples) and learns_from != samples:
        raise ConfigError(
            f"model.kind = {model!r} cannot learn from data.kind = {kind!r}; take data.kind = "
            f"{_names(datasets, 'samples', learns_from)[0]!r}, or as model.kind "
            f"{' or '.join(_names(models, 'learns_from', samples))}"
        )
    if isinstance(value, Published):
        return prepared_source(config, value)
    source: Source = value(config)
    return source


def _names(registry: Registry, attribute: str, value: object) -> list[str]:
    return [entry.name for entry in registry.entries() if getattr(entry.value, attribute, None) == value]


def _held_out(source: Source, world: World) -> Batches | None:
    section = source.config.evaluate
    held_out = source.held_out(section.num_samples)
    if held_out is None:
        return None
    batch_size = section.batch_size or source.config.train.batch_size
    batches = Batches(held_out.dataset, batch_size, world.rank, world.size)
    batches.load_state({"position": held_out.position})
    return batches


def build_model(config: Config, source: Source, features: Mapping[str, Feature]) -> nn.Module:
    """Calls the model's class. The keys of [model] are for shipped models; others get [model.args] instead, and what
    the recipe and the data already say: dim, max_length, num_dense, feature_names, seed."""
    section, entry = config.model, models.find(config.model.kind)
    known = {
        **(asdict(section) if entry.is_shipped else {"dim": section.dim, "max_length": section.max_length}),
        "num_dense": source.num_dense,
        "feature_names": tuple(features),
        "seed": config.train.seed,
    }
    model = _call("model", section.kind, entry.value, known, section.args)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model.kind = {section.kind!r} gives a {type(model).__name__}, must be a torch.nn.Module")
    return model


def build_metrics(run: Run) -> list[Metric]:
    """Builds the metrics that evaluate.metrics names; or those of the data whose method the model has."""
    named = run.source.config.evaluate.metrics
    model = run.trainer.model
    known = {"trainer": run.trainer, "corpus": run.source.num_items}
    chosen = [(name, metrics.find(name).value) for name in (run.source.metrics if named is None else named)]
    if named is None:
        chosen = [(name, metric) for name, metric in chosen if hasattr(model, metric.method)]
    return [_call("evaluate.metrics", name, metric, known, {}) for name, metric in chosen]


def _call(section: str, name: str, function: Callable[..., Any], known: Values, args: Values) -> Any:
    """Calls a class of the registries with args, and with those of the known values that it has parameters for."""
    parameters = signature(function).parameters
    takes_any = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values())
    for key in args:
        if key not in parameters and not takes_any:
            hint = suggestion(key, tuple(parameters), f"{section}.args.") or f"; it has {', '.join(parameters)}"
            raise ConfigError(f"{section}.args.{key} is set, but {name} has no such parameter{hint}")
    values = {key: value for key, value in known.items() if key in parameters} | dict(args)
    try:
        signature(function).bind(**values)
    except TypeError as error:
        raise ConfigError(f"{name} cannot be built: {error}; set it in [{section}.args]") from None
    return function(**values)


def build_features(config: Config, source: Source) -> dict[str, Feature]:
    row_optimizer = cache(lambda kind, lr: _row_optimizer(config, kind, lr))
    tables = {
        name: _table(config, section, row_optimizer(section.optimizer, section.lr))
        for name, section in table_sections(config, source).items()
    }
    features, sections = source.features(tables), table_sections(config, source)
    return {name: _placed(feature, sections[feature.table.name].where) for name, feature in features.items()}


def _placed(feature: Feature, where: str) -> Feature:
    if isinstance(feature, Pooled):
        return replace(feature, where=where)
    if where != "requester":
        raise ConfigError(
            f"tables.{feature.table.name}.where is {where!r}, but a feature of the table is a sequence: its rows "
            "reach the model one by one. Leave `where` out"
        )
    return feature


def table_sections(config: Config, source: Source) -> dict[str, TableSection]:
    """Returns every table of the data, as [[tables]] changes it."""
    sections = source.tables()
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


def _table(config: Config, section: TableSection, optimizer: RowOptimizer) -> Table:
    dim = section.dim or config.model.dim
    if dim != config.model.dim:
        raise ConfigError(f"table {section.name!r} has dim {dim}, but this model needs model.dim = {config.model.dim}")
    return Table(
        section.name,
        dim,
        init=_initial(section.init, section.init_scale),
        optimizer=optimizer,
        num_keys=section.num_keys,
        frozen=section.frozen,
        max_rows=section.max_rows,
        placement=section.placement,
    )


def _initial(kind: str, scale: float) -> init.Distribution:
    if kind == "uniform":
        return init.Uniform(-scale, scale)
    if kind == "constant":
        return init.Constant(scale)
    return init.Normal(scale) if kind == "normal" else init.TruncatedNormal(scale)


def _row_optimizer(config: Config, kind: str | None, lr: float | None) -> RowOptimizer:
    """Tables with the same settings share one object, so that they form one group, whatever the class."""
    section = config.row_optimizer
    name = kind or section.kind
    assert name is not None
    known = {key: value for key, value in asdict(section).items() if value is not None} | {"lr": lr or section.lr}
    args = section.args if name == section.kind else {}  # not for a table with an optimizer of its own
    optimizer = _call("row_optimizer", name, optimizers.find(name).value, known, args)
    if not isinstance(optimizer, RowOptimizer):
        raise ConfigError(f"row_optimizer.kind = {name!r} gives a {type(optimizer).__name__}, must be a RowOptimizer")
    return optimizer


def _dense_optimizer(
    config: DenseOptimizerSection, parameters: Iterator[nn.Parameter], is_on_accelerator: bool
) -> torch.optim.Optimizer:
    lr, decay = config.lr, config.weight_decay
    if config.kind == "sgd":
        return torch.optim.SGD(parameters, lr, weight_decay=decay)
    if config.kind == "adagrad":
        return torch.optim.Adagrad(parameters, lr, weight_decay=decay)
    adam = torch.optim.AdamW if config.kind == "adamw" else torch.optim.Adam
    # In host memory torch's fused kernels give other bits, and old checkpoints should go on with the bits they had.
    fused = True if is_on_accelerator else None
    return adam(parameters, lr, betas=config.betas, weight_decay=decay, fused=fused)


def _warmup(num_steps: int) -> Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None:
    if num_steps == 0:
        return None
    return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / num_steps))
