"""Measures what splitting a batch costs: trains it several times without applying anything to the run.

Trial steps have a store of their own, and the dense optimizer takes no step. So the run's rows, parameters, buffers and
random numbers stay as they are. Costs come from schedule serial, in which nothing hides or delays anything else. Some
steps of the run's own schedule show what its lanes take from each other, such as cores.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import torch

from nestpipe.data.batch import Batch
from nestpipe.device.generators import forked_generators
from nestpipe.distributed import Notice, World
from nestpipe.embedding.crossing import Crossing
from nestpipe.embedding.dedup import dedup_batch
from nestpipe.embedding.exchange import make_exchange
from nestpipe.embedding.group import group_features
from nestpipe.embedding.read import HOST
from nestpipe.embedding.route import Route
from nestpipe.pipelining import light
from nestpipe.pipelining.options import PipelineOptions
from nestpipe.pipelining.pipeline import Pipeline
from nestpipe.pipelining.schedule import CROSSING
from nestpipe.pipelining.setup import can_cross
from nestpipe.pipelining.stage import STAGES
from nestpipe.pipelining.step_times import StepTimes
from nestpipe.pipelining.trace import Trace
from nestpipe.prediction.split_costs import BACKWARD, FORWARD, ExchangeCost, Line, SplitCosts, TimesOrNumber, Traffic
from nestpipe.prediction.work import Times, Way
from nestpipe.train.check_split import restored
from nestpipe.train.trainer import Trainer

MOST_MEASURED = 8
"""Larger of the two numbers of micro-batches that are measured; the other is 1."""
WARM_UP_STEPS, COUNTED_STEPS = 2, 4
FILLING_STEPS, FULL_STEPS, DRAINING_STEPS = 3, 5, 2
"""Steps of the run's own schedule: those in the middle count."""
COLLECTIVES = ("route", "reduce", "commit")
EXCHANGES = ("send_rows", "return_gradients")
FIELDS = (FORWARD, BACKWARD, *(stage for stage in STAGES if stage != "dense"))


def crosses_batches(trainer: Trainer) -> bool:
    """Returns whether the trainer exchanges rows and gradients across batches."""
    options = trainer.options
    return trainer.world.size > 1 and options.schedule in CROSSING and can_cross(trainer.world, options)


def measure(
    trainer: Trainer, batches: Sequence[Batch | None], most_parts: int, candidates: Sequence[int]
) -> SplitCosts | None:
    """Measures the first batch at two numbers of micro-batches. All ranks call it and get the same. Returns None if it
    does not count as a step.

    batches: the first two of this rank; None where its data has ended. most_parts: largest number to measure, at least
    2. candidates: numbers that are to be predicted.
    """
    world, high = trainer.world, min(MOST_MEASURED, most_parts)
    with _untouched(trainer):
        unsplit, split = (_Trial.of(trainer, batches[0], num) for num in (1, high))
        if unsplit is None or split is None:
            return None
        step_ms = {num: _own_step_ms(trainer, batches, num) for num in (1, high)}

    def line(name: str) -> Line:
        return _line(unsplit.own_ms(name), split.own_ms(name), high)

    def together(name: str) -> Line:
        return _line(unsplit.together_ms(name), split.together_ms(name), high)

    def exchange(name: str, num_bytes: Callable[[Traffic], float]) -> ExchangeCost:
        points = [
            (num, num_bytes(traffic[num]), trial.together_ms(name)) for num, trial in ((1, unsplit), (high, split))
        ]
        return _exchange_cost(*points)

    traffic, hit_rate, late_share = _counted(trainer, batches, sorted({1, high, *candidates}))
    return SplitCosts(
        way=Way(trainer.options.schedule, trainer.options.schedule, cross_batch=crosses_batches(trainer)),
        num_ranks=world.size,
        has_issuer=world.issuer is not None,
        stages={name: line(name) for name in FIELDS if name not in (*COLLECTIVES, *EXCHANGES)},
        collectives={name: together(name) for name in COLLECTIVES},
        rows=exchange("send_rows", lambda traffic: traffic.all_rows),
        gradients=exchange("return_gradients", lambda traffic: traffic.all_gradients),
        traffic=traffic,
        hit_rate=hit_rate,
        late_share=late_share,
        measured_step_ms=step_ms,
    )


