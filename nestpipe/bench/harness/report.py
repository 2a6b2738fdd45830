"""Running a benchmark and writing down its records with the environment."""

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import nestpipe
from nestpipe.store.cores import usable_cores

MOST_ACROSS = 4
"""records side by side: what a terminal shows without cutting them off"""

Record = Mapping[str, int | float | str | bool]
"""Flat: what identifies the measurement (dim, threads, method, ...) and what was measured."""


@dataclass(frozen=True)
class Environment:
    cpu: str
    cores: int
    torch: str
    python: str
    load_before: float
    load_after: float
    busy: bool
    """Something else was running: the figures are worth less."""
    accelerator: str | None = None
    """as its driver names it, with their number if there are several; None: the machine has none, as in all below"""
    driver: str | None = None
    cuda: str | None = None
    """that torch was built with"""


@dataclass(frozen=True)
class BenchResult:
    bench: str
    version: str
    quick: bool
    environment: Environment
    records: list[Record]


def run_bench(
    name: str, make_records: Callable[[], Iterator[Record]], path: Path, console: Console, *, quick: bool
) -> BenchResult:
    """Runs it, with progress on the way, and writes `path`. If it fails, what it had found is beside it, `.partial`."""
    load_before = os.getloadavg()[0]
    started = time.perf_counter()
    records: list[Record] = []
    partial = path.with_name(f"{path.name}.partial")
    made = make_records()
    try:
        for record in made:
            records.append(record)
            partial.write_text(json.dumps(records, indent=2) + "\n")
            seconds = time.perf_counter() - started
            line = f"{seconds:6.1f} s  record {len(records)}: {_identity(record)}"
            console.print(line, highlight=False, soft_wrap=True)
    finally:
        if isinstance(made, Generator):
            made.close()  # whatever happened here: what it has made for its measurements is removed
    environment = Environment(
        cpu=_cpu_name(),
        cores=usable_cores(),
        torch=torch.__version__,
        python=platform.python_version(),
        load_before=load_before,
        load_after=os.getloadavg()[0],
        busy=load_before > 0.5,
        **_accelerator(),
    )
    if environment.busy:
        console.print(f"the machine was busy when this started (load average {load_before:.2f})", style="yellow")
    result = BenchResult(name, nestpipe.__version__, quick, environment, records)
    path.write_text(json.dumps(asdict(result), indent=2) + "\n")
    partial.unlink(missing_ok=True)
    return result


def load_records(path: Path, bench: str) -> list[Record]:
    """Of a result that `run_bench` wrote for this benchmark."""
    try:
        result = json.loads(path.read_text())
        name, records = result["bench"], result["records"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a result of `nestpipe bench {bench} --json`: {error!r}") from None
    if name != bench:
        raise ValueError(f"{path} is a result of bench {name}, not of bench {bench}")
    return list(records)


def print_records(result: BenchResult, console: Console) -> None:
    """A block for each kind of record, that is, for each set of fields: fields down, records across."""
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
    """The leading fields that are not measurements."""
    named = [f"{name} {value}" for name, value in record.items() if not isinstance(value, float)]
    return ", ".join(named)


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _accelerator() -> dict[str, str | None]:
    """Of this machine; also where a benchmark does not use it."""
    if not torch.accelerator.is_available():
        return {}
    count, is_cuda = torch.accelerator.device_count(), torch.cuda.is_available()
    name = torch.cuda.get_device_name(0) if is_cuda else torch.accelerator.current_accelerator()
    return {
        "accelerator": f"{count} x {name}" if count > 1 else str(name),
        "driver": _driver_version(),
        "cuda": torch.version.cuda,
    }


def _driver_version() -> str | None:
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None
