"""Runs a benchmark, and writes its records together with the environment."""

import json
import os
import platform
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import nestpipe
from nestpipe.device.machine import accelerator, cpu_name
from nestpipe.store.cores import usable_cores

MOST_ACROSS = 4
"""Records printed side by side; more would not fit a terminal."""

Record = Mapping[str, int | float | str | bool]
"""Flat mapping: fields that identify the measurement (dim, threads, method, ...), and measured values."""


@dataclass(frozen=True)
class Environment:
    cpu: str
    cores: int
    torch: str
    python: str
    load_before: float
    load_after: float
    busy: bool
    """Whether something else was running at the start, which makes the figures less reliable."""
    accelerator: str | None = None
    """Name, preceded by the number of devices if there are several. This and the rest are None without one."""
    driver: str | None = None
    cuda: str | None = None
    """Version that torch was built with."""


@dataclass(frozen=True)
class BenchResult:
    bench: str
    version: str
    quick: bool
    environment: Environment
    records: list[Record]


def run_bench(name: str, records: Iterator[Record], path: Path, console: Console, *, quick: bool) -> BenchResult:
    """Iterates over the records, prints a line for each, and writes them to `path`.

    If the benchmark fails, the records made so far are in `path` with `.partial` appended to its name.
    """
    load_before = os.getloadavg()[0]
    started = time.perf_counter()
    made: list[Record] = []
    partial = path.with_name(f"{path.name}.partial")
    try:
        for record in records:
            made.append(record)
            partial.write_text(json.dumps(made, indent=2) + "\n")
            seconds = time.perf_counter() - started
            line = f"{seconds:6.1f} s  record {len(made)}: {_identity(record)}"
            console.print(line, highlight=False, soft_wrap=True)
    finally:
        if isinstance(records, Generator):
            records.close()  # an error here must not keep the benchmark from removing its files, ranks and hosts
    environment = Environment(
        cpu=cpu_name(),
        cores=usable_cores(),
        torch=torch.__version__,
        python=platform.python_version(),
        load_before=load_before,
        load_after=os.getloadavg()[0],
        busy=load_before > 0.5,
        **accelerator(),
    )
    if environment.busy:
        console.print(f"the machine was busy at the start (load average {load_before:.2f})", style="yellow")
    result = BenchResult(name, nestpipe.__version__, quick, environment, made)
    path.write_text(json.dumps(asdict(result), indent=2) + "\n")
    partial.unlink(missing_ok=True)
    return result


def load_records(path: Path, bench: str) -> list[Record]:
    """Reads the records of a result that `run_bench` wrote for this benchmark."""
    try:
        result = json.loads(path.read_text())
        name, records = result["bench"], result["records"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a result of `nestpipe bench {bench} --json`: {error!r}") from None
    if name != bench:
        raise ValueError(f"{path} is a result of bench {name}, not of bench {bench}")
    return list(records)


def print_records(result: BenchResult, console: Console) -> None:
    """Prints a table for each set of fields that records have: fields down, records across."""
    kinds: dict[tuple[str, ...], list[Record]] = {}
    for record in result.records:
        kinds.setdefault(tuple(record), []).append(record)
    for fields, records in kinds.items():
        for first in range(0, len(records), MOST_ACROSS):
            table = Table(box=None, show_header=False, pad_edge=False)
            for field in fields:
                table.add_row(field, *(_text(record[field]) for record in records[first : first + MOST_ACROSS]))
            console.print()
            console.print(table)


def _identity(record: Record) -> str:
    """Lists the fields that are not measurements."""
    named = [f"{name} {value}" for name, value in record.items() if not isinstance(value, float)]
    return ", ".join(named)


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
