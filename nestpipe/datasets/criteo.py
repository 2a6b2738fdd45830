"""Criteo (Kaggle, Terabyte): clicks with 13 numbers and 26 categories, in time order."""

from pathlib import Path

from nestpipe.datasets.clicks import NUM_DENSE, NUM_SPARSE, prepare_clicks
from nestpipe.datasets.find_files import find_variant
from nestpipe.datasets.text_files import HEX, INTEGER, LABEL, TextFormat
from nestpipe.datasets.work import Prepared, Source, Work

KAGGLE_FILE = "train.txt"
DAYS = tuple(f"day_{day}" for day in range(24))
FIELDS = (
    {"label": LABEL}
    | {f"dense_{number}": INTEGER for number in range(NUM_DENSE)}
    | {f"key_{number}": HEX for number in range(NUM_SPARSE)}
)
HELD_OUT = 7
"""one part in so many, the last one, of the Kaggle file; of the days it is the last day"""


def find_criteo(source: Path) -> Source:
    """All days must be there: with fewer of them it would be another data set under the same name."""
    variants = {"kaggle": (KAGGLE_FILE,), "terabyte": DAYS}
    variant, files = find_variant(source, variants, dict.fromkeys(variants, ("",)))
    return Source(f"criteo-{variant}", tuple(files), TextFormat("\t", tuple(FIELDS), FIELDS, has_header=False), files)


def prepare_criteo(work: Work) -> Prepared:
    return prepare_clicks(work, held_out_share=HELD_OUT if len(work.source.files) == 1 else None)
