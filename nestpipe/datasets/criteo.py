"""Criteo (Kaggle, Terabyte): clicks with 13 numbers and 26 categories, in time order."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nestpipe.data.files.prepared import NUM_DENSE, NUM_FIELDS
from nestpipe.data.synthetic.draws import Words, normal, stream, uniform, zipf_quantiles, zipf_values
from nestpipe.datasets.generate import Columns, blocks, shares, text_file
from nestpipe.datasets.input_files import find_variant
from nestpipe.datasets.published import Published, register
from nestpipe.datasets.text_files import HEX, INTEGER, LABEL, TextFormat
from nestpipe.datasets.work import Prepared, PublishedFiles, Work

if TYPE_CHECKING:
    import pyarrow as pa

KAGGLE_FILE = "train.txt"
DAYS = tuple(f"day_{day}" for day in range(24))
VARIANT_FILES = {"kaggle": (KAGGLE_FILE,), "terabyte": DAYS}
FIELDS = (
    {"label": LABEL}
    | {f"dense_{number}": INTEGER for number in range(NUM_DENSE)}
    | {f"key_{number}": HEX for number in range(NUM_FIELDS)}
)
HELD_OUT_SHARE = 7
"""The last 1 / HELD_OUT_SHARE of the Kaggle file is held out; of the Terabyte files it is the last day."""

# Sizes of generated clicks:
NUM_VALUES = (
    *(40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10),
    *(2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36),
)
"""Distinct values of each categorical field in the published data."""
MOST_VALUES = 1_000_000
ROWS_A_VALUE = 4
SKEW = 1.1
CLICKED_SHARE = 0.25
MISSING_SHARE = 0.1
"""Share of missing values in every third field."""
_HEX = np.array([b"%04x" % number for number in range(1 << 16)])


def find_criteo(source: Path) -> PublishedFiles:
    """Requires all days: fewer would be another data set under the same name."""
    variant, stamps = find_variant(source, VARIANT_FILES, dict.fromkeys(VARIANT_FILES, ("",)))
    text_format = TextFormat("\t", tuple(FIELDS), FIELDS, has_header=False)
    return PublishedFiles(f"criteo-{variant}", tuple(stamps), text_format, stamps)


def prepare_criteo(work: Work) -> Prepared:
    from nestpipe.datasets.samples.clicks import prepare_clicks  # pyarrow: slow to import

    return prepare_clicks(work, held_out_share=HELD_OUT_SHARE if len(work.source.files) == 1 else None)


def write_criteo(folder: Path, num_rows: int, seed: int, variant: str) -> list[Path]:
    """Writes clicks whose categories follow Zipf's law; some values are missing."""
    names = VARIANT_FILES[variant]
    if num_rows < len(names):
        raise ValueError(f"{num_rows} rows are fewer than {len(DAYS)} days; give every day one at least")
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
    import pyarrow as pa  # slow to import

    is_click = uniform(stream("click", seed, rows)) < CLICKED_SHARE
    columns = {"label": pa.array(is_click.astype(np.int8))}
    for field in range(NUM_DENSE):
        counts = np.exp(2.0 * normal(stream(f"dense {field}", seed, rows))).astype(np.int64) - field % 2
        columns[f"dense_{field}"] = pa.array(counts, mask=_is_missing("dense", field, seed, rows))
    for field in range(NUM_FIELDS):
        values = zipf_values(quantiles[field], stream(f"sparse {field}", seed, rows))
        keys = (stream(f"key {field}", 0, values) >> 32).astype(np.uint64)
        columns[f"key_{field}"] = _hex(keys, _is_missing("sparse", field, seed, rows))
    return columns


def _is_missing(kind: str, field: int, seed: int, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
    share = MISSING_SHARE if field % 3 == 2 else 0.0
    return uniform(stream(f"{kind} {field} missing", seed, rows)) < share


def _hex(keys: Words, is_missing: NDArray[np.bool_]) -> "pa.Array":
    """Returns eight hexadecimal digits for each key."""
    import pyarrow as pa  # slow to import

    halves = np.stack([_HEX[keys >> 16], _HEX[keys & 0xFFFF]], axis=1)
    offsets = np.arange(0, 8 * len(keys) + 1, 8, dtype=np.int32)
    is_valid = pa.py_buffer(np.packbits(~is_missing, bitorder="little"))
    return pa.StringArray.from_buffers(
        len(keys), pa.py_buffer(offsets), pa.py_buffer(halves), is_valid, int(is_missing.sum())
    )


CRITEO = register(
    Published(
        name="criteo",
        variants=tuple(VARIANT_FILES),
        samples="clicks",
        summary="Criteo: clicks with 13 dense inputs and 26 categorical features.",
        find=find_criteo,
        prepare=prepare_criteo,
        write=write_criteo,
    )
)
