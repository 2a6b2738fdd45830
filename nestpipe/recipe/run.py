"""Runs a recipe: trains, saves, evaluates, sums up."""

from collections.abc import Callable
from copy import copy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from nestpipe.checkpoint import CheckpointError
from nestpipe.data.dataset import Dataset, FirstSamples
from nestpipe.data.files.parquet import ParquetData, Skipped
from nestpipe.data.files.user_histories import UserHistories
from nestpipe.diagnosis.recorder import Recorder
from nestpipe.distributed import World
from nestpipe.evaluation.evaluate import evaluate
from nestpipe.evaluation.validation import Validation
from nestpipe.pipelining.trace import Span
from nestpipe.recipe.build import Run, build, build_metrics
from nestpipe.recipe.checkpoints import Checkpoints
from nestpipe.recipe.config import Config
from nestpipe.recipe.flops import model_flops
from nestpipe.recipe.micro_batches import set_micro_batches, splitting
from nestpipe.recipe.resume import open_folders
from nestpipe.recipe.run_log import TRACE, RunLog
from nestpipe.recipe.slow import find_slow
from nestpipe.recipe.summary import device_memory, environment, summarise, table_memory
from nestpipe.recipe.text import to_toml
from nestpipe.recipe.trace_file import write_trace
from nestpipe.recipe.value import ConfigError
from nestpipe.train.fit_result import Callback, FitResult

Summary = dict[str, Any]
AfterStep = Callable[[FitResult], None]


def run(
    config: Config,
    world: World,
    after_step: AfterStep | None = None,
    trace_path: Path | None = None,
    traced_steps: range | None = None,
    fresh: bool = False,
) -> Summary:
    """Trains and returns the summary, which is the same on all ranks. All ranks call it, with a resolved config.

    If checkpoint.dir holds a checkpoint, the run resumes from it; `fresh` moves the old checkpoints away first.
    """
    if world.mesh.num_replicas != config.exchange.replicas:
        raise ConfigError(
            f"exchange.replicas = {config.exchange.replicas}, but the world was made with replicas = "
            f"{world.mesh.num_replicas}; give both the same"
        )
    if world.size > 1 and world.hosts_setting != config.exchange.hosts:
        raise ConfigError(
            f"exchange.hosts is {config.exchange.hosts!r}, but the world was made with hosts={world.hosts_setting!r}; "
            "give both the same"
        )
    this_run = start(config, world)
    validation = _validation(config, this_run)
    trainer = this_run.trainer
    log = RunLog(config.logging)
    if world.rank == 0:
        log.check_folder()
    if trace_path is None and log.folder is not None:
        trace_path = log.folder / TRACE
    try:
        # Nothing is moved away for a recipe that cannot be run.
        folder = open_folders(config, world, fresh, trainer.saver)
        if folder is not None:
            _resume(this_run, folder, validation)
            if world.rank == 0:
                print(f"nestpipe: resumed from step {trainer.num_steps}, {folder}", flush=True)
        elif config.checkpoint.load is not None:
            _resume(this_run, Path(config.checkpoint.load), strict=config.checkpoint.strict)
            if world.rank == 0 and not config.checkpoint.strict:
                print(f"nestpipe: {config.checkpoint.load}: {trainer.load_report}", flush=True)
        choice = set_micro_batches(config, this_run, will_train=_num_left(config, this_run, validation) > 0)
        spans: list[Span] | None = [] if trace_path is not None else None
        result = FitResult(spans=spans, traced_steps=traced_steps, num_steps_before=trainer.num_steps)
        if world.rank == 0:
            log.begin(trainer.num_steps)
            after_step = _both(log.after_step, after_step)
        recorder = Recorder(world)
        _train(config, this_run, after_step, result, validation, log)
    finally:
        trainer.saver.close()
    was_complete = trainer.num_steps == result.num_steps_before
    times = summarise(result.times, world)
    slow = find_slow(recorder, result, world, log)
    if trace_path is not None and result.spans is not None and not (was_complete and trace_path.exists()):
        about = {name: times.fields[name] for name in ("resident_rows", "resident_bytes", "hit_rate")}
        about["has_issuer"] = float(world.issuer is not None)
        write_trace(result.spans, world, trace_path, result.traced_steps, about)
    summary: Summary = {
        "schedule": config.pipeline.schedule,
        "ranks": world.size,
        "backend": world.backend,
        "host_transport": world.host_transport,
        "hosts": None if world.host_map is None else str(world.host_map),
        "num_micro_batches": trainer.options.num_micro_batches,
        "splitting": splitting(times.fields, trainer, choice),
        "places": trainer.places,
        "steps": trainer.num_steps,
        "resumed_from_step": result.num_steps_before if folder is not None else 0,
        "final_loss": result.losses[-1] if result.losses else None,
        "num_skipped_batches": result.num_skipped,
        **times.fields,
        **model_flops(result, times.fields, trainer),
        "spread": times.spread,
        "slow": slow,
        "metrics": {} if result.is_stop_requested else _last_metrics(config, this_run, result),
        "split": this_run.source.split,
        "published": _published(config),
        "validations": result.validations,
        "is_stopped_early": result.is_stopped,
        "is_stop_requested": result.is_stop_requested,
        "device_memory": device_memory(result, world),
        "skipped": _skipped(config, this_run),
        "tables": [asdict(table) for table in table_memory(trainer)],
        "environment": environment(world),
        "digest": trainer.digest(),
        "config": to_toml(config),
    }
    if world.rank == 0:
        log.write_summary(summary, has_trained=not was_complete)
    return summary