@contextmanager
def _untouched(trainer: Trainer) -> Iterator[None]:
    """Restores in the end what trial steps change."""
    world = trainer.world
    notice, world.notice = world.notice, Notice()  # a request to stop is for the training
    try:
        with restored(trainer.model), forked_generators(world.device):
            yield
    finally:
        world.notice = notice
        trainer.model.zero_grad()


class _Stopwatch(AbstractContextManager[None]):
    """Adds up the time that is spent in it, lap by lap."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._lap_ms = 0.0
        self.laps_ms: list[float] = []

    def end_lap(self) -> None:
        self.laps_ms.append(self._lap_ms)
        self._lap_ms = 0.0

    def __enter__(self) -> None:
        self._world.finish_device()
        self._since = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._world.finish_device()
        self._lap_ms += (time.perf_counter() - self._since) * 1e3


@dataclass(frozen=True)
class _Trial:
    """Milliseconds of some trial steps: [ranks, steps, FIELDS]."""

    times: Times

    @staticmethod
    def of(trainer: Trainer, batch: Batch | None, num_micro_batches: int) -> "_Trial | None":
        """Trains the batch several times. Returns None if it does not count as a step."""
        world, num_steps = trainer.world, WARM_UP_STEPS + COUNTED_STEPS
        stopwatch = _Stopwatch(world)
        options = {"schedule": "serial", "stale": False, "num_micro_batches": num_micro_batches}
        steps = _trained(trainer, [batch], num_steps, options, stopwatch)
        if len(steps) < num_steps:
            return None
        own = torch.tensor([_fields(*pair) for pair in zip(steps, stopwatch.laps_ms, strict=True)], dtype=torch.float64)
        own = own[WARM_UP_STEPS:].flatten()
        by_rank = world.control.all_to_all_equal(own.expand(world.size, -1))
        return _Trial(by_rank.view(world.size, COUNTED_STEPS, len(FIELDS)).numpy())

    def own_ms(self, name: str) -> Times:
        """Returns the time of each rank."""
        times: Times = np.median(self.times[:, :, FIELDS.index(name)], axis=1)
        return times

    def together_ms(self, name: str) -> float:
        """Returns the time of a collective. The rank that comes last to it does not wait."""
        return float(np.median(self.times[:, :, FIELDS.index(name)].min(axis=0)))


def _own_step_ms(trainer: Trainer, batches: Sequence[Batch | None], num_micro_batches: int) -> float:
    """Returns the step of the run's own schedule, of the slowest rank, if the batches come in turns."""
    num_steps = FILLING_STEPS + FULL_STEPS + DRAINING_STEPS
    steps = _trained(trainer, batches, num_steps, {"num_micro_batches": num_micro_batches})
    own = torch.tensor([step.step_ms for step in steps[FILLING_STEPS:-DRAINING_STEPS]], dtype=torch.float64)
    by_rank = trainer.world.control.all_to_all_equal(own.expand(trainer.world.size, -1))
    return float(by_rank.amax(0).median())


def _trained(
    trainer: Trainer,
    batches: Sequence[Batch | None],
    num_steps: int,
    options: Mapping[str, Any],
    stopwatch: "_Stopwatch | None" = None,
) -> list[StepTimes]:
    """Trains batches in turns, and returns the times of the steps. stopwatch: gets a lap for the forwards of each."""
    steps: list[StepTimes] = []
    own = itertools.cycle([batch for batch in batches if batch is not None])
    with Pipeline(
        trainer.features,
        itertools.islice(own, num_steps),
        store=trainer.empty_store(),
        world=trainer.world,
        steps=num_steps,
        trace=Trace(steps, device=trainer.world.device),
        light_stages=light.LightStages(light.LIGHT_SECONDS),
        **{**trainer.pipeline_options(), "device_budget_bytes": None, "resident_bytes": "minimum", **options},
    ) as pipeline:
        for step in pipeline:
            trainer.compute_gradients(step, stopwatch or nullcontext())
            step.update_rows()
            if stopwatch is not None:
                stopwatch.end_lap()
    return steps


def _fields(times: StepTimes, forward_ms: float) -> list[float]:
    backward_ms = max(0.0, times.stages["dense"] - forward_ms)
    return [forward_ms, backward_ms, *(times.stages[stage] for stage in FIELDS[2:])]


