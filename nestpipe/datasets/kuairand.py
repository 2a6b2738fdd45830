"""KuaiRand (27K, 1K, Pure): logs of watched videos to histories, with the filter that published results use."""

from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nestpipe.data.synthetic.draws import Words, stream, zipf_quantiles, zipf_values
from nestpipe.datasets.generate import Columns, blocks, shares, text_file
from nestpipe.datasets.input_files import find_variant
from nestpipe.datasets.published import Published, register
from nestpipe.datasets.text_files import WHOLE, TextFormat, read_header
from nestpipe.datasets.work import Prepared, PublishedFiles, Work

COLUMNS = (
    *("user_id", "video_id", "date", "hourmin", "time_ms", "is_click", "is_like", "is_follow", "is_comment"),
    *("is_forward", "is_hate", "long_view", "play_time_ms", "duration_ms", "profile_stay_time"),
    *("comment_stay_time", "is_profile_enter", "is_rand", "tab"),
)
READ = ("user_id", "video_id", "time_ms")
FOLDERS = {"27k": "KuaiRand-27K", "1k": "KuaiRand-1K", "pure": "KuaiRand-Pure"}
LEAST_PER_VIDEO, LEAST_PER_USER = 350, 20

# Sizes of generated logs:
ROWS_A_USER, ROWS_A_VIDEO = 200, 10
"""Means, unless the variant has fewer users or videos."""
USER_SKEW, VIDEO_SKEW = 0.7, 1.05
NUM_USERS = {"27k": 27_285, "1k": 1_000, "pure": 27_285}
NUM_VIDEOS = {"27k": 8_000_000, "1k": 4_000_000, "pure": 7_551}
FLAGS = ("is_click", "is_like", "is_follow", "is_comment", "is_forward", "is_hate", "long_view", "is_profile_enter")
STANDARD_ROWS_A_RANDOM_ROW = 50
_CHINA = timezone(timedelta(hours=8))
_DAY_MS = 86_400_000


def standard_logs(variant: str) -> tuple[str, ...]:
    """Returns the file names in the order of their dates. The random log is another experiment and is not read."""
    parts = ("_part1", "_part2") if variant == "27k" else ("",)
    periods = ("4_08_to_4_21", "4_22_to_5_08")
    return tuple(f"log_standard_{period}_{variant}{part}.csv" for period in periods for part in parts)


def random_log(variant: str) -> str:
    return f"log_random_4_22_to_5_08_{variant}.csv"


def find_kuairand(source: Path) -> PublishedFiles:
    places = {variant: ("", "data", f"{folder}/data", folder) for variant, folder in FOLDERS.items()}
    variant, stamps = find_variant(source, {name: standard_logs(name) for name in FOLDERS}, places)
    files = tuple(stamps)
    columns = read_header(files[0], ",", READ)
    for file in files[1:]:
        if read_header(file, ",", READ) != columns:
            raise ValueError(f"{file} line 1: has other columns than {files[0].name}; they must be the same")
    text_format = TextFormat(",", columns, dict.fromkeys(READ, WHOLE), has_header=True)
    return PublishedFiles(f"kuairand-{variant}", files, text_format, stamps)


def prepare_kuairand(work: Work) -> Prepared:
    from nestpipe.datasets.samples.histories import Events, prepare_histories  # pyarrow: slow to import

    return prepare_histories(
        work, Events(*READ, ticks_a_second=1000, least_per_item=LEAST_PER_VIDEO, least_per_user=LEAST_PER_USER)
    )


def write_kuairand(folder: Path, num_rows: int, seed: int, variant: str) -> list[Path]:
    """Writes `num_rows` lines of standard logs, and a random log: ids by Zipf's law, lines in no order of time."""
    draw = _Draw(num_rows, seed, variant)
    data = folder / FOLDERS[variant] / "data"
    names = standard_logs(variant)
    weights = (21, 21, 29, 29) if len(names) == 4 else (42, 58)
    files, first = [], 0
    for number, (name, rows) in enumerate(zip(names, shares(num_rows, weights), strict=True)):
        days = (14, 0) if number < len(names) // 2 else (17, 14)
        files.append(_write_log(data / name, draw, first, rows, *days, is_random=False))
        first += rows
    num_random = num_rows // STANDARD_ROWS_A_RANDOM_ROW + 1
    files.append(_write_log(data / random_log(variant), draw, first, num_random, 17, 14, is_random=True))
    return files