def _both(first: AfterStep, second: AfterStep | None) -> AfterStep:
    def after_step(result: FitResult) -> None:
        first(result)
        if second is not None:
            second(result)

    return after_step


def evaluate_saved(config: Config, world: World, checkpoint: Path) -> Summary:
    """Evaluates a saved model as its run did at the end. All ranks call it, with a resolved config."""
    if config.evaluate.num_samples == 0:
        raise ConfigError(
            "evaluate.num_samples is 0: nothing is evaluated; --set evaluate.num_samples=65536, for example"
        )
    this_run = start(config, world)
    if this_run.held_out is None:
        raise ConfigError(
            "there is nothing to evaluate on; --set data.held_out=[...], files like those of the training"
        )
    this_run.trainer.load(checkpoint)
    return {
        "checkpoint": str(checkpoint),
        "ranks": world.size,
        "steps": this_run.trainer.num_steps,
        "metrics": evaluate_held_out(this_run),
        "split": this_run.source.split,
        "published": _published(config),
        "config": to_toml(config),
    }


def start(config: Config, world: World) -> Run:
    assert config.runtime.dense_threads is not None
    torch.set_num_threads(config.runtime.dense_threads)
    torch.use_deterministic_algorithms(config.train.deterministic)
    # Every allocated tensor is written before it is read; filling it first would cost a launch for each on a device.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    this_run = build(config, world)
    this_run.trainer.recipe = to_toml(config)
    return this_run


def _resume(this_run: Run, checkpoint: Path, validation: Validation | None = None, strict: bool = True) -> None:
    """Loads a checkpoint, and moves the data to the first batch that it has not trained. Restores validation, too.

    A checkpoint without a state of the data is assumed to have this run's batch size.
    """
    trainer, batches = this_run.trainer, this_run.batches
    extra = trainer.load(checkpoint, strict=strict)
    for problem in trainer.load_problems if trainer.world.rank == 0 else ():
        print(f"nestpipe: a damaged checkpoint is passed over: {problem}", flush=True)
    position = trainer.num_steps * batches.batch_size * batches.world_size
    try:
        batches.load_state(trainer.data_state() or {"position": position})
    except ValueError as error:
        raise CheckpointError(f"going on from {checkpoint} failed: {error}") from error
    if validation is not None and "validation" in extra:
        validation.load_state(extra["validation"])


