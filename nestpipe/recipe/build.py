"""From a recipe to a Trainer and its data. Nothing further in reads the config."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from nestpipe.data.dataset import Batches
from nestpipe.distributed import World
from nestpipe.embedding.cluster import Clustering
from nestpipe.embedding.optim import SGD, Adagrad, Adam, RowOptimizer, RowwiseAdagrad
from nestpipe.embedding.table import Feature, Table
from nestpipe.models import DLRM, HSTU, FuXi
from nestpipe.recipe.build_data import check_data, features_of, held_out, num_dense, table_sections, training_data
from nestpipe.recipe.config import Config, DenseOptimizerSection, RowOptimizerSection, TableSection
from nestpipe.recipe.value import ConfigError
from nestpipe.store import init
from nestpipe.train.trainer import Trainer


@dataclass(frozen=True)
class Run:
    trainer: Trainer
    batches: Batches
    """of this rank, at the position the trainer has reached"""
    held_out: Batches | None
    """of this rank, for the evaluation at the end; None: the data has nothing to evaluate on"""


def build(config: Config, world: World) -> Run:
    """A trainer as the recipe says, on this rank of the world. The config must be resolved."""
    assert config.store.num_threads is not None
    with world.watch.busy():  # files may take long to open
        check_data(config)
        dataset = training_data(config)
        of_evaluation = held_out(config, world)
    features = build_features(config)
    trainer = Trainer(
        build_model(config, features).to(world.device),
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
        seed=config.train.seed,
        num_threads=config.store.num_threads,
        device_budget_bytes=config.memory.device_budget_bytes,
        autocast=torch.bfloat16 if config.train.precision == "bfloat16" else None,
        compiled=config.train.compiled,
    )
    batches = Batches(dataset, config.train.batch_size, world.rank, world.size)
    return Run(trainer, batches, of_evaluation)


def build_model(config: Config, features: Mapping[str, Feature]) -> nn.Module:
    model, seed = config.model, config.train.seed
    if model.kind == "dlrm":
        layers = (model.dim, model.bottom, model.top, model.interaction)
        return DLRM(num_dense(config), tuple(features), *layers, seed, model.cross_layers, model.cross_rank)
    sizes = (model.dim, model.max_length, model.num_layers, model.num_heads, model.dim_qk, model.dim_v, model.dropout)
    loss = (model.negatives_per, model.temperature)
    if model.kind == "hstu":
        return HSTU(*sizes, *loss, seed=seed)
    return FuXi(*sizes, model.ffn_multiply, *loss, seed=seed)


def build_features(config: Config) -> dict[str, Feature]:
    tables = {name: build_table(config, section) for name, section in table_sections(config).items()}
    return features_of(config, tables)


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
    assert config.lr is not None
    assert config.betas is not None
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
