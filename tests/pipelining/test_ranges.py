"""Ranges for a profiler: named like the spans of the trace, and ended in the thread that has begun them."""

import json
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from nestpipe import World
from nestpipe.device.ranges import ranges_on
from nestpipe.pipelining.schedule import Op
from nestpipe.pipelining.trace import Trace
from nestpipe.recipe.run import Summary, run
from nestpipe.recipe.text import load_config


class FakeNvtx:
    """Records what each thread begins and ends, as torch.cuda.nvtx would hand it to a profiler."""

    def __init__(self) -> None:
        self.open: defaultdict[int, list[str]] = defaultdict(list)
        self.begun: defaultdict[str, list[str]] = defaultdict(list)
        self.deepest = 0

    def range_push(self, msg: str) -> None:
        thread = threading.current_thread()
        self.open[threading.get_ident()].append(msg)
        self.begun["main" if thread is threading.main_thread() else thread.name].append(msg)
        self.deepest = max(self.deepest, len(self.open[threading.get_ident()]))

    def range_pop(self) -> None:
        self.open[threading.get_ident()].pop()  # IndexError if nothing is open here


@pytest.fixture
def nvtx(monkeypatch: pytest.MonkeyPatch) -> FakeNvtx:
    fake = FakeNvtx()
    monkeypatch.setattr("nestpipe.pipelining.trace.ranges_on", lambda device, is_wanted: fake if is_wanted else None)
    return fake


def run_small(*settings: str) -> Summary:
    small = (
        *("model.dim=4", "train.batch_size=16", "train.steps=3", "evaluate.num_samples=0", "store.num_threads=1"),
        *("runtime.dense_threads=1", "runtime.device=cpu", "pipeline.num_micro_batches=2"),
    )
    return run(load_config(None, (*small, *settings)).resolved(1, 1), World())


def range_name(event: dict[str, Any]) -> str:
    batch, part = event["args"]["batch"], event["args"]["micro_batch"]
    return f"{event['name']} {batch}" if part < 0 else f"{event['name']} {batch}.{part}"


def test_ranges_are_the_spans(nvtx: FakeNvtx, tmp_path: Path) -> None:
    """Fails if a range has no span, a span no range, a range stays open, or ranges change the result."""
    summary = run_small("logging.nvtx=true", f"logging.dir={tmp_path}")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = {(event["cat"] == "compute", range_name(event)) for event in events if event["ph"] == "X"}
    ranges = {(thread == "main", name) for thread, names in nvtx.begun.items() for name in names}
    assert ranges == spans
    assert {(True, "dense 2.0"), (True, "dense 2.1"), (False, "prefetch 0")} <= ranges
    assert [names for names in nvtx.open.values() if names] == []
    assert nvtx.deepest == 1
    assert run_small()["digest"] == summary["digest"]


def test_off_by_default(nvtx: FakeNvtx) -> None:
    run_small()
    assert not nvtx.begun


def test_errors_end_their_ranges(nvtx: FakeNvtx) -> None:
    """Fails if the range of an operation that fails stays open."""
    trace = Trace(nvtx=True)
    trace.begin_batch(0)
    for span in (trace.span("dense", 0), trace.lane_span(Op("retrieve", "host", 0))):
        with pytest.raises(ZeroDivisionError), span:
            raise ZeroDivisionError
    assert nvtx.begun["main"] == ["dense 0.0", "retrieve 0"]
    assert not nvtx.open[threading.get_ident()]


def test_ranges_are_for_cuda() -> None:
    """Fails if NVTX is called where it is not installed."""
    assert ranges_on(torch.device("cpu"), True) is None
    assert ranges_on(None, True) is None
    assert ranges_on(torch.device("cuda", 0), False) is None
    ranges = ranges_on(torch.device("cuda", 0), True)
    assert ranges is torch.cuda.nvtx
