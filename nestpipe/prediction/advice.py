"""What another number of micro-batches would give, by the times of a run.

A run shows the dense compute and the exchange of its own number only. So another number is predicted as if it split the
same work into equal parts, and as if splitting cost nothing. Everything else of a step stays as it is.
"""

from collections.abc import Mapping, Sequence

from nestpipe.pipelining.schedule import WINDOWED
from nestpipe.prediction.choose import CANDIDATES, MARGIN
from nestpipe.prediction.split_costs import BACKWARD, FORWARD, ExchangeCost, Line, SplitCosts, Traffic, play_split
from nestpipe.prediction.words import REMEDIES, SHORT, shortage
from nestpipe.prediction.work import Way

BYTES = ("exchanged_row_bytes_per_step", "exchanged_gradient_bytes_per_step")


def advice(fields: Mapping[str, float], way: Way, num: int, num_ranks: int, has_issuer: bool = False) -> str:
    """Returns a sentence on the number of micro-batches of a run. fields: those of its summary."""
    if num_ranks == 1:
        return "one rank exchanges nothing, so splitting a batch into micro-batches would only add work"
    if fields["step_ms"] == 0:
        return "no step was trained, so that another number of micro-batches cannot be predicted"
    exchange_ms = max(fields["exposed_exchange_ms"], fields["busy_exchange_ms"])
    if way.schedule not in WINDOWED:
        remedy = f'schedule = "{"nested" if way.schedule == "inter" else "intra"}" hides it'
        return (
            f"schedule {way.schedule} exchanges nothing while it computes, so another number of micro-batches would "
            f"hide nothing of {exchange_ms:.1f} ms of exchange; pipeline.{remedy}"
        )
    step_ms, exposed_ms = fields["step_ms"], fields["exposed_exchange_ms"]
    if exposed_ms < SHORT * step_ms:
        return (
            f"another number of micro-batches would give nothing: {exposed_ms:.1f} ms of {exchange_ms:.1f} ms of "
            f"exchange stay exposed, in a step of {step_ms:.1f} ms"
        )
    numbers = sorted({*CANDIDATES, num})
    costs = _costs(fields, way, numbers, has_issuer, exchange_ms)
    steps = {n: play_split(costs, n).step_ms for n in numbers}
    best = min(n for n in steps if steps[n] <= (1 + MARGIN) * min(steps.values()))
    return _sentence(fields, num, best, step_ms * steps[best] / steps[num], exchange_ms)


def _sentence(fields: Mapping[str, float], num: int, best: int, best_ms: float, exchange_ms: float) -> str:
    step_ms, dense_ms, exposed_ms = fields["step_ms"], fields["dense_ms"], fields["exposed_exchange_ms"]
    short = shortage(dense_ms, exchange_ms, exposed_ms, step_ms)
    if best <= num:
        held = f"{num} micro-batches leave {exposed_ms:.1f} ms of exchange exposed, and more would not hide more"
        return f"{held}. {short or f'To shorten the exchange, take {REMEDIES}'}"
    better = f"{best} micro-batches would take about {best_ms:.1f} ms a step instead of {step_ms:.1f}"
    why = f"dense compute of {dense_ms:.1f} ms would then cover more of {exchange_ms:.1f} ms of exchange"
    return f"{better}, if splitting cost nothing: {why}{f'. {short}' if short else ''}"


def _costs(
    fields: Mapping[str, float], way: Way, numbers: Sequence[int], has_issuer: bool, exchange_ms: float
) -> SplitCosts:
    """Returns costs of equal parts. The rest of a step is work of the compute lane, as long as it was."""
    rows, gradients = (fields[name] for name in BYTES)
    share = rows / (rows + gradients) if rows + gradients > 0 else 0.5
    across = 1 - fields["hit_rate"] if way.cross_batch else 0.0
    rest_ms = fields["step_ms"] - fields["dense_ms"] - fields["exposed_exchange_ms"]
    return SplitCosts(
        way=way,
        num_ranks=2,  # all ranks are equal; a rank alone would exchange nothing
        has_issuer=has_issuer,
        stages={FORWARD: Line(fields["dense_ms"]), BACKWARD: Line(0.0), "other": Line(max(0.0, rest_ms))},
        collectives={},
        rows=ExchangeCost(0.0, share * exchange_ms),
        gradients=ExchangeCost(0.0, (1 - share) * exchange_ms),
        traffic={num: _equal_parts(num, across) for num in numbers},
    )


def _equal_parts(num: int, across: float) -> Traffic:
    parts = ((1 - across) / num,) * num
    return Traffic(parts, parts, across, across)