def _train(
    config: Config,
    this_run: Run,
    after_step: AfterStep | None,
    result: FitResult,
    validation: Validation | None,
    log: RunLog,
) -> None:
    """Trains, with a checkpoint after every checkpoint.every steps. A run that is complete trains nothing."""
    trainer, checkpoints = this_run.trainer, Checkpoints(config.checkpoint, this_run.trainer, validation)
    callbacks: list[Callback] = [] if validation is None else [validation]
    callbacks += [checkpoints] if checkpoints.is_periodic else []  # behind validation, whose state it saves
    result.is_stopped = validation is not None and validation.is_exhausted
    left = _num_left(config, this_run, validation)
    if left > 0:
        trainer.fit(this_run.batches, left, after_step, result, callbacks)
        log.finish(result)
        checkpoints.save_last()


def _num_left(config: Config, this_run: Run, validation: Validation | None) -> int:
    """Returns the number of steps that are left to train."""
    is_stopped = validation is not None and validation.is_exhausted
    return 0 if is_stopped else max(0, config.train.steps - this_run.trainer.num_steps)


def _validation(config: Config, this_run: Run) -> Validation | None:
    section, best = config.evaluate, config.checkpoint.best
    for key, is_set in (("evaluate.patience", section.patience > 0), ("checkpoint.best", best is not None)):
        if is_set and section.every == 0:
            raise ConfigError(
                f"{key} is set, but evaluate.every is 0: there are no evaluations while training to go by"
            )
    if section.every == 0:
        return None
    if config.chooses and this_run.source.split == "test":
        raise ConfigError(
            "evaluate.patience and checkpoint.best choose a model, but evaluate.split is 'test': its numbers would no "
            "longer be those of a test. Leave evaluate.split out (validation), and evaluate the saved model on the "
            "test: nestpipe evaluate FOLDER --set evaluate.split=test"
        )
    if section.num_samples == 0:
        raise ConfigError("evaluate.every is set, but evaluate.num_samples is 0: there is nothing to evaluate on")
    if this_run.held_out is None:
        raise ConfigError("evaluate.every is set, but data.held_out is not: there is nothing to evaluate on")
    return Validation(
        section.every,
        lambda trainer: evaluate_held_out(this_run),
        metric=section.metric,
        patience=section.patience or None,
        save_best=best,
    )


def _last_metrics(config: Config, this_run: Run, result: FitResult) -> dict[str, float]:
    if config.evaluate.num_samples == 0 or this_run.held_out is None:
        return {}
    if result.validations and result.validations[-1]["step"] == this_run.trainer.num_steps:
        return {name: value for name, value in result.validations[-1].items() if name != "step"}
    return evaluate_held_out(this_run)


def evaluate_held_out(this_run: Run) -> dict[str, float]:
    """Evaluates on the held-out samples, the same ones every time."""
    assert this_run.held_out is not None
    evaluation = evaluate(this_run.trainer, copy(this_run.held_out), build_metrics(this_run))
    numbers = {"loss": evaluation.loss, "num_samples": evaluation.num_samples}
    return {**numbers, "num_untrained_keys": evaluation.num_untrained_keys, **evaluation.metrics}


def _published(config: Config) -> dict[str, float]:
    return {name: value for name, value in asdict(config.published).items() if value is not None}


def _skipped(config: Config, this_run: Run) -> dict[str, Any]:
    """Returns what data.skip_bad left out of the files to train on, and of those to evaluate on."""
    if not config.data.skip_bad:
        return {}
    datasets = {"training": this_run.batches.dataset}
    if this_run.held_out is not None:
        datasets["evaluation"] = this_run.held_out.dataset
    parts = {name: _skipped_in(dataset) for name, dataset in datasets.items()}
    return {name: asdict(part) for name, part in parts.items() if part is not None}


def _skipped_in(dataset: Dataset) -> Skipped | None:
    """Returns what was left out of a data set; None if it is not in files."""
    while not isinstance(dataset, ParquetData):
        if isinstance(dataset, FirstSamples):
            dataset = dataset.dataset
        elif isinstance(dataset, UserHistories):
            dataset = dataset.rows
        else:
            return None
    return dataset.skipped
