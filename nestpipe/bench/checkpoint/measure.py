"""Measures saves and loads of one rank, relative to plain writes and reads of the same disk."""

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

from nestpipe.bench.checkpoint.behind import Timeline, save_behind
from nestpipe.bench.checkpoint.files import drop_caches, fetch_memory, folder_bytes, read_plainly, write_plainly
from nestpipe.bench.checkpoint.training import (
    QUICK,
    TABLE,
    Size,
    fill,
    identity,
    make_trainer,
    touching_batches,
    zipf_batches,
)
from nestpipe.bench.harness.pairs import alternate, one_thread, spread
from nestpipe.bench.harness.report import Record
from nestpipe.checkpoint import row_reader, shards
from nestpipe.store import HostStore
from nestpipe.store.process_memory import peak_bytes, reset_peak, resident_bytes
from nestpipe.train.trainer import Trainer

TOUCHED_SHARE = 0.05


def measure(parent: Path, quick: bool) -> Iterator[Record]:
    size = QUICK if quick else Size()
    with tempfile.TemporaryDirectory(prefix="nestpipe-bench-", dir=parent) as name, one_thread():
        folder = Path(name)
        trainer = make_trainer(size)
        fill(trainer, size)
        batches = zipf_batches(size)
        trainer.fit(batches, steps=size.counted_between)
        saves = _Saves(trainer, folder)
        yield _save_vs_disk(saves, size)
        yield from _load_vs_disk(saves, size)
        timeline = save_behind(trainer, batches, folder / "behind", size)
        yield _stall(timeline, saves, size)
        shutil.rmtree(folder / "behind")
        yield _incremental(trainer, folder / "incremental", size)
        growth = [saves.growth_bytes, *(save.growth_bytes for save in timeline.saves)]
        yield {**_identity(size, saves), "num_saves": len(growth), "extra_memory_bytes": max(growth)}


class _Saves:
    """Complete saves, and plain writes of the same number of bytes."""

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        self.trainer = trainer
        self.checkpoints, self._plain = folder / "checkpoints", folder / "plain"
        self.growth_bytes = 0
        self.save()  # says how many bytes to write
        self.num_bytes = folder_bytes(self.checkpoints)

    def save(self) -> float:
        shutil.rmtree(self.checkpoints, ignore_errors=True)
        drop_caches(self.checkpoints)  # what was written before is on disk, and removed from it
        reset_peak()
        before = resident_bytes()
        started = time.perf_counter()
        self.trainer.save(self.checkpoints)
        seconds = time.perf_counter() - started
        self.growth_bytes = max(self.growth_bytes, peak_bytes() - before)
        return seconds

    def write_plainly(self) -> float:
        self._plain.unlink(missing_ok=True)
        drop_caches(self.checkpoints)
        seconds = write_plainly(self._plain, self.num_bytes)
        self._plain.unlink()
        return seconds


def _identity(size: Size, saves: _Saves) -> Record:
    return {**identity(size), "num_bytes": saves.num_bytes}


def _save_vs_disk(saves: _Saves, size: Size) -> Record:
    times = alternate({"ours": saves.save, "plain": saves.write_plainly}, size.num_pairs)
    return {
        **_identity(size, saves),
        "num_pairs": size.num_pairs,
        **_ratios("save_vs_disk", times),
        "save_seconds": statistics.median(times["ours"]),
        "write_seconds": statistics.median(times["plain"]),
    }


