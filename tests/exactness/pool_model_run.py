"""Trains with the model of the row pool, in an order that a seed chooses, and compares with plain training."""

from functools import partial
from random import Random

from tests.exactness.pool_model import RowPool
from tests.exactness.pool_model_parts import NEW, Batch, Keys, Rows, Store, choose_fit, train_plainly
from tests.exactness.pool_model_time import Actor, Lane, RuleError, Stream, Work, take_turns

LATE_STEPS = 2
"""Steps after which a fit ends because a step was masked on the device."""


class Run:
    """Plays one seed. `broken`: the switch that is on, if any."""

    def __init__(self, seed: int, broken: str | None = None) -> None:
        self._draw = draw = Random(seed)
        self._has_device = draw.random() < 0.6
        self._is_nested = draw.random() < 0.5
        """In schedule nested the host lane starts after the first rows were sent, in inter at once."""
        self._keys = list(range(draw.randint(3, 10)))
        self._store = Store()
        self.pool = RowPool(self._store, draw.randint(1, 3), draw.random() < 0.5, broken)
        self._slots = self.pool.slots
        self._slots.grow(draw.choice([0, draw.randrange(len(self._keys)), len(self._keys)]))
        self._first_step = 0

    def play(self) -> None:
        """Plays one to three fits with one pool. Raises RuleError."""
        untrained: list[Keys] = []
        for number in range(self._draw.randint(1, 3)):
            if number > 0 and self._draw.random() < 0.3:
                self._write_as_others(number)
            self._open(untrained)
            lanes = self._compute_lane, self._host_lane, self._route_lane = Lane(), Lane(), Lane()
            self._compute_lane.queue.append(self._train())
            take_turns([*lanes, self._compute, self._host], self._draw, self._check_turn)
            self.pool.close()
            num_applied = self._check_steps()
            self._check_newest(self._expected[num_applied])
            self._slots.check_clean(self._store)
            untrained = [batch.keys for batch in self._batches if batch.updated is None or batch.is_masked][:2]
            self._first_step += num_applied

    def _write_as_others(self, number: int) -> None:
        for key in self._draw.sample(self._keys, 2):
            record, step = self._store.rows.pop(key, NEW)
            if self._draw.random() < 0.7:  # else it is erased
                self._store.rows[key] = (*record, -number), max(step, 0)
            self._store.num_writes += 1
        self.pool.seen["writes by others"] += 1

    def _open(self, untrained: list[Keys]) -> None:
        self._fit = fit = choose_fit(self._draw, self._keys, untrained)
        self._compute, self._host = Stream(self._has_device), Stream(self._has_device)
        self._batches = self.pool.open(fit.batches, fit.max_rows, self._compute, self._host)
        self._expected, self._refused_step = train_plainly(self._store.rows, fit, self._first_step)
        self._store.calls_until_fault = fit.fault
        self._num_steps = 0
        self._is_masked = False  # on the device: True once a step was not finite

    # ---- the compute lane ----

    def _train(self) -> Work:
        """Plays the schedule; in the end drains the other lanes and flushes."""
        self._submit_route(0)
        self._submit_route(1)
        self._host_lane.queue.append(self.pool.retrieve(0))
        for i, batch in enumerate(self._batches):
            if self._num_steps >= self._fit.num_steps:
                break
            if not self._is_nested:
                self._submit_host(i)
            yield batch.retrieved
            if batch.has_failed or self._is_known_masked(self._num_steps - LATE_STEPS):
                break
            if batch.keys is not None:
                self._begin(batch)
                yield None
            if self._is_nested:
                self._submit_host(i)
            self._submit_route(i + 2)
            yield None
            if batch.keys is None:
                continue
            if not self._commit(batch):
                break
            yield from self._apply(batch)
            if self._num_steps - 1 in self._fit.flushes:
                yield from self._flush()
                if self._is_known_masked(self._num_steps):
                    break
        if self._draw.random() < 0.3:  # gives up what the host lane has not begun
            self._host_lane.drop_waiting()
        yield from self._flush()
        yield self._host
        yield self._compute

    def _submit_route(self, i: int) -> None:
        if i < len(self._batches):
            self._route_lane.queue.append(self.pool.route(i))

    def _submit_host(self, i: int) -> None:
        """Gives the host lane its work while batch i trains."""
        work = [self.pool.write_back(i - 1)] if i > 0 else []
        work += [self.pool.retrieve(i + 1)] if i + 1 < len(self._batches) else []
        self._host_lane.queue += reversed(work) if self.pool.breaks("retrieve_before_write_back") else work

    def _is_known_masked(self, last: int) -> bool:
        """Returns whether the host knows that a step up to the given one was masked."""
        return any(batch.is_known_masked and batch.step - self._first_step <= last for batch in self._batches)

    def _begin(self, batch: Batch) -> None:
        batch.step = self._first_step + self._num_steps
        assert batch.filled is not None
        if not self.pool.breaks("send_skips_fill"):
            self._compute.wait(batch.filled)
        self._compute.launch(partial(self._send, batch))

    def _send(self, batch: Batch) -> None:
        """Reads the records of a batch, and checks them."""
        rows = self._expected[min(batch.step - self._first_step, len(self._expected) - 1)]
        for key, slot in zip(batch.keys or [], batch.slots, strict=True):
            record, expected = self._slots.records[slot], rows.get(key, NEW)[0]
            if record != expected:
                raise RuleError(f"wrong row: step {batch.step} reads {record} for key {key}, not {expected}")

    def _commit(self, batch: Batch) -> bool:
        """Returns whether the step counts, as far as the host knows. Checks that max_rows refuses the right step."""
        bad_step, number = self._fit.bad_step, self._num_steps
        # A masked step never creates the keys that it has claimed, but it ends the fit anyway.
        is_after_masked = bad_step is not None and number > bad_step
        if batch.has_room == (number == self._refused_step) and not is_after_masked:
            raise RuleError(f"wrong count: step {batch.step} has {'' if batch.has_room else 'no '}room under max_rows")
        self.pool.seen["no room"] += not batch.has_room
        return batch.has_room and (self._has_device or number != bad_step)

    def _apply(self, batch: Batch) -> Work:
        is_bad = self._num_steps == self._fit.bad_step
        batch.decided = self._compute.launch(partial(self._decide, batch, is_bad))
        yield None
        batch.updated = self._compute.launch(partial(self._update, batch))
        self._num_steps += 1
        if self.pool.breaks("dirty_at_launch"):
            self.pool.make_dirty(batch)
        yield None

    def _decide(self, batch: Batch, is_bad: bool) -> None:
        self._is_masked = batch.is_masked = self._is_masked or is_bad

    def _update(self, batch: Batch) -> None:
        for slot in [] if batch.is_masked else batch.slots:
            self._slots.records[slot] += (batch.step,)
        self.pool.seen["masked"] += batch.is_masked

    def _flush(self) -> Work:
        yield self._host_lane
        yield self._route_lane
        self._compute.wait(self._host.mark())
        yield from self.pool.flush()
        rows = self._expected[min(self._num_steps, len(self._expected) - 1)]
        if self._store.rows != rows:
            raise RuleError(f"wrong store: {self._store.rows} after a flush, not {rows}")

    # ---- checks ----

    def _check_turn(self, actor: Actor) -> None:
        self._slots.check()
        if actor is self._host_lane and not self._has_device:  # on a device, records depend on what has run
            self._check_newest(self._expected[self._num_steps])

    def _check_newest(self, rows: Rows) -> None:
        """Checks that each newest record is where it is looked for: in the key's slot, else in the store."""
        for key in self._keys:
            slot = self._slots.index.get(key)
            record = self._store.rows.get(key, NEW)[0] if slot is None else self._slots.records[slot]
            if record != rows.get(key, NEW)[0]:
                place = "the store" if slot is None else f"slot {slot}"
                raise RuleError(f"wrong place: {place} has {record} for key {key}, not {rows.get(key, NEW)[0]}")

    def _check_steps(self) -> int:
        """Returns the number of steps that the fit has applied."""
        num_applied = sum(batch.updated is not None and not batch.is_masked for batch in self._batches)
        failed = [i for i, batch in enumerate(self._batches) if batch.has_failed]
        num_before_failed = [sum(keys is not None for keys in self._fit.batches[:i]) for i in failed]
        expected = min(len(self._expected) - 1, self._fit.num_steps, *num_before_failed)
        if num_applied != expected:
            raise RuleError(f"wrong steps: {num_applied} were applied, not {expected}")
        return num_applied
