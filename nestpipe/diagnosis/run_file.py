"""The file of measurements in a run's folder."""

import json
from collections.abc import Sequence
from pathlib import Path

from nestpipe.diagnosis.measurements import Measurements, measurements_of
from nestpipe.diagnosis.recorder import RankRecord

MONITOR = "monitor.json"
"""Name of the file in logging.dir."""


def write_records(records: Sequence[RankRecord], folder: Path) -> None:
    (folder / MONITOR).write_text(json.dumps({"ranks": list(records)}) + "\n")


def read_measurements(folder: Path) -> Measurements:
    """Reads the measurements of a run. Raises ValueError if there are none, with the reason and the remedy."""
    path = folder / MONITOR
    if not path.exists():
        raise ValueError(
            f"{folder} has no {MONITOR}. A run of several ranks writes it when it ends, after at least 13 steps: "
            f"`nestpipe train --ranks 2 --set logging.dir={folder}`"
        )
    try:
        return measurements_of(json.loads(path.read_text())["ranks"])
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{path} is not a file that `nestpipe train` has written: {error!r}") from None
