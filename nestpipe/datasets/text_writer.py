"""Columns to lines of text, a block at a time."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv

ROWS_A_BLOCK = 1 << 18

Columns = Mapping[str, Any]
"""name -> a pyarrow or numpy array"""


class TextWriter:
    def __init__(self, sink: Any, delimiter: str) -> None:
        self._sink = sink
        self._options = pa_csv.WriteOptions(
            include_header=False, delimiter=delimiter, quoting_style="none", batch_size=16384
        )

    def write_line(self, text: str) -> None:
        self._sink.write(text.encode() + b"\n")

    def write(self, columns: Columns) -> None:
        pa_csv.write_csv(pa.table(dict(columns)), self._sink, self._options)


@contextmanager
def text_file(path: Path, delimiter: str = ",") -> Iterator[TextWriter]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file, pa.PythonFile(file, mode="w") as sink:
        yield TextWriter(sink, delimiter)


def blocks(num_rows: int, first: int = 0) -> Iterator[tuple[int, int]]:
    """Where each block begins, and its number of rows."""
    for begin in range(first, first + num_rows, ROWS_A_BLOCK):
        yield begin, min(ROWS_A_BLOCK, first + num_rows - begin)


def shares(num_rows: int, weights: tuple[int, ...]) -> list[int]:
    """The rows of each file, by its weight; all together num_rows."""
    ends = [num_rows * sum(weights[: i + 1]) // sum(weights) for i in range(len(weights))]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
