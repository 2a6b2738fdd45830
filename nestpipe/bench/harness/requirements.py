"""Requirements of benchmarks that an installed wheel may not meet: files of the source tree, optional packages."""

from importlib.util import find_spec
from pathlib import Path

SOURCE_TREE = Path(__file__).parents[3]


class RequirementError(Exception):
    """A benchmark lacks a file or a package; the text names the remedy."""


def source_file(name: str) -> Path:
    """Returns the path of a file of the source tree, such as "benchmarks/targets.toml"."""
    path = SOURCE_TREE / name
    if not path.exists():
        raise RequirementError(f"{name} comes with the source tree, not with the wheel; run this benchmark in a clone")
    return path


def require_duckdb() -> None:
    if find_spec("duckdb") is None:
        raise RequirementError("this benchmark needs DuckDB; install it with `pip install 'nestpipe[datasets]'`")
