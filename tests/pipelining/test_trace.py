"""How busy lanes are. Fails if Trace adds up what lanes do at the same time: an exchange could then be busy for longer
than the step takes, and what a perfect overlap allows would be less than what was measured."""

import threading
import time

from nestpipe.pipelining.schedule import Op
from nestpipe.pipelining.trace import Trace


def test_two_lanes_at_once_are_busy_once() -> None:
    trace = Trace()
    trace.begin_batch(0)
    together = threading.Barrier(2)

    def work(stage: str, lane: str) -> None:
        together.wait()
        with trace.lane_span(Op(stage, lane, 0, 0)):
            together.wait()
            time.sleep(0.05)
            together.wait()

    begin = time.perf_counter()
    lanes = [threading.Thread(target=work, args=of) for of in (("bring", "rows"), ("take", "gradients"))]
    for lane in lanes:
        lane.start()
    for lane in lanes:
        lane.join()
    with trace.lane_span(Op("retrieve", "host", 1)):
        time.sleep(0.01)
    with trace.lane_span(Op("write_back", "host", 0)):
        time.sleep(0.01)
    trace.end_step(4)
    took_ms = (time.perf_counter() - begin) * 1e3
    (step,) = trace.steps
    assert step.busy["busy_host_ms"] >= 20
    assert step.busy["busy_exchange_ms"] >= 50
    assert step.busy["busy_exchange_ms"] + step.busy["busy_host_ms"] <= took_ms
    assert "busy_input_ms" not in step.busy  # nothing was read on a lane
