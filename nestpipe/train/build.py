"""From a recipe to a Trainer and its data. Nothing further in reads the config."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from nestpipe.data.cluster import Clustering
from nestpipe.data.dataset import Batches, Dataset
from nestpipe.data.synthetic import NUM_DENSE, ClickData
from nestpipe.distributed import World
from nestpipe.embedding.row_optimizer import SGD, Adagrad, Adam, RowOptimizer, RowwiseAdagrad
from nestpipe.embedding.table import Feature, Pooled, Table
from nestpipe.models import DLRM
from nestpipe.store import init
from nestpipe.train.config import Config, DenseOptimizerSection, RowOptimizerSection, TableSection
from nestpipe.train.config_value import ConfigError, suggestion
from nestpipe.train.trainer import Trainer

HELD_OUT = 2**40
"""Sample position from which on nobody trains."""


@dataclass(frozen=True)
class Run:
    trainer: Trainer
    batches: Batches
    """of this rank, at the position the trainer has reached"""
    held_out: Batches
    """of this rank, for the evaluation at the end"""


def build(config: Config, world: World) -> Run:
    """A trainer as the recipe says, on this rank of the world. Thread counts must be resolved."""
    assert config.store.num_threads is not None
    dataset = ClickData(config.data.seed, config.data.num_samples, config.data.skew)
    features = build_features(config, dataset.feature_names)
    model = DLRM(
        NUM_DENSE,
        dataset.feature_names,
        config.model.dim,
        config.model.bottom,
        config.model.top,
        config.model.interaction,
        config.train.seed,
        config.model.cross_layers,
        config.model.cross_rank,
    )
    trainer = Trainer(
        model,
        features,
        dense_optimizer=lambda parameters: _dense_optimizer(config.dense_optimizer, parameters),
        world=world,
        schedule=config.pipeline.schedule,
        num_micro_batches=config.pipeline.num_micro_batches,
        clustering=Clustering(config.cluster.method, config.cluster.cost, config.train.seed),
        window=config.exchange.window,
        clip_norm=config.dense_optimizer.clip_norm,
        clip_rows=config.dense_optimizer.clip_rows,
        schedule_lr=_warmup(config.dense_optimizer.warmup_steps),
        check_split=config.pipeline.check_split,
        stale=config.pipeline.stale,
        fault=config.pipeline.fault,
        seed=config.train.seed,
        num_threads=config.store.num_threads,
    )
    return Run(trainer, _batches(config, dataset, world), _held_out(config, world))


def build_features(config: Config, names: tuple[str, ...]) -> dict[str, Feature]:
    """A table for each sparse feature, of the feature's name, as [[tables]] says."""
    sections = {section.name: section for section in config.tables}
    for name in sections:
        if name not in names:
            remedy = suggestion(name, names) or f"; there are {', '.join(names)}"
            raise ConfigError(f"[[tables]] names {name!r}, which is no table of the data {config.data.kind!r}{remedy}")
    return {name: Pooled(build_table(config, sections.get(name, TableSection(name)))) for name in names}


def build_table(config: Config, section: TableSection) -> Table:
    dim = section.dim or config.model.dim
    if dim != config.model.dim:
        raise ConfigError(f"table {section.name!r} has dim {dim}, but this model needs model.dim = {config.model.dim}")
    return Table(
        section.name,
        dim,
        init=_initial(section.init, section.init_scale),
        optimizer=_row_optimizer(config.row_optimizer, section),
        num_keys=section.num_keys,
        frozen=section.frozen,
        max_rows=section.max_rows,
    )


def _initial(kind: str, scale: float) -> init.Distribution:
    if kind == "uniform":
        return init.Uniform(-scale, scale)
    if kind == "constant":
        return init.Constant(scale)
    return init.Normal(scale) if kind == "normal" else init.TruncatedNormal(scale)


def _row_optimizer(config: RowOptimizerSection, section: TableSection) -> RowOptimizer:
    kind, lr, decay = section.optimizer or config.kind, section.lr or config.lr, config.weight_decay
    eps = {} if config.eps is None else {"eps": config.eps}
    if kind == "sgd":
        return SGD(lr, weight_decay=decay)
    if kind == "adam":
        return Adam(lr, betas=config.betas, weight_decay=decay, **eps)
    adagrad = RowwiseAdagrad if kind == "rowwise_adagrad" else Adagrad
    return adagrad(lr, initial_accumulator=config.initial_accumulator, weight_decay=decay, **eps)


def _dense_optimizer(config: DenseOptimizerSection, parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    lr, decay = config.lr, config.weight_decay
    if config.kind == "sgd":
        return torch.optim.SGD(parameters, lr, weight_decay=decay)
    if config.kind == "adagrad":
        return torch.optim.Adagrad(parameters, lr, weight_decay=decay)
    adam = torch.optim.AdamW if config.kind == "adamw" else torch.optim.Adam
    return adam(parameters, lr, betas=config.betas, weight_decay=decay)


def _warmup(num_steps: int) -> Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None:
    if num_steps == 0:
        return None
    return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / num_steps))


def _batches(config: Config, dataset: Dataset, world: World) -> Batches:
    return Batches(dataset, config.train.batch_size, world.rank, world.size)


def _held_out(config: Config, world: World) -> Batches:
    dataset = ClickData(config.data.seed, HELD_OUT + config.evaluate.num_samples, config.data.skew)
    batches = Batches(dataset, config.evaluate.batch_size or config.train.batch_size, world.rank, world.size)
    batches.load_state({"position": HELD_OUT})
    return batches
