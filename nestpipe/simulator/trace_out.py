"""Writes a simulated timeline as a trace, in the format of real ones."""

import json
from pathlib import Path

from nestpipe.prediction.work import Way
from nestpipe.recipe.trace_file import events_of
from nestpipe.simulator.cluster import Cluster
from nestpipe.simulator.simulate import play_case
from nestpipe.simulator.trace_times import HAS_ISSUER

MOST_WORKERS = 4
"""Workers in a trace; more would be hard to read."""


def write_simulated_trace(cluster: Cluster, num_workers: int, way: Way, path: Path) -> None:
    """Writes the first workers, as the ranks of a trace. `nestpipe report` and ui.perfetto.dev show it."""
    traced = range(min(MOST_WORKERS, num_workers))
    played = play_case(cluster, num_workers, way, traced)
    events = [
        event
        for worker in traced
        for event in events_of(sorted(played.spans[worker], key=lambda span: span.begin_ns), worker, 0)
    ]
    about = {
        "simulated": 1,
        HAS_ISSUER: int(cluster.network.has_issuer),
        "workers": num_workers,
        "first_step": 0,
        "end_step": cluster.run.steps,
    }
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}))
