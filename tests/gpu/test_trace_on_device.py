"""Tests that a trace shows when a device's streams work, not when the host enqueues.

Fails if Trace._end_on_device makes spans of the host's times: dense spans would be as short as their launches.
"""

import time
from itertools import pairwise

import pytest
import torch

from nestpipe import World
from nestpipe.train.fit_result import FitResult
from tests.exactness.cases import Case, global_batches, make_trainer

CYCLES = 40_000_000
"""About 20 ms."""


def sleep_ms() -> float:
    """Returns the time that the device takes for CYCLES."""
    begin, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(CYCLES)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


@pytest.mark.parametrize("schedule", ["serial", "inter"])
def test_a_long_kernel_is_a_long_span(device: str, schedule: str) -> None:
    if device != "cuda":
        pytest.skip("needs CUDA, whose streams can sleep; runs on a machine with CUDA")
    trainer = make_trainer(World(device=device), Case("adagrad", "pooled_sum", 1, schedule=schedule))
    trainer.check_split = False
    trainer.model.register_forward_pre_hook(lambda *_: torch.cuda._sleep(CYCLES))  # the host returns at once
    begin_ns = time.perf_counter_ns()
    result = trainer.fit(global_batches(6), result=FitResult(spans=[]))
    end_ns = time.perf_counter_ns()
    dense = sorted((s for s in result.spans if (s.stage, s.micro_batch) == ("dense", 0)), key=lambda s: s.begin_ns)
    assert [span.batch for span in dense] == list(range(6))
    expected_ms = sleep_ms()
    for span, times in zip(dense, result.times, strict=True):
        lasted_ms = (span.end_ns - span.begin_ns) / 1e6
        assert lasted_ms >= 0.8 * expected_ms  # the clock of the device may have changed
        assert lasted_ms <= times.stages["dense"] + 0.1
        assert begin_ns <= span.begin_ns + 1e6
        assert span.end_ns <= end_ns + 1e6
    compute_times = sorted((span.begin_ns, span.end_ns) for span in result.spans if span.lane == "compute")
    assert all(end <= begin + 1e5 for (_, end), (begin, _) in pairwise(compute_times))
    lanes = {span.lane for span in result.spans}
    assert lanes >= ({"compute"} if schedule == "serial" else {"compute", "host", "input", "upload", "route"})
