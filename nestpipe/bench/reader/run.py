"""`bench reader`: samples that the loader reads on one core against samples that training consumes.

Clicks: the demo, `nestpipe train` with one rank, its synthetic data and all threads, against the loader on clicks
prepared like Criteo's, in batches of the demo's size. Histories: the recipe hstu-ml-1m on histories prepared like
MovieLens-1M, against the loader of that recipe, negatives included.

The loader runs on a thread bound to one core, and so do the threads that it starts to read ahead. Files are in the page
cache. A pair is a stretch of training and an epoch of reading, from opening the files to the last batch, so nothing is
read ahead outside the measured time. reader_vs_demo is the ratio of their samples per second.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import torch

from nestpipe.bench.harness.benchmark import Benchmark
from nestpipe.bench.harness.pairs import compare, spread
from nestpipe.bench.harness.report import Record
from nestpipe.bench.harness.requirements import source_file
from nestpipe.bench.reader.data import write_clicks, write_histories
from nestpipe.data.dataset import Batches
from nestpipe.distributed import World
from nestpipe.recipe.build import build, build_source
from nestpipe.recipe.config import Config
from nestpipe.recipe.text import change_config, load_config
from nestpipe.store.cores import usable_cores

NUM_PAIRS, NUM_QUICK_PAIRS = 7, 1
WARM_STEPS = 5
ONCE = ["data.num_epochs=1"]
QUICK = ["train.batch_size=16"]


def records(quick: bool) -> Iterator[Record]:
    cores, num_pairs = usable_cores(), NUM_QUICK_PAIRS if quick else NUM_PAIRS
    with tempfile.TemporaryDirectory(prefix="nestpipe-reader-") as name:
        clicks, histories = Path(name) / "clicks", Path(name) / "histories"
        for folder in (clicks, histories):
            folder.mkdir()
        write_clicks(clicks, 2 if quick else 6, 8192 if quick else 65536)
        write_histories(histories)
        demo = load_config(None, ["evaluate.num_samples=0"])
        size = f"train.batch_size={demo.train.batch_size}"
        reading = load_config(source_file("recipes/dlrm-criteo-kaggle.toml"), [f"data.path={clicks}", size, *ONCE])
        yield measure("clicks", demo.resolved(1, cores), reading, 5 if quick else 30, num_pairs)
        hstu = load_config(
            source_file("recipes/hstu-ml-1m.toml"), [f"data.path={histories}", "evaluate.num_samples=0", *QUICK * quick]
        )
        reading = change_config(hstu, ONCE)
        yield measure("histories", hstu.resolved(1, cores), reading, 1 if quick else 4, num_pairs)


BENCHMARK = Benchmark(
    "reader",
    records,
    "The loader on one core against the speed of training: clicks for the demo, histories for an HSTU recipe.",
)


def measure(data: str, training: Config, reading: Config, num_steps: int, num_pairs: int) -> Record:
    """Compares reading an epoch with training `num_steps` steps, in pairs."""
    threads = training.runtime.dense_threads
    assert threads is not None
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(training.train.deterministic)
    this_run = build(training, World())
    this_run.trainer.fit(this_run.batches, 1 if num_pairs == NUM_QUICK_PAIRS else WARM_STEPS)
    core = max(os.sched_getaffinity(0))
    num_read: list[int] = []

    def read() -> None:
        num_read.append(
            sum(len(batch) for batch in Batches(build_source(reading).training(), reading.train.batch_size))
        )

    seconds = compare(
        lambda: on_one_core(core, read), lambda: this_run.trainer.fit(this_run.batches, num_steps), num_pairs
    )
    consumed = [num_steps * training.train.batch_size / s for s in seconds.baseline]
    read_rates = [num_read[-1] / s for s in seconds.ours]
    return {
        "data": data,
        "model": training.model.kind,
        "ranks": 1,
        "threads": threads,
        "reader_cores": 1,
        "schedule": training.pipeline.schedule,
        "batch_size": training.train.batch_size,
        "dim": training.model.dim,
        **spread("consumed_samples_per_second", consumed),
        **spread("read_samples_per_second", read_rates),
        **spread("reader_vs_demo", [r / c for r, c in zip(read_rates, consumed, strict=True)]),
    }


def on_one_core(core: int, work: Callable[[], None]) -> None:
    """Runs the work on a new thread that is bound to the core, as are all threads that it starts."""
    failures: list[BaseException] = []

    def bound() -> None:
        os.sched_setaffinity(0, {core})  # binds this thread alone
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = Thread(target=bound, name="nestpipe-one-core")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
