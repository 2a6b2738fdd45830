"""Clicks in the format of Criteo, made up: values by Zipf's law, some missing."""

from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nestpipe.data.synthetic.draws import Floats, Words, normal, stream, zipf_quantiles, zipf_values
from nestpipe.datasets.clicks import NUM_DENSE, NUM_SPARSE
from nestpipe.datasets.criteo import DAYS, KAGGLE_FILE
from nestpipe.datasets.text_writer import Columns, blocks, shares, text_file

NUM_VALUES = (
    *(40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10),
    *(2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36),
)
"""of each categorical field, in the published data"""
MOST_VALUES = 1_000_000
ROWS_A_VALUE = 4
SKEW = 1.1
CLICKED = 0.25
MISSING = 0.1
"""of the values of every third field"""
_HEX = np.array([b"%04x" % number for number in range(1 << 16)])


def write_criteo(folder: Path, num_rows: int, seed: int, variant: str) -> list[Path]:
    if variant == "terabyte" and num_rows < len(DAYS):
        raise ValueError(f"{num_rows} rows are fewer than {len(DAYS)} days; give every day one at least")
    names = [KAGGLE_FILE] if variant == "kaggle" else list(DAYS)
    most = max(3, min(MOST_VALUES, num_rows // ROWS_A_VALUE))
    quantiles = [zipf_quantiles(min(number, most), SKEW) for number in NUM_VALUES]
    files, first = [], 0
    for name, rows in zip(names, shares(num_rows, (1,) * len(names)), strict=True):
        with text_file(folder / name, "\t") as file:
            for begin, count in blocks(rows, first):
                file.write(_columns(np.arange(begin, begin + count), quantiles, seed))
        files.append(folder / name)
        first += rows
    return files


def _columns(rows: NDArray[np.int64], quantiles: list[Words], seed: int) -> Columns:
    columns = {"label": pa.array((_uniform("click", seed, rows) < CLICKED).astype(np.int8))}
    for field in range(NUM_DENSE):
        counts = np.exp(2.0 * normal(stream(f"dense {field}", seed, rows))).astype(np.int64) - field % 2
        columns[f"dense_{field}"] = pa.array(counts, mask=_missing("dense", field, seed, rows))
    for field in range(NUM_SPARSE):
        values = zipf_values(quantiles[field], stream(f"sparse {field}", seed, rows))
        keys = (stream(f"key {field}", 0, values) >> 32).astype(np.uint64)
        columns[f"key_{field}"] = _hex(keys, _missing("sparse", field, seed, rows))
    return columns


def _uniform(purpose: str, seed: int, rows: NDArray[np.int64]) -> Floats:
    draws: Floats = (stream(purpose, seed, rows) >> 11).astype(np.float64) * 2.0**-53
    return draws


def _missing(kind: str, field: int, seed: int, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
    share = MISSING if field % 3 == 2 else 0.0
    return _uniform(f"{kind} {field} missing", seed, rows) < share


def _hex(keys: Words, missing: NDArray[np.bool_]) -> pa.Array:
    """Eight digits each."""
    halves = np.stack([_HEX[keys >> 16], _HEX[keys & 0xFFFF]], axis=1)
    offsets = np.arange(0, 8 * len(keys) + 1, 8, dtype=np.int32)
    valid = pa.py_buffer(np.packbits(~missing, bitorder="little"))
    return pa.StringArray.from_buffers(
        len(keys), pa.py_buffer(offsets), pa.py_buffer(halves), valid, int(missing.sum())
    )
