"""Generates files in the published formats, as skewed and as unsorted as the real ones."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nestpipe.datasets.published import find_format

ROWS_A_BLOCK = 1 << 18

Columns = Mapping[str, Any]
"""Name -> a pyarrow or numpy array."""


def generate(data_format: str, target: Path, num_rows: int, *, seed: int = 0, variant: str | None = None) -> list[Path]:
    """Writes to a new or empty folder. The bytes depend on format, variant, number of rows and seed alone."""
    published = find_format(data_format)
    variant = published.variants[0] if variant is None else variant
    if variant not in published.variants:
        raise ValueError(f"{data_format} has no variant {variant!r}; variants are {', '.join(published.variants)}")
    if num_rows < 1:
        raise ValueError(f"the number of rows is {num_rows}, must be at least 1")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists and is not an empty folder; give another, or remove it first")
    target.mkdir(parents=True, exist_ok=True)
    return published.write(target, num_rows, seed, variant)


class TextWriter:
    """Writes columns as lines of text."""

    def __init__(self, sink: Any, delimiter: str) -> None:
        import pyarrow.csv as pa_csv  # slow to import

        self._sink = sink
        self._options = pa_csv.WriteOptions(
            include_header=False, delimiter=delimiter, quoting_style="none", batch_size=16384
        )

    def write_line(self, text: str) -> None:
        self._sink.write(text.encode() + b"\n")

    def write(self, columns: Columns) -> None:
        import pyarrow as pa
        import pyarrow.csv as pa_csv

        pa_csv.write_csv(pa.table(dict(columns)), self._sink, self._options)


@contextmanager
def text_file(path: Path, delimiter: str = ",") -> Iterator[TextWriter]:
    import pyarrow as pa  # slow to import

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file, pa.PythonFile(file, mode="w") as sink:
        yield TextWriter(sink, delimiter)


def blocks(num_rows: int, first: int = 0) -> Iterator[tuple[int, int]]:
    """Yields the first row and the number of rows of each block."""
    for begin in range(first, first + num_rows, ROWS_A_BLOCK):
        yield begin, min(ROWS_A_BLOCK, first + num_rows - begin)


def shares(num_rows: int, weights: tuple[int, ...]) -> list[int]:
    """Divides rows among files in proportion to their weights."""
    ends = [num_rows * sum(weights[: i + 1]) // sum(weights) for i in range(len(weights))]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
