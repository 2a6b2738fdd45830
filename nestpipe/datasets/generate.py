"""Files in the published formats, with made-up contents: skewed and unsorted as the real ones are."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nestpipe.datasets.generate_criteo import write_criteo
from nestpipe.datasets.generate_kuairand import write_kuairand
from nestpipe.datasets.generate_movielens import write_movielens

Write = Callable[[Path, int, int, str], list[Path]]
"""Takes folder, number of rows, seed and variant; gives the files it wrote."""


@dataclass(frozen=True)
class _Generated:
    variants: tuple[str, ...]
    """the first is the default"""
    write: Write


_FORMATS = {
    "kuairand": _Generated(("27k", "1k", "pure"), write_kuairand),
    "movielens": _Generated(("1m", "20m"), write_movielens),
    "criteo": _Generated(("kaggle", "terabyte"), write_criteo),
}


def generate(data_format: str, target: Path, num_rows: int, *, seed: int = 0, variant: str | None = None) -> list[Path]:
    """In a new or empty folder. The bytes depend on format, variant, number of rows and seed alone."""
    if data_format not in _FORMATS:
        raise ValueError(f"there is no format {data_format!r}; formats are {', '.join(_FORMATS)}")
    generated = _FORMATS[data_format]
    variant = generated.variants[0] if variant is None else variant
    if variant not in generated.variants:
        raise ValueError(f"{data_format} has no variant {variant!r}; variants are {', '.join(generated.variants)}")
    if num_rows < 1:
        raise ValueError(f"the number of rows is {num_rows}, must be at least 1")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists and is not an empty folder; give another, or remove it first")
    target.mkdir(parents=True, exist_ok=True)
    return generated.write(target, num_rows, seed, variant)
