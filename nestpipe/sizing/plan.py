"""Plans a recipe: measures it on one rank, and says what some workers need."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nestpipe.distributed.mesh import Mesh
from nestpipe.recipe.build import Run
from nestpipe.recipe.config import Config
from nestpipe.recipe.value import ConfigError, suggestion
from nestpipe.sizing.keys import RowCount, count_rows, key_growth
from nestpipe.sizing.limits import Limits, check_limits, largest_table, most_rows, problems, remedies
from nestpipe.sizing.need import DEVICE, HOST, Case, TableSize
from nestpipe.sizing.step import Step, expected_step
from nestpipe.sizing.trial import try_recipe


@dataclass(frozen=True)
class Plan:
    case: Case
    limits: Limits
    step: Step
    problems: list[str]
    """Why it does not fit; empty if it does."""
    remedies: list[str]
    """What would make it fit, each alone."""
    largest_table: str
    most_rows: int
    """Most rows of that table, over all workers, next to the others; 0 if none fit."""

    def to_json(self) -> dict[str, Any]:
        lane, busy = self.step.busiest_lane
        return {
            "workers": self.case.num_workers,
            "replicas": self.case.replicas,
            "parts": [vars(part) for part in self.case.parts],
            "host_bytes": self.case.total(HOST),
            "device_bytes": self.case.total(DEVICE),
            "host_limit_bytes": self.limits.host_bytes,
            "device_limit_bytes": self.limits.device_bytes,
            "tables": [vars(table) for table in self.case.tables],
            "keys_of_batch": self.case.num_keys,
            "owned_keys": self.case.num_owned,
            "key_overlap": self.case.keys.overlap,
            "key_growth": self.case.keys.exponent,
            "step_ms": self.step.result.step_ms,
            **self.step.result.parts,
            "num_micro_batches": self.step.num_micro_batches,
            "samples_per_second": self.step.samples_per_second,
            "limited_by": self.step.limit[0],
            "busiest_lane": lane,
            "busiest_lane_share": busy,
            "fits": not self.problems,
            "problems": self.problems,
            "remedies": self.remedies,
            "largest_table": self.largest_table,
            "most_rows": self.most_rows,
        }


def plan(
    config: Config,
    num_workers: int,
    limits: Limits,
    gb_per_second: float | None = None,
    rows: Mapping[str, int] | None = None,
) -> Plan:
    """Plans a recipe. gb_per_second: bandwidth of a worker, each way; None for the network of the default cluster.
    rows: numbers of rows of tables, over all workers."""
    replicas = config.exchange.replicas
    Mesh(0, num_workers, replicas)  # refuses groups of unequal size
    trial, this_run = try_recipe(config)
    check_limits(trial.is_on_device, limits)
    dataset = this_run.source.training()
    features = this_run.trainer.features
    memory = config.memory
    case = Case(
        trial=trial,
        keys=key_growth(dataset, features, trial.batch_size, num_workers),
        tables=table_sizes(config, this_run, num_workers, rows or {}),
        num_workers=num_workers,
        replicas=replicas,
        resident_bytes=memory.resident_bytes if isinstance(memory.resident_bytes, int) else None,
        device_budget_bytes=memory.device_budget_bytes,
    )
    found = problems(case, limits)
    return Plan(
        case=case,
        limits=limits,
        step=expected_step(case, config, gb_per_second),
        problems=found,
        remedies=remedies(case, limits) if found else [],
        largest_table=largest_table(case),
        most_rows=most_rows(case, limits),
    )


def table_sizes(config: Config, this_run: Run, num_workers: int, given: Mapping[str, int]) -> tuple[TableSize, ...]:
    """Returns the tables, with the rows that are given, or those of max_rows, or as many as the data has keys."""
    tables = this_run.trainer.tables
    names = tuple(table.name for table in tables)
    for name in given:
        if name not in names:
            remedy = suggestion(name, names) or f"; there are {', '.join(names)}"
            raise ConfigError(f"--rows names {name!r}, which is no table of the recipe{remedy}")
    most_rows = {section.name: section.max_rows for section in config.tables if section.max_rows is not None}
    counted: Mapping[str, RowCount] = {}
    if any(name not in given and name not in most_rows for name in names):
        num_samples = max(1, config.train.steps) * config.train.batch_size * num_workers
        counted = count_rows(
            this_run.source.training(), this_run.trainer.features, config.train.batch_size, num_samples
        )
    sizes = []
    for table in tables:
        if table.name in given:
            num, origin = given[table.name], "--rows"
        elif table.name in most_rows:
            num_shards = num_workers // config.exchange.replicas
            num, origin = most_rows[table.name] * num_shards, f"max_rows of {num_shards} workers"
        else:
            num, origin = counted[table.name].num_rows, counted[table.name].origin
        if table.num_keys is not None and num > table.num_keys:
            num, origin = table.num_keys, "num_keys"
        sizes.append(TableSize.of(table, num, origin))
    return tuple(sizes)
