"""Measures the whole command `nestpipe data prepare`, on generated logs in KuaiRand's format."""

import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from nestpipe.bench.harness.memory import peak_of_command
from nestpipe.bench.harness.pairs import compare
from nestpipe.bench.harness.report import Record
from nestpipe.bench.harness.requirements import require_duckdb
from nestpipe.data.files.manifest import MANIFEST, read_manifest
from nestpipe.datasets.engine import MEMORY_BYTES, num_threads
from nestpipe.datasets.generate import generate
from nestpipe.datasets.kuairand import COLUMNS, find_kuairand
from nestpipe.datasets.target_folder import UNFINISHED
from nestpipe.distributed.child import die_with_parent

SEED = 1
NUM_PAIRS = 5
QUICK_ROWS = 100_000
KILLED_AT = (0.2, 0.5, 0.8)
"""Progress at which runs are killed, one after the other. A last run starts over and completes."""


def measure(num_rows: int, quick: bool) -> Iterator[Record]:
    require_duckdb()
    num_rows = QUICK_ROWS if quick else num_rows
    with tempfile.TemporaryDirectory(prefix="nestpipe-bench-") as folder:
        logs = _Logs(Path(folder), num_rows)
        generate("kuairand", logs.source, num_rows, seed=SEED)
        yield _speed_and_memory(logs, 1 if quick else NUM_PAIRS)
        yield _killed_runs(logs, (0.0,) if quick else KILLED_AT)


@dataclass
class _Logs:
    """Generated logs, and the command that prepares them."""

    folder: Path
    num_rows: int
    peaks: list[int] = field(default_factory=list)

    @property
    def source(self) -> Path:
        return self.folder / "source"

    @property
    def target(self) -> Path:
        return self.folder / "prepared"

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "nestpipe", "data", "prepare", "kuairand", str(self.source), str(self.target)]

    def remove_target(self) -> None:
        shutil.rmtree(self.target, ignore_errors=True)

    def prepare(self) -> None:
        self.remove_target()
        self.peaks.append(peak_of_command(self.command))

    def read(self) -> None:
        """Sums every column of the same files with the same engine, threads and memory."""
        import duckdb

        names = ", ".join(f"'{file}'" for file in find_kuairand(self.source).files)
        types = ", ".join(f"'{name}': 'BIGINT'" for name in COLUMNS)
        sums = ", ".join(f"sum({name})" for name in COLUMNS)
        with duckdb.connect(config={"threads": num_threads(), "memory_limit": f"{MEMORY_BYTES}B"}) as connection:
            connection.execute(
                f"SELECT {sums} FROM read_csv([{names}], header = true, auto_detect = false, columns = {{{types}}})"
            ).fetchall()


def _speed_and_memory(logs: _Logs, num_pairs: int) -> Record:
    pairs = compare(logs.prepare, logs.read, num_pairs)
    prepare_seconds = statistics.median(pairs.ours)
    manifest = read_manifest(logs.target)
    return {
        **_identity(logs),
        "num_pairs": num_pairs,
        "input_bytes": sum(manifest.inputs.values()),
        "kept_events": manifest.counts["events"],
        **pairs.fields("prepare_vs_read"),
        "prepare_seconds": prepare_seconds,
        "read_seconds": statistics.median(pairs.baseline),
        "prepare_rows_per_second": logs.num_rows / prepare_seconds,
        "peak_rss_bytes": max(logs.peaks),
    }


def _killed_runs(logs: _Logs, shares: tuple[float, ...]) -> Record:
    checksum = read_manifest(logs.target).checksum()
    logs.remove_target()
    num_killed = sum(_start_and_kill(logs, share) for share in shares)
    if num_killed == len(shares):
        peak_of_command(logs.command)
    same = read_manifest(logs.target).checksum() == checksum
    return {
        **_identity(logs),
        "num_killed": num_killed,
        "same_manifest": int(same and num_killed == len(shares)),
    }


def _start_and_kill(logs: _Logs, share: float) -> bool:
    """Kills a run that has reported this share as done. Returns False if the run had already ended."""
    with subprocess.Popen(logs.command, stdout=subprocess.PIPE, text=True, preexec_fn=die_with_parent) as child:
        assert child.stdout is not None
        for line in child.stdout:
            reported = re.search(r": (\d+)% of all", line)
            if reported is not None and int(reported.group(1)) >= 100 * share:
                break
        child.kill()
    return (logs.target / UNFINISHED).exists() and not (logs.target / MANIFEST).exists()


def _identity(logs: _Logs) -> Record:
    return {"data": "kuairand-27k", "num_rows": logs.num_rows, "threads": num_threads(), "seed": SEED}
