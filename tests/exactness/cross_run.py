"""Trains several ranks with the model, in an order that a seed chooses, and compares them with plain training."""

from collections import Counter
from random import Random

from tests.exactness.cross_model import CrossPool
from tests.exactness.cross_parts import Channels, GlobalBatch, choose_cross_fit, train_plainly
from tests.exactness.cross_rank import Setting
from tests.exactness.cross_trainer import CrossTrainer
from tests.exactness.pool_model_parts import Store
from tests.exactness.pool_model_time import Actor, RuleError, take_turns


class _AllDone:
    """Is done once all ranks have trained, and their devices have done all work."""

    is_runnable = False

    def __init__(self, ranks: list[CrossTrainer]) -> None:
        self._ranks = ranks

    @property
    def done(self) -> bool:
        return all(rank.is_done for rank in self._ranks)

    def advance(self) -> None:
        raise NotImplementedError


class CrossRun:
    """Plays one seed. `broken`: the switch that is on, if any."""

    def __init__(self, seed: int, broken: str | None = None) -> None:
        self._draw = draw = Random(seed)
        self._size = draw.choice([1, 2, 2, 2, 3])
        self._has_device = draw.random() < 0.75
        self._has_issuer = self._has_device and draw.random() < 0.65
        self._is_one_by_one = draw.random() < 0.3
        self._keys = list(range(self._size * draw.randint(3, 7)))
        is_clean_first, stretch = draw.random() < 0.5, draw.randint(1, 3)
        self._pools = [CrossPool(Store(), stretch, is_clean_first, broken) for _ in range(self._size)]
        most = len(self._keys) // self._size + 1
        for pool in self._pools:
            pool.slots.grow(draw.choice([0, 0, 0, draw.randrange(most), most]))
        self._first_step = 0

    @property
    def seen(self) -> Counter[str]:
        return sum((pool.seen for pool in self._pools), Counter())

    def play(self) -> None:
        """Plays one or two fits with the same pools. Raises RuleError."""
        untrained: list[GlobalBatch] = []
        for _ in range(self._draw.randint(1, 2)):
            self._open(untrained)
            for rank in self._ranks:
                rank.lanes["compute"].queue.append(rank.train())
            lanes = {id(lane): lane for rank in self._ranks for lane in rank.lanes.values()}
            streams = [stream for rank in self._ranks for stream in rank.streams.values()] if self._has_device else []
            self._pool_of = {id(rank.lanes["host"]): rank.pool for rank in self._ranks}
            take_turns([_AllDone(self._ranks), *lanes.values(), *streams], self._draw, self._check_turn)
            self._first_step += self._check_end()
            first = self._ranks[0].batches
            open_batches = [i for i, batch in enumerate(first) if batch.updated is None or batch.is_masked]
            untrained = [self._fit.batches[i] for i in open_batches][:2]

    def _open(self, untrained: list[GlobalBatch]) -> None:
        draw = self._draw
        self._fit = fit = choose_cross_fit(draw, self._size, self._keys, untrained)
        rows = {key: row for pool in self._pools for key, row in pool.store.rows.items()}
        self._expected = train_plainly(rows, fit, self._first_step)
        for number, pool in enumerate(self._pools):
            is_failing = fit.store_fault is not None and fit.store_fault[0] == number
            pool.store.calls_until_fault = fit.store_fault[1] if is_failing else -1
        setting = Setting(
            fit=fit,
            expected=self._expected,
            first_step=self._first_step,
            channels=Channels(self._size),
            has_device=self._has_device,
            has_issuer=self._has_issuer,
            is_one_by_one=self._is_one_by_one,
            is_early_first=draw.random() < 0.5,
        )
        self._ranks = [CrossTrainer(number, pool, setting) for number, pool in enumerate(self._pools)]

    def _check_turn(self, actor: Actor) -> None:
        if (pool := self._pool_of.get(id(actor))) is not None:
            pool.slots.check()

    def _check_end(self) -> int:
        """Checks what a fit has left. Returns the number of steps that it has applied."""
        numbers = {self._num_applied(rank) for rank in self._ranks}
        if numbers != {self._num_expected()}:
            raise RuleError(f"wrong steps: {numbers} were applied, not {self._num_expected()}")
        for rank in self._ranks:
            rank.pool.close()
            rank.pool.slots.check_clean(rank.pool.store)
        return self._num_expected()

    def _num_applied(self, rank: CrossTrainer) -> int:
        return sum(batch.updated is not None and not batch.is_masked for batch in rank.batches)

    def _num_expected(self) -> int:
        fit = self._fit
        failed = {rank.failed_route for rank in self._ranks} - {None}
        failed |= {i for rank in self._ranks for i, batch in enumerate(rank.batches) if batch.has_failed}
        most = [fit.last_step + 1, 99 if fit.left_step is None else fit.left_step]
        return min(len(self._expected.states) - 1, *most, *map(fit.step, failed))
