"""Files in the published formats, with made-up contents."""

from pathlib import Path


def generate(data_format: str, target: Path, num_rows: int, *, seed: int = 0, variant: str | None = None) -> list[Path]:
    raise ValueError(f"{data_format} cannot be generated yet")
