"""MovieLens (1M, 20M): ratings to histories; every rating counts, and nothing is filtered."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nestpipe.data.synthetic.draws import Words, normal, stream, zipf_quantiles, zipf_values
from nestpipe.datasets.generate import blocks, text_file
from nestpipe.datasets.input_files import find_variant
from nestpipe.datasets.published import Published, register
from nestpipe.datasets.text_files import WHOLE, TextFormat, read_header
from nestpipe.datasets.work import Prepared, PublishedFiles, Work

if TYPE_CHECKING:
    import pyarrow as pa

FOLDERS = {"1m": "ml-1m", "20m": "ml-20m"}
RATINGS = {"1m": "ratings.dat", "20m": "ratings.csv"}
HEADER = ("userId", "movieId", "rating", "timestamp")
READ = ("userId", "movieId", "timestamp")

# Sizes of generated ratings:
USERS_A_BLOCK = 1024
LEAST_RATINGS = 20
MEDIAN_MORE_RATINGS = 50.0
LENGTH_SPREAD = 1.2
"""Standard deviation of the logarithm of a user's ratings above the least number."""
SKEW = 0.9
MOVIES = {"1m": (3_706, 3_952, 1_531), "20m": (26_744, 131_262, 49_999)}
"""Number of rated movies, the largest id, and a factor that is coprime to it."""
START = {"1m": 956_703_932, "20m": 789_652_009}
SECONDS_OF_A_USER = 90 * 86_400


def find_movielens(source: Path) -> PublishedFiles:
    names = {variant: (name,) for variant, name in RATINGS.items()}
    variant, stamps = find_variant(source, names, {variant: ("", folder) for variant, folder in FOLDERS.items()})
    files = tuple(stamps)
    fields = dict.fromkeys(READ, WHOLE)
    if variant == "1m":
        return PublishedFiles("movielens-1m", files, TextFormat("::", HEADER, fields, has_header=False), stamps)
    columns = read_header(files[0], ",", READ)
    return PublishedFiles("movielens-20m", files, TextFormat(",", columns, fields, has_header=True), stamps)


def prepare_movielens(work: Work) -> Prepared:
    from nestpipe.datasets.samples.histories import Events, prepare_histories  # pyarrow: slow to import

    return prepare_histories(work, Events(*READ, ticks_a_second=1, least_per_item=1, least_per_user=1))


def write_movielens(folder: Path, num_rows: int, seed: int, variant: str) -> list[Path]:
    """Writes ratings by user; the times of a user are in no order."""
    import pyarrow as pa  # slow to import
    import pyarrow.compute as pc

    path = folder / FOLDERS[variant] / RATINGS[variant]
    quantiles = zipf_quantiles(MOVIES[variant][0], SKEW)
    with text_file(path) as file:
        if variant == "20m":
            file.write_line(",".join(HEADER))
        for first, users in _users(num_rows, seed):
            for begin, count in blocks(len(users)):
                rows = np.arange(first + begin, first + begin + count)
                columns = _columns(rows, users[begin : begin + count], quantiles, seed, variant)
                if variant == "1m":
                    columns = [pc.binary_join_element_wise(*(c.cast(pa.string()) for c in columns), "::")]
                file.write({str(number): column for number, column in enumerate(columns)})
    return [path]


def _users(num_rows: int, seed: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yields the number of a block's first row, and the user of each of its rows."""
    first, first_user = 0, 1
    while first < num_rows:
        users = np.arange(first_user, first_user + USERS_A_BLOCK)
        more = MEDIAN_MORE_RATINGS * np.exp(LENGTH_SPREAD * normal(stream("length", seed, users)))
        repeated = np.repeat(users, LEAST_RATINGS + more.astype(np.int64))[: num_rows - first]
        yield first, repeated
        first, first_user = first + len(repeated), first_user + USERS_A_BLOCK


def _columns(
    rows: NDArray[np.int64], users: NDArray[np.int64], quantiles: Words, seed: int, variant: str
) -> list["pa.Array"]:
    import pyarrow as pa  # slow to import

    _, largest, factor = MOVIES[variant]
    movies = zipf_values(quantiles, stream("movie", seed, rows)) * np.uint64(factor) % np.uint64(largest) + np.uint64(1)
    begins = stream("begin", seed, users) % np.uint64(1_000 * 86_400)
    times = np.uint64(START[variant]) + begins + stream("time", seed, rows) % np.uint64(SECONDS_OF_A_USER)
    ratings = stream("rating", seed, rows) % np.uint64(5 if variant == "1m" else 10) + np.uint64(1)
    shown = (
        pa.array(ratings)
        if variant == "1m"
        else pa.array([f"{half / 2}" for half in range(11)]).take(pa.array(ratings))
    )
    return [pa.array(users), pa.array(movies), shown, pa.array(times)]


MOVIELENS = register(
    Published(
        name="movielens",
        variants=tuple(FOLDERS),
        samples="histories",
        summary="MovieLens: histories of rated movies.",
        find=find_movielens,
        prepare=prepare_movielens,
        write=write_movielens,
    )
)
