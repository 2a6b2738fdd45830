"""The section of a run's summary that names what is slow."""

import json
from dataclasses import asdict
from typing import Any

from nestpipe.diagnosis.findings import find
from nestpipe.diagnosis.measurements import measurements_of
from nestpipe.diagnosis.recorder import Recorder
from nestpipe.distributed import World
from nestpipe.recipe.run_log import RunLog
from nestpipe.train.fit_result import FitResult


def find_slow(recorder: Recorder, result: FitResult, world: World, log: RunLog) -> list[dict[str, Any]]:
    """Returns what is slow, and leaves the measurements in the run's folder. All ranks call it and get the same."""
    records = recorder.gather(result.times, result.work)
    found: list[dict[str, Any]] = []
    if records:
        log.write_measurements(records)
        found = [asdict(finding) for finding in find(measurements_of(records))]
    shared: list[dict[str, Any]] = json.loads(world.control.share_text(json.dumps(found))[0])
    return shared
