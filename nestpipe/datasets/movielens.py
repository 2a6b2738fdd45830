"""MovieLens (1M, 20M): ratings to histories; every rating counts, and nothing is filtered."""

from pathlib import Path

from nestpipe.datasets.find_files import find_variant
from nestpipe.datasets.histories import Events, prepare_histories
from nestpipe.datasets.text_files import WHOLE, TextFormat, read_header
from nestpipe.datasets.work import Prepared, Source, Work

FOLDERS = {"1m": "ml-1m", "20m": "ml-20m"}
RATINGS = {"1m": "ratings.dat", "20m": "ratings.csv"}
HEADER = ("userId", "movieId", "rating", "timestamp")
READ = ("userId", "movieId", "timestamp")


def find_movielens(source: Path) -> Source:
    names = {variant: (name,) for variant, name in RATINGS.items()}
    variant, stamps = find_variant(source, names, {variant: ("", folder) for variant, folder in FOLDERS.items()})
    files = tuple(stamps)
    fields = dict.fromkeys(READ, WHOLE)
    if variant == "1m":
        return Source("movielens-1m", files, TextFormat("::", HEADER, fields, has_header=False), stamps)
    columns = read_header(files[0], ",", READ)
    return Source("movielens-20m", files, TextFormat(",", columns, fields, has_header=True), stamps)


def prepare_movielens(work: Work) -> Prepared:
    return prepare_histories(work, Events(*READ, ticks_a_second=1, least_per_item=1, least_per_user=1))