def _write_log(
    path: Path, draw: "_Draw", first: int, num_rows: int, num_days: int, first_day: int, *, is_random: bool
) -> Path:
    with text_file(path) as file:
        file.write_line(",".join(COLUMNS))
        for begin, count in blocks(num_rows, first):
            file.write(draw.columns(begin, count, num_days, first_day, is_random))
    return path


class _Draw:
    def __init__(self, num_rows: int, seed: int, variant: str) -> None:
        self._seed = seed
        self._num_users = max(4, min(NUM_USERS[variant], num_rows // ROWS_A_USER))
        self._num_videos = max(20, min(NUM_VIDEOS[variant], num_rows // ROWS_A_VIDEO))
        self._users = zipf_quantiles(self._num_users, USER_SKEW)
        self._videos = zipf_quantiles(self._num_videos, VIDEO_SKEW)

    def columns(self, first: int, count: int, num_days: int, first_day: int, is_random: bool) -> Columns:
        rows = np.arange(first, first + count)
        words = {name: stream(name, self._seed, rows) for name in ("user", "video", "time", "flags", "watched")}
        time_ms = _times(words["time"], num_days, first_day)
        days = (time_ms - _start_ms()) // _DAY_MS
        duration = 3_000 + (words["watched"] >> 40) % 57_000
        columns = {
            "user_id": _scattered(zipf_values(self._users, words["user"]), self._num_users),
            "video_id": _scattered(zipf_values(self._videos, words["video"]), self._num_videos),
            "date": _dates()[days],
            "hourmin": (time_ms - _start_ms()) % _DAY_MS // 3_600_000 * 100,
            "time_ms": time_ms,
            "play_time_ms": (words["watched"] & 0xFFFF) % (2 * duration),
            "duration_ms": duration,
            "profile_stay_time": np.where(words["flags"] & 0x700 == 0, words["flags"] >> 48, 0),
            "comment_stay_time": np.where(words["flags"] & 0x3800 == 0, words["flags"] >> 50, 0),
            "is_rand": np.full(count, is_random, dtype=np.int64),
            "tab": words["flags"] >> 20 & 7,
        }
        for bit, name in enumerate(FLAGS):
            columns[name] = words["flags"] >> (24 + bit) & 1
        return {name: columns[name] for name in COLUMNS}


def _start_ms() -> int:
    return int(datetime(2022, 4, 8, tzinfo=_CHINA).astimezone(UTC).timestamp()) * 1000


def _dates() -> NDArray[np.int64]:
    """Returns 20220408, 20220409, ..."""
    first = datetime(2022, 4, 8, tzinfo=_CHINA)
    return np.array([int((first + timedelta(days=day)).strftime("%Y%m%d")) for day in range(32)])


def _times(words: Words, num_days: int, first_day: int) -> NDArray[np.int64]:
    """Returns times in milliseconds. A quarter are whole seconds, so that some events of a user are simultaneous."""
    times = (words % np.uint64(num_days * _DAY_MS)).astype(np.int64) + _start_ms() + first_day * _DAY_MS
    return np.where(words >> 62 == 0, times // 1000 * 1000, times)


def _scattered(ranks: Words, num_values: int) -> Words:
    """Returns an id below 2 * num_values for each rank by popularity, such that popular and rare ids are mixed."""
    bits = int(num_values - 1).bit_length()
    numbers: Words = ranks * np.uint64(0x9E3779B1) & np.uint64(2**bits - 1)
    return numbers


KUAIRAND = register(
    Published(
        name="kuairand",
        variants=tuple(FOLDERS),
        samples="histories",
        summary="KuaiRand: histories of watched videos.",
        find=find_kuairand,
        prepare=prepare_kuairand,
        write=write_kuairand,
    )
)