def _line(unsplit_ms: TimesOrNumber, split_ms: TimesOrNumber, num: int) -> Line:
    """Returns the line through two points. Splitting makes nothing shorter: what seems so is noise."""
    return Line(unsplit_ms, np.maximum(0.0, (split_ms - unsplit_ms) / (num - 1)))


def _exchange_cost(*points: tuple[int, float, float]) -> ExchangeCost:
    """Returns the cost that explains two points: number of exchanges, bytes and milliseconds of a batch."""
    (few, few_bytes, few_ms), (many, many_bytes, many_ms) = points
    if few_bytes == 0:
        return ExchangeCost(few_ms / few, 0.0)
    growth = many_bytes / few_bytes
    latency_ms = min(max(0.0, (many_ms - growth * few_ms) / (many - growth * few)), few_ms / few)
    return ExchangeCost(latency_ms, (few_ms - few * latency_ms) / few_bytes)


def _counted(
    trainer: Trainer, batches: Sequence[Batch | None], numbers: Sequence[int]
) -> tuple[dict[int, Traffic], float, float]:
    """Returns what `_Keys.counted` does. In a world of one nothing travels."""
    if trainer.world.size == 1:
        return {num: Traffic((0.0,) * num, (0.0,) * num) for num in numbers}, 0.0, 0.0
    return _Keys(trainer, batches).counted(numbers)


class _Keys:
    """The keys of the first two batches, which tell how many bytes travel when."""

    def __init__(self, trainer: Trainer, batches: Sequence[Batch | None]) -> None:
        self._world = world = trainer.world
        self._options = PipelineOptions(**trainer.pipeline_options())
        self._crosses = crosses_batches(trainer)
        self._batches = batches
        self._groups = group_features(trainer.features, pools_at_owner=world.size > 1)
        self._exchange = make_exchange(world.evaluate, world.evaluate, world.evaluate, HOST, self._options.codecs)

    def counted(self, numbers: Sequence[int]) -> tuple[dict[int, Traffic], float, float]:
        """Returns the traffic by number of micro-batches, the share of owned keys that the batch before has, too, and
        that of gradients which may be late."""
        traffic, shared, late_share = {}, 0.0, 0.0
        for num in numbers:
            before, after = (self._route(batch, num) for batch in self._batches)
            crossing = self._exchange.compare(before, after, self._options.late_gradients, self._options.num_threads)
            traffic[num] = self._traffic(before, after, crossing if self._crosses else None)
            marks = [marks.owned for marks in crossing.early]
            shared, owned = self._sums([sum(int((~m).sum()) for m in marks), sum(map(len, marks))])
            late_share = traffic[num].late_gradients / max(traffic[num].all_gradients, 1.0)
        return traffic, shared / max(owned, 1.0), late_share

    def _route(self, batch: Batch | None, num: int) -> Route:
        options = self._options
        dedup = dedup_batch(
            self._groups, batch, num, self._exchange.num_owners, options.num_threads, options.clustering
        )
        route = self._exchange.route(dedup, self._groups, Notice())
        assert route is not None  # some rank has a batch
        return route

    def _traffic(self, before: Route, after: Route, crossing: Crossing | None) -> Traffic:
        early, late = (None, None) if crossing is None else (crossing.early, crossing.late)
        plan = self._exchange.plan(after, self._options.window, early, has_returns=False)
        returns = self._exchange.plan_returns(before, self._options.window, late)
        assert plan is not None
        assert returns is not None
        rows = plan.sends.rows_in.num_bytes if plan.sends.num_early else [0, *plan.sends.rows_in.num_bytes]
        gradients = [*returns.gradients_out.num_bytes, *(() if returns.has_late else (0,))]
        for part, sums in ((-2, returns.replica_sums), (-1, returns.late_replica_sums)):
            gradients[part] += sums.sums_out.num_bytes[0] if sums is not None else 0
        most = self._by_rank([*rows, *gradients]).amax(0).tolist()
        rows, gradients = most[: len(rows)], most[len(rows) :]
        return Traffic(tuple(rows[1:]), tuple(gradients[:-1]), rows[0], gradients[-1])

    def _sums(self, numbers: Sequence[float]) -> list[float]:
        sums: list[float] = self._by_rank(numbers).sum(0).tolist()
        return sums

    def _by_rank(self, numbers: Sequence[float]) -> torch.Tensor:
        own = torch.tensor(numbers, dtype=torch.float64)
        return self._world.control.all_to_all_equal(own.expand(self._world.size, -1))
