"""Trains a recipe for some steps on one rank, in this process, and measures what its parts take."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from nestpipe.data.batch import Batch
from nestpipe.device.tally import whole_device_peak
from nestpipe.distributed import World
from nestpipe.embedding.budget import DeviceBytes
from nestpipe.embedding.dedup import dedup_batch
from nestpipe.embedding.group import group_features
from nestpipe.pipelining.schedule import CROSSING, OVERLAPPING, WINDOWED
from nestpipe.prediction.choose import CANDIDATES
from nestpipe.prediction.measure import MOST_MEASURED, measure
from nestpipe.prediction.split_costs import SplitCosts
from nestpipe.recipe.build import Run
from nestpipe.recipe.config import AUTO, CheckpointSection, Config, LoggingSection
from nestpipe.recipe.run import evaluate_held_out, start
from nestpipe.recipe.value import ConfigError
from nestpipe.store.cores import usable_cores
from nestpipe.store.process_memory import peak_bytes, reset_peak, resident_bytes
from nestpipe.train.fit_result import FitResult
from nestpipe.train.trainer import Trainer

TRIAL_STEPS = 12
NO_LIMIT = 2**62
OPTIMIZER_STEPS = 3


@dataclass(frozen=True)
class Trial:
    """What one rank showed."""

    config: Config
    """As it was tried: the number of micro-batches is the recipe's, or 1 if it is to be chosen."""
    is_on_device: bool
    crosses_batches: bool
    """Whether several workers would exchange rows and gradients across batches."""
    program_bytes: int
    """Host memory of the process before the first step, without dense parameters that are in it."""
    dense_bytes: int
    """Dense parameters, their gradients, and the state of their optimizer."""
    activation_bytes: int
    """Peak of the steps that nothing else accounts for."""
    embeddings: DeviceBytes
    """What the embeddings of the largest batch take, by the formula of docs/memory.md."""
    micro_batch_keys: tuple[int, ...]
    """Distinct keys of each micro-batch."""
    costs: SplitCosts
    optimizer_ms: float
    parameter_bytes: int
    input_bytes: int

    @property
    def batch_size(self) -> int:
        return self.config.train.batch_size

    @property
    def num_micro_batches(self) -> int:
        return len(self.micro_batch_keys)

    @property
    def is_windowed(self) -> bool:
        return self.config.pipeline.schedule in WINDOWED

    @property
    def is_overlapping(self) -> bool:
        return self.config.pipeline.schedule in OVERLAPPING


def try_recipe(config: Config) -> tuple[Trial, Run]:
    """Trains TRIAL_STEPS steps, evaluates one batch, and measures steps. Reads and writes no checkpoint and no log."""
    config = _for_trial(config)
    assert config.runtime.device is not None
    this_run = start(config, World(device=config.runtime.device))
    trainer, batch_size = this_run.trainer, config.train.batch_size
    trainer.saver.close()
    dataset = this_run.source.training()
    num_samples = 2 * batch_size if dataset.num_samples is None else min(dataset.num_samples, 2 * batch_size)
    if min(num_samples, batch_size) < 2:
        raise ConfigError("a trial needs a batch of at least 2 samples; set train.batch_size, or give more data")
    before, result = resident_bytes(), FitResult()
    reset_peak()
    trainer.fit(this_run.batches, TRIAL_STEPS, result=result)
    if this_run.held_out is not None and config.evaluate.num_samples > 0:
        evaluate_held_out(this_run)
    trainer.digest()
    peak, embeddings = peak_bytes(), result.device_bytes or DeviceBytes()
    parameters = sum(p.nbytes for p in trainer.model.parameters())
    dense = 2 * parameters + _optimizer_bytes(trainer)
    whole = whole_device_peak(trainer.world.device)
    if whole is None:
        activations = peak - before - (dense - parameters) - _store_bytes(trainer) - embeddings.total
    else:
        activations = whole - dense - embeddings.total
    batches = [
        dataset.samples(first, min(batch_size, num_samples - first)) for first in range(0, num_samples, batch_size)
    ]
    schedule = config.pipeline.schedule
    trial = Trial(
        config=config,
        is_on_device=whole is not None,
        crosses_batches=schedule in CROSSING and config.exchange.cross_batch,
        program_bytes=before - (parameters if whole is None else 0),
        dense_bytes=dense,
        activation_bytes=max(0, activations),
        embeddings=embeddings,
        micro_batch_keys=_micro_batch_keys(trainer, batches[0]),
        costs=_costs(trainer, batches),
        optimizer_ms=_optimizer_ms(trainer),
        parameter_bytes=parameters,
        input_bytes=sum(tensor.nbytes for tensor in batches[0].inputs.values()),
    )
    return trial, this_run


def _for_trial(config: Config) -> Config:
    """Returns the config without what a trial must not do, such as writing checkpoints."""
    num = 1 if config.pipeline.num_micro_batches == AUTO else config.pipeline.num_micro_batches
    evaluation = config.evaluate
    num_evaluated = min(evaluation.num_samples, evaluation.batch_size or config.train.batch_size)
    return replace(
        config,
        # One rank has the rows of all workers that its batches need.
        tables=tuple(replace(table, max_rows=None) for table in config.tables),
        pipeline=replace(config.pipeline, num_micro_batches=num),
        exchange=replace(config.exchange, replicas=1, check_replicas=0),
        memory=replace(config.memory, resident_bytes="minimum", device_budget_bytes=NO_LIMIT),
        evaluate=replace(evaluation, num_samples=num_evaluated, every=0, patience=0),
        checkpoint=CheckpointSection(),
        logging=LoggingSection(),
    ).resolved(1, usable_cores())


def _store_bytes(trainer: Trainer) -> int:
    reports = [trainer.store.memory(table.name) for table in trainer.tables]
    return sum(report.payload_bytes + report.metadata_bytes + report.index_bytes for report in reports)


def _optimizer_bytes(trainer: Trainer) -> int:
    states = trainer.optimizer.state.values()
    return sum(value.nbytes for state in states for value in state.values() if isinstance(value, torch.Tensor))


def _micro_batch_keys(trainer: Trainer, batch: Batch) -> tuple[int, ...]:
    options = trainer.options
    num = options.num_micro_batches
    groups = group_features(trainer.features)
    dedup = dedup_batch(groups, batch, num, 1, options.num_threads, options.clustering)
    return tuple(sum(group.num_rows(i) for group in dedup.groups) for i in range(num))


def _costs(trainer: Trainer, batches: Sequence[Batch]) -> SplitCosts:
    own = trainer.options.num_micro_batches
    most = max(own, MOST_MEASURED)
    numbers = sorted({own, *(num for num in CANDIDATES if num <= len(batches[0]))})
    costs = measure(trainer, [batches[0], batches[-1]], min(most, len(batches[0])), numbers)
    if costs is None:
        raise ConfigError("the first batch of the data has weight 0, so that no step can be measured")
    return costs


def _optimizer_ms(trainer: Trainer) -> float:
    """Returns the time of a step of the dense optimizer. The parameters change: call it last."""
    for parameter in trainer.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    times = []
    for _ in range(OPTIMIZER_STEPS):
        trainer.world.finish_device()
        since = time.perf_counter()
        trainer.optimizer.step()
        trainer.world.finish_device()
        times.append((time.perf_counter() - since) * 1e3)
    return min(times)
