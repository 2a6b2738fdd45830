"""KuaiRand (27K, 1K, Pure): logs of watched videos to histories, with the filter that published results use."""

from pathlib import Path

from nestpipe.datasets.find_files import find_variant
from nestpipe.datasets.histories import Events, prepare_histories
from nestpipe.datasets.text_files import WHOLE, TextFormat, read_header
from nestpipe.datasets.work import Prepared, Source, Work

COLUMNS = (
    *("user_id", "video_id", "date", "hourmin", "time_ms", "is_click", "is_like", "is_follow", "is_comment"),
    *("is_forward", "is_hate", "long_view", "play_time_ms", "duration_ms", "profile_stay_time"),
    *("comment_stay_time", "is_profile_enter", "is_rand", "tab"),
)
FOLDERS = {"27k": "KuaiRand-27K", "1k": "KuaiRand-1K", "pure": "KuaiRand-Pure"}
LEAST_PER_VIDEO, LEAST_PER_USER = 350, 20
READ = ("user_id", "video_id", "time_ms")


def standard_logs(variant: str) -> tuple[str, ...]:
    """In the order of their dates. The random log is another experiment and is not read."""
    parts = ("_part1", "_part2") if variant == "27k" else ("",)
    periods = ("4_08_to_4_21", "4_22_to_5_08")
    return tuple(f"log_standard_{period}_{variant}{part}.csv" for period in periods for part in parts)


def random_log(variant: str) -> str:
    return f"log_random_4_22_to_5_08_{variant}.csv"


def find_kuairand(source: Path) -> Source:
    places = {variant: ("", "data", f"{folder}/data", folder) for variant, folder in FOLDERS.items()}
    variant, stamps = find_variant(source, {name: standard_logs(name) for name in FOLDERS}, places)
    files = tuple(stamps)
    columns = read_header(files[0], ",", READ)
    for file in files[1:]:
        if read_header(file, ",", READ) != columns:
            raise ValueError(f"{file} line 1: has other columns than {files[0].name}; they must be the same")
    text_format = TextFormat(",", columns, dict.fromkeys(READ, WHOLE), has_header=True)
    return Source(f"kuairand-{variant}", files, text_format, stamps)


def prepare_kuairand(work: Work) -> Prepared:
    return prepare_histories(
        work, Events(*READ, ticks_a_second=1000, least_per_item=LEAST_PER_VIDEO, least_per_user=LEAST_PER_USER)
    )