def _load_vs_disk(saves: _Saves, size: Size) -> Iterator[Record]:
    dropped_by = ""
    memory_bytes = 3 * saves.num_bytes  # a load needs its store, and as much for the files as a plain read does
    fetch_seconds: list[float] = []

    def load() -> float:
        nonlocal dropped_by
        trainer = make_trainer(size)
        dropped_by = drop_caches(saves.checkpoints)
        fetch_memory(memory_bytes)
        started = time.perf_counter()
        trainer.load(saves.checkpoints)
        seconds = time.perf_counter() - started
        if trainer.store.size(TABLE) != size.num_rows:
            raise RuntimeError(f"{trainer.store.size(TABLE)} rows were loaded, {size.num_rows} were saved")
        return seconds

    def read() -> float:
        drop_caches(saves.checkpoints)
        fetch_seconds.append(fetch_memory(memory_bytes))
        return read_plainly(saves.checkpoints)

    times = alternate({"ours": load, "plain": read}, size.num_pairs)
    yield {
        **_identity(size, saves),
        "caches_dropped_by": dropped_by,
        "num_pairs": size.num_pairs,
        **_ratios("load_vs_disk", times),
        "load_seconds": statistics.median(times["ours"]),
        "read_seconds": statistics.median(times["plain"]),
        "fetch_memory_seconds": statistics.median(fetch_seconds),
    }
    yield {**_identity(size, saves), **_parts_of_load(load)}


def _parts_of_load(load: Callable[[], float]) -> dict[str, float]:
    """Says where the time of one load goes. One thread reads and checks, another one imports meanwhile."""
    with _timed() as seconds:
        total = load()
    block, checksum = seconds["block"], seconds["checksum"]
    return {
        "instrumented_load_seconds": total,
        "reading_seconds": block - checksum,
        "checksum_seconds": checksum,
        "reserve_seconds": seconds["reserve"],
        "import_seconds": seconds["import"],
        "other_seconds": total - seconds["rows"],
    }


@contextmanager
def _timed() -> Iterator[dict[str, float]]:
    """Measures the parts of a load while this context lasts."""
    seconds: dict[str, float] = {}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        seconds[name] = 0.0

        @wraps(function)
        def call(*arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                seconds[name] += time.perf_counter() - started

        return call

    with ExitStack() as stack:
        for name, owner, attribute in (
            ("block", shards.ShardReader, "_read_block"),
            ("checksum", shards, "crc32c"),
            ("reserve", HostStore, "reserve"),
            ("import", HostStore, "import_piece"),
            ("rows", row_reader.RowReader, "read"),
        ):
            stack.enter_context(patch.object(owner, attribute, timed(name, getattr(owner, attribute))))
        yield seconds


def _stall(timeline: Timeline, saves: _Saves, size: Size) -> Record:
    seconds = [save.end_seconds - save.begin_seconds for save in timeline.saves]
    return {
        **_identity(size, saves),
        "num_saves": len(timeline.saves),
        **spread("stall_fraction", timeline.stall_fractions()),
        "num_waits": sum(save.num_waits for save in timeline.saves),
        "step_seconds": timeline.step_seconds(),
        "background_save_seconds": statistics.median(seconds),
        "steps_a_save": statistics.median(save.last_step - save.first_step for save in timeline.saves),
    }


def _incremental(trainer: Trainer, folder: Path, size: Size) -> Record:
    """Saves completely, changes some rows, and saves what has changed."""
    trainer.save(folder, keep=2, complete_every=10)
    complete = folder_bytes(folder)
    touched = touching_batches(size, TOUCHED_SHARE)
    trainer.fit(touched, steps=len(touched))
    started = time.perf_counter()
    trainer.save(folder, keep=2, complete_every=10)
    seconds = time.perf_counter() - started
    newest = folder_bytes(folder) - complete
    num_touched = sum(len(batch.keys[TABLE].values) for batch in touched)
    return {
        **identity(size),
        "num_bytes": complete,
        "touched_share": num_touched / size.num_rows,
        "incremental_bytes": newest,
        "incremental_bytes_vs_complete": newest / complete,
        "incremental_save_seconds": seconds,
    }


def _ratios(name: str, times: dict[str, list[float]]) -> dict[str, float]:
    """Returns our speed / the plain speed: the median of the pairs, and the range."""
    return spread(name, [plain / ours for ours, plain in zip(times["ours"], times["plain"], strict=True)])
