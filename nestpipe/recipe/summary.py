"""Summarises the time, bytes and memory of a run over all ranks."""

import json
import platform
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import nestpipe
from nestpipe.device.machine import accelerator, cpu_name
from nestpipe.device.tally import whole_device_peak
from nestpipe.distributed import World
from nestpipe.embedding.budget import DeviceBytes
from nestpipe.pipelining.stage import BUSY, STAGES
from nestpipe.pipelining.step_times import BYTE_FIELDS, StepLog, StepTimes, StepTotals
from nestpipe.store.cores import usable_cores

if TYPE_CHECKING:
    from nestpipe.train.fit_result import FitResult
    from nestpipe.train.trainer import Trainer

TIME_FIELDS = tuple(dict.fromkeys(stage.time_field for stage in STAGES.values()))
STEP_FIELDS = ("step_ms", *TIME_FIELDS, "overlap_sync_ms", *BUSY)
"""Milliseconds of a step, of its parts, and of busy lanes."""


@dataclass(frozen=True)
class TimeSummary:
    fields: dict[str, float]
    """step_ms of the slowest rank, its parts as means over ranks, bytes per rank and step, samples_per_second, ...

    hit_rate is the share of owned keys whose rows were resident."""
    spread: dict[str, tuple[float, float]]
    """Minimum and maximum over ranks, for each part of step_ms."""


@dataclass(frozen=True)
class TableMemory:
    """Host memory of a table, summed over ranks."""

    name: str
    num_rows: int
    row_bytes: int
    state_bytes: int
    overhead_bytes: int
    """Bytes of keys, index and step numbers."""


def counted(times: Sequence[StepTimes]) -> StepTotals:
    """Returns totals without the first tenth of the steps, at least five, which warm up.

    A shorter run counts its last step only. A StepLog keeps older steps as totals of blocks: the block in which the
    first tenth ends is left out whole.
    """
    older = times.older if isinstance(times, StepLog) else []
    num_older = sum(block.num_steps for block in older)
    num_steps = num_older + len(times)
    num_left_out = min(max(5, num_steps // 10), num_steps - 1)
    totals, position = StepTotals(), 0
    for block in older:
        if position >= num_left_out:
            totals.add(block.sums, block.num_steps)
        position += block.num_steps
    for step in times[max(0, num_left_out - num_older) :]:
        totals.add(step)
    return totals


def summarise(times: Sequence[StepTimes], world: World) -> TimeSummary:
    """Summarises step times. All ranks call it and get the same."""
    totals = counted(times)
    names = (*STEP_FIELDS, *BYTE_FIELDS, "peak_rss_bytes")
    own_means = torch.tensor([_mean_of_rank(totals, name) for name in names], dtype=torch.float64)
    means_by_rank = world.control.all_to_all_equal(own_means.expand(world.size, -1))
    columns = {name: means_by_rank[:, i] for i, name in enumerate(names)}
    largest = {"step_ms", "peak_rss_bytes", "unattributed_ms"}
    fields = {name: float(c.max() if name in largest else c.mean()) for name, c in columns.items()}
    samples = totals.sums.num_samples / max(totals.num_steps, 1)
    fields["hit_rate"] = 1 - fields["retrieved_keys_per_step"] / max(fields["owned_keys_per_step"], 1)
    fields["samples_per_second"] = samples / fields["step_ms"] * 1e3 if fields["step_ms"] > 0 else 0.0
    return TimeSummary(fields, {name: (float(columns[name].min()), float(columns[name].max())) for name in TIME_FIELDS})


def _mean_of_rank(totals: StepTotals, name: str) -> float:
    if name == "peak_rss_bytes":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
    return step_value(totals.sums, name) / max(totals.num_steps, 1)


def step_value(step: StepTimes, name: str) -> float:
    """Returns a field of the summary for one step on this rank."""
    if name == "step_ms":
        return step.step_ms
    if name in BYTE_FIELDS:
        return step.sizes[name]
    if name in BUSY:
        return step.busy_ms(name)
    if name == "overlap_sync_ms":
        return 0.0  # shared rows stay in their slots; the field remains for readers of results
    return sum(step.stages[stage] for stage, part in STAGES.items() if part.time_field == name)


def table_memory(trainer: "Trainer") -> list[TableMemory]:
    """Returns the memory of each table. All ranks call it and get the same."""
    reports = [trainer.store.memory(table.name) for table in trainer.tables]
    numbers = torch.tensor([[r.num_rows, r.metadata_bytes + r.index_bytes] for r in reports])
    trainer.world.control.all_reduce_sum(numbers)
    memory = []
    for table, (num_rows, overhead) in zip(trainer.tables, numbers.tolist(), strict=True):
        item, width = table.dtype.itemsize, table.spec(trainer.seed).state_width
        memory.append(TableMemory(table.name, num_rows, num_rows * table.dim * item, num_rows * width * item, overhead))
    return memory


def device_memory(result: "FitResult", world: World) -> dict[str, int | None] | None:
    """Returns device memory of the rank whose embeddings need most by the formula: its terms, their sum and the peak.

    All ranks call it and get the same. Without a budget, returns only the whole device's peak; without a device, None.
    """
    whole, needed = whole_device_peak(world.device), result.device_bytes
    terms = (needed or DeviceBytes()).terms
    staging = needed.staging if needed is not None else 0
    own_bytes = torch.tensor([[sum(terms.values()), result.peak_device_bytes, whole or 0, staging, *terms.values()]])
    bytes_by_rank = world.control.all_to_all_equal(own_bytes.expand(world.size, -1))
    formula, peak, _, staging, *parts = bytes_by_rank[int(bytes_by_rank[:, 0].argmax())].tolist()
    device = {"whole_device_peak_bytes": None if whole is None else int(bytes_by_rank[:, 2].max())}
    if needed is None:
        return None if whole is None else device
    term_bytes = {f"{name}_bytes": part for name, part in zip(terms, parts, strict=True)}
    return {"formula_bytes": formula, "peak_bytes": peak, **term_bytes, "host_staging_bytes": staging, **device}


def environment(world: World) -> dict[str, Any]:
    """Describes versions and hardware of rank 0's machine. All ranks call it and get the same."""
    own: dict[str, Any] = {}
    if world.rank == 0:
        own = {
            "nestpipe": nestpipe.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "system": f"{platform.system()} {platform.release()}",
            "cpu": cpu_name(),
            "cores": usable_cores(),
            "device": str(world.device),
            **accelerator(),
        }
    shared: dict[str, Any] = json.loads(world.control.share_text(json.dumps(own))[0])
    return shared
