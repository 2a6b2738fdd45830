"""The compute lane of a rank, for the model of the exchange across batches: plays the list, commits, and flushes."""

from functools import partial

from tests.exactness.cross_list import CrossOp, late_operations, operations
from tests.exactness.cross_model import CrossBatch, CrossPool
from tests.exactness.cross_rank import CrossRank, Setting
from tests.exactness.pool_model_time import RuleError, Work

LATE_STEPS = 2
"""Steps after which a fit ends because a step was masked on the device. All ranks that begin step s know the outcomes
up to s - 2: begin(s) waits for write_back(s - 2)."""


class CrossTrainer(CrossRank):
    """Plays the list of operations on one rank; in the end drains the lanes and flushes."""

    def __init__(self, number: int, pool: CrossPool, setting: Setting) -> None:
        super().__init__(number, pool, setting)
        self.num_steps = 0
        self._has_left = False
        """True once a step was left: it is not applied."""
        self._has_failed_retrieve = False

    def train(self) -> Work:
        for op in operations(self.fit.num_micro_batches, self.setting.is_early_first, self.broken):
            if op.lane != "compute":
                self.submit(op)
                continue
            yield from self.run(op, *self.awaited(op))
            if op.stage == "begin" and self._ends_before(op.batch):
                break
            if op.stage == "update" and (yield from self._ends_after(op.batch)):
                break
        yield from self._flush(self.pool.breaks("end_skips_late"))

    def _ends_before(self, i: int) -> bool:
        """Returns whether the fit ends before the turn of a batch."""
        if i >= len(self.batches) or i == self.failed_route:
            return True
        return self._has_failed_retrieve or self._is_known_masked(self.num_steps - LATE_STEPS)

    def _ends_after(self, i: int) -> Work:
        """Returns whether the fit ends with a batch. Flushes where it has to."""
        if self._has_left:
            return True
        if not self._is_step(i):
            return False
        if self.num_steps - 1 in self.fit.flushes:
            yield from self._flush(self.pool.breaks("flush_skips_late"))
            if self._is_known_masked(self.num_steps):
                return True
        return self.num_steps - 1 >= self.fit.last_step

    def _is_known_masked(self, last: int) -> bool:
        """Returns whether the host knows that a step up to the given one was masked."""
        first_step = self.setting.first_step
        return any(batch.is_known_masked and batch.step - first_step <= last for batch in self.batches)

    # ---- the compute lane ----

    def _begin(self, op: CrossOp) -> Work:
        yield None
        if not self._is_step(op.batch):
            return
        self.batches[op.batch].step = self.setting.first_step + self.num_steps
        if self.fit.store_fault is not None:  # the watch tells all ranks if retrieve has failed on one
            failures = self._join("watch", op.name)
            failures.posted[self.number] = self.batches[op.batch].has_failed
            yield failures
            self._has_failed_retrieve = any(failures.posted.values())

    def _dense(self, op: CrossOp) -> Work:
        if self._is_step(op.batch):
            self.streams["compute"].launch(partial(self._check_rows, self.batches[op.batch], op))
        yield None

    def _check_rows(self, batch: CrossBatch, op: CrossOp) -> None:
        needed = {key for key, parts in self._uses(op.batch).items() if op.micro_batch in parts}
        if not needed <= set(batch.rows):
            raise RuleError(f"wrong row: {op.name} begins without the rows of {sorted(needed - set(batch.rows))}")

    def _nothing(self, op: CrossOp) -> Work:
        yield None

    _reduce = _sum_gradients = _nothing

    def _commit(self, op: CrossOp) -> Work:
        """All ranks agree whether the step counts, as far as the host knows."""
        yield None
        if not self._is_step(op.batch):
            return
        batch = self.batches[op.batch]
        self._check_room(batch)
        is_bad = self._is_bad(op.batch)
        self._has_left = self.num_steps == self.fit.left_step
        self.pool.seen["left"] += self._has_left
        if self._has_left:
            return
        votes = self._join("commit", op.name)
        votes.posted[self.number] = not batch.has_room or (is_bad and not self.setting.has_device)
        yield votes
        self.pool.seen["no room"] += not batch.has_room
        self._has_left = any(votes.posted.values())
        if not self._has_left:
            yield from self._commit_on_device(batch, is_bad)

    def _commit_on_device(self, batch: CrossBatch, is_bad: bool) -> Work:
        """Sums the flags on the device. An issuer issues this exchange, too."""
        if not self.setting.has_device:
            batch.decided = self.streams["compute"].mark()
            return
        if self.setting.has_issuer:
            issued = CrossOp("nothing", "gradients", batch.number, -1)
            self.submit(issued)
            yield self.pending[issued.name].issued
        compute, flags = self.streams["compute"], self._join("flags", batch.number)
        after = self._last_exchange if self.setting.has_issuer and self.setting.is_one_by_one else None
        compute.launch(lambda: flags.posted.update({self.number: is_bad}), after)
        self._last_exchange = flags

        def decide() -> None:
            batch.is_masked = self.is_masked = self.is_masked or any(flags.posted.values())

        batch.decided = compute.launch(decide, flags)
        yield None

    def _is_bad(self, i: int) -> bool:
        """Returns whether a gradient of this rank is not finite."""
        if self.fit.bad is None or self.fit.bad[0] != self.num_steps:
            return False
        _, rank, key = self.fit.bad
        if self.pool.breaks("flag_of_urgent_gradients") and key in self.batches[i].late:
            return False
        return rank == self.number and key in self._uses(i)

    def _check_room(self, batch: CrossBatch) -> None:
        """Checks that max_rows refuses the right step."""
        expected, number = self.setting.expected, self.num_steps
        if expected.bad_step is not None and number > expected.bad_step:
            return  # a masked step never creates the keys that it has claimed, but it ends the fit anyway
        is_full = number == len(expected.states) - 1 and self.number in expected.full_ranks
        if batch.has_room == is_full:
            raise RuleError(f"wrong count: step {batch.step} has {'' if batch.has_room else 'no '}room under max_rows")

    def _update(self, op: CrossOp) -> Work:
        """Updates the rows whose gradients are not late."""
        yield None
        if self._is_step(op.batch) and not self._has_left:
            batch = self.batches[op.batch]
            keys = set(batch.keys or []) - batch.late_owned
            batch.updated = self.streams["compute"].launch(partial(self.apply, batch, keys, batch.step))
            self.num_steps += 1

    # ---- flush ----

    def _flush(self, skips_late: bool) -> Work:
        """Plays what is late of the last applied batch, then writes all that has changed."""
        yield from self._drain()
        applied = [i for i, batch in enumerate(self.batches) if batch.updated is not None]
        if applied and self.batches[applied[-1]].has_late and not skips_late:
            batch = self.batches[applied[-1]]
            self.pool.seen["late at a flush"] += not batch.is_late_updated
            for op in late_operations(applied[-1], self.broken):
                self.submit(op)
            yield from self._drain()
            if self.pool.breaks("late_played_twice"):
                batch.is_late_returned = batch.is_late_updated = False
        yield from self.pool.flush()
        expected = self.setting.expected.rows(self.num_steps)
        own = {key: row for key, row in expected.items() if self._owns(key)}
        if self.pool.store.rows != own:
            raise RuleError(f"wrong store: {self.pool.store.rows} after a flush, not {own}")

    def _drain(self) -> Work:
        """Waits for all lanes, and makes the compute stream wait for all others."""
        for name in ("route", "host", "rows", "gradients"):
            yield self.lanes[name]
        for name in ("host", "rows", "gradients"):
            mark = self.streams[name].mark()
            if not mark.done:
                self.streams["compute"].wait(mark)
