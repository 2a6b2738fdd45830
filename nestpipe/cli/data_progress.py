"""Shows the progress of a preparation, as a bar on a terminal and as lines elsewhere, and its result."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from nestpipe.data.files.manifest import Manifest

SHARE_A_LINE = 0.1
"""Share of the whole between two lines of one stage."""

Report = Callable[[str, float], None]
"""Takes the stage and the share of the whole that is done, 0 to 1."""


@contextmanager
def show_stages(console: Console) -> Iterator[Report]:
    if not console.is_terminal:
        yield _Lines(console)
        return
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=1.0)

        def report(stage: str, done: float) -> None:
            bar.update(task, description=stage, completed=done)

        yield report


class _Lines:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.monotonic()
        self._shown: tuple[str, float] = ("", 0.0)

    def __call__(self, stage: str, done: float) -> None:
        last_stage, last_done = self._shown
        if stage == last_stage and done < last_done + SHARE_A_LINE:
            return
        self._shown = stage, done
        seconds = time.monotonic() - self._started
        left = f", about {seconds / done - seconds:.0f} s left" if 0.02 < done < 1 else ""
        self._console.print(f"{stage}: {done:.0%} of all, {seconds:.1f} s{left}", highlight=False, soft_wrap=True)


def show_prepared(manifest: Manifest, target: Path, console: Console) -> None:
    """Prints counts, sizes and the checksum."""
    for name, count in manifest.counts.items():
        console.print(f"{name.replace('_', ' ')}: {count:,}", highlight=False)
    num_bytes = sum(file.num_bytes for file in manifest.files)
    console.print(f"{target}: {len(manifest.files)} files, {num_bytes:,} bytes", highlight=False, soft_wrap=True)
    console.print(f"checksum of the manifest: {manifest.checksum()}", highlight=False, soft_wrap=True)
