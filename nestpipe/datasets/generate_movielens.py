"""Ratings in the format of MovieLens, made up: user after user, their times in no order."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from nestpipe.data.synthetic.draws import Words, normal, stream, zipf_quantiles, zipf_values
from nestpipe.datasets.movielens import FOLDERS, HEADER, RATINGS
from nestpipe.datasets.text_writer import blocks, text_file

USERS_A_BLOCK = 1024
LEAST, MEDIAN_MORE, SPREAD = 20, 50.0, 1.2
"""ratings of a user: these, and so many more, with this standard deviation of their logarithm"""
SKEW = 0.9
MOVIES = {"1m": (3_706, 3_952, 1_531), "20m": (26_744, 131_262, 49_999)}
"""rated movies, the largest number of one, and a factor that has no divisor in common with it"""
START = {"1m": 956_703_932, "20m": 789_652_009}
SECONDS_OF_A_USER = 90 * 86_400


def write_movielens(folder: Path, num_rows: int, seed: int, variant: str) -> list[Path]:
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
    """The number of a first row, and the users of it and the rows after it."""
    first, first_user = 0, 1
    while first < num_rows:
        users = np.arange(first_user, first_user + USERS_A_BLOCK)
        more = MEDIAN_MORE * np.exp(SPREAD * normal(stream("length", seed, users)))
        repeated = np.repeat(users, LEAST + more.astype(np.int64))[: num_rows - first]
        yield first, repeated
        first, first_user = first + len(repeated), first_user + USERS_A_BLOCK


def _columns(
    rows: NDArray[np.int64], users: NDArray[np.int64], quantiles: Words, seed: int, variant: str
) -> list[pa.Array]:
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
