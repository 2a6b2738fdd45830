"""The stages of a batch, from prefetch to write-back: one method each, in the order in which a batch passes them.

The dense part, which the user's loop drives, enters by `rows` and leaves by `collect_gradients`.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from nestpipe.data.batch import Batch
from nestpipe.device.streams import finish
from nestpipe.device.tally import embedding_memory
from nestpipe.device.transfer import download
from nestpipe.distributed import World
from nestpipe.embedding.budget import DeviceBudget
from nestpipe.embedding.dedup import BatchDedup
from nestpipe.embedding.exchange import BatchExchange, Exchange
from nestpipe.embedding.group import FeatureGroups
from nestpipe.embedding.memory import Memory
from nestpipe.embedding.model_rows import ModelRows
from nestpipe.embedding.packed import PackedBatch
from nestpipe.embedding.replica import TouchedKeys
from nestpipe.embedding.replica_store import ReplicaStore
from nestpipe.embedding.resident import Residence
from nestpipe.pipelining.batch_state import (
    Applied,
    BatchState,
    InTraining,
    Requested,
    Resident,
    Routed,
)
from nestpipe.pipelining.commit import Outcome
from nestpipe.pipelining.options import PipelineOptions
from nestpipe.pipelining.planner import Planner
from nestpipe.pipelining.row_update import RowUpdate
from nestpipe.pipelining.schedule import OVERLAPPING, Op
from nestpipe.pipelining.stage import COMPUTE
from nestpipe.store import Store, Writer
from nestpipe.store.interface import RowStore


class Stages:
    """The batches under way. Different lanes call different methods, each with a batch whose earlier stages are done,
    so no lock is needed."""

    def __init__(
        self,
        features: FeatureGroups,
        batches: Iterator[Batch],
        store: Store | ReplicaStore,
        world: World,
        exchange: Exchange,
        memory: Memory,
        residence: Residence,
        options: PipelineOptions,
        steps: int | None,
        budget: DeviceBudget | None = None,
        crosses: bool = False,
    ) -> None:
        """crosses: rows and gradients may cross the boundary between two batches."""
        self._features = features
        self._batches = batches
        self.store = store
        """Store that training reads and writes."""
        self._writer: Writer | RowStore = store
        self._world = world
        self._exchange = exchange
        self._memory = memory
        self._residence = residence
        self._options = options
        self._steps = steps
        self._budget = budget
        self._crosses = crosses
        self._planner = Planner(exchange, memory, residence, options, budget, crosses)
        self._keeps_rows = options.schedule in OVERLAPPING
        self._states: dict[int, BatchState] = {}
        self._num_steps_routed = 0
        self._has_ended = False
        self._has_masked = False
        self.is_masked = torch.zeros((), dtype=torch.bool, device=world.device)
        """On a device: True once a step was not finite. That step and all later ones change no row."""
        self.outcomes: dict[int, Outcome] = {}
        """On a device: outcomes of the steps that were written back, by step."""

    def state(self, number: int) -> BatchState:
        return self._states.setdefault(number, BatchState(number))

    def open(self) -> None:
        """Makes this the only writer of the store, from before the first operation until `close`. All ranks call it."""
        if isinstance(self._writer, Writer):
            return
        self._writer = self.store.open_writer()
        self._residence.open(self._writer)
        if isinstance(self.store, ReplicaStore):  # other writers may have changed rows of any owner
            self._residence.forget_replicas()
            self.store.refresh()

    @property
    def is_open(self) -> bool:
        return isinstance(self._writer, Writer)

    def close(self) -> None:
        if isinstance(self._writer, Writer):
            self._writer.close()
            self._writer = self.store
            self._residence.close()

    # ---- before training ----

    def prefetch(self, op: Op) -> None:
        """Pulls a batch. In host memory, dedups its keys and clusters its samples into micro-batches."""
        # The first `steps` batches are needed. A later one is needed only if an earlier one did not count as a step,
        # which is known after route: the schedule makes this prefetch wait for it.
        if self._steps is not None and op.batch >= self._steps and self._num_steps_routed >= self._steps:
            return
        options, batch = self._options, None
        keys: BatchDedup | PackedBatch | Exception
        try:
            batch = next(self._batches, None)
            split = options.num_micro_batches, self._exchange.num_owners, options.num_threads, options.clustering
            keys = self._memory.prepare_batch(self._features, batch, *split)
        except Exception as error:  # travels in the route's header to all ranks
            keys = error
        self.state(op.batch).requested = Requested(batch, keys)

    def upload(self, op: Op) -> None:
        """Copies the batch to the device, which dedups its keys. If that fails, the batch has an error."""
        requested = self.state(op.batch).requested
        if requested is None or isinstance(requested.keys, Exception):
            return
        try:
            requested.keys = keys = self._memory.upload_batch(requested.keys)
            embedding_memory.add_all(keys)
        except Exception as error:
            requested.keys = error

    def route(self, op: Op) -> None:
        """Tells owners which keys the batch needs, and plans its exchanges, and those of the gradients before it."""
        state = self.state(op.batch)
        before = self._step_before(op.batch)
        late = None
        if not self._has_ended and state.requested is not None:  # on every rank: all have seen the same headers
            try:
                assert not isinstance(state.requested.keys, PackedBatch)
                route = self._exchange.route(state.requested.keys, self._features, self._world.notice)
                if route is not None:
                    crossing = self._planner.compare(before, route)
                    late = crossing.late if crossing is not None else None
                    state.routed = self._planner.plan(route, crossing, self._in_flight_before(op.batch))
            except Exception as error:
                state.error = error
            self._has_ended = state.routed is None
            self._num_steps_routed += state.is_step
        if before is not None:
            self._planner.plan_returns(before, late)

    def _step_before(self, number: int) -> Routed | None:
        """Returns the batch before, if it is a step on all ranks. On this one it may have failed since."""
        before = self._states.get(number - 1)
        routed = before.routed if before is not None else None
        return routed if routed is not None and routed.route.is_step else None

    def _in_flight_before(self, number: int) -> list[Sequence[TouchedKeys]]:
        """Returns the owned keys of earlier batches whose slots must stay while this one becomes resident. With late
        gradients the batch before last may not be complete."""
        numbers = range(number - (2 if self._crosses else 1), number)
        states = [state for i in numbers if (state := self._states.get(i)) is not None]
        return [state.routed.route.touched for state in states if state.is_step and state.routed is not None]

    def retrieve(self, op: Op) -> None:
        """Makes the owned rows of a batch resident."""
        state = self.state(op.batch)
        if not state.is_step:
            return
        assert state.routed is not None
        try:
            batch = self._residence.retrieve(state.routed.route.touched)
            state.resident = Resident(batch, self._residence.room_error(batch))
        except Exception as error:  # no memory, for example
            state.error = error

    # ---- training: no row that the batch uses changes from here to its gradient's return ----

    def send_early_rows(self, op: Op) -> None:
        """Sends the rows that the batch before does not change, while that one trains."""
        state = self.state(op.batch)
        # A rank whose rows could not be made resident takes part: the others do not know.
        if state.routed is not None and state.routed.has_early_rows:
            self._open(state).send_early_rows()

    def _open(self, state: BatchState) -> BatchExchange:
        assert state.routed is not None
        resident = state.resident.groups if state.resident is not None else None
        exchange = self._exchange.open(state.routed.route, state.routed.plan, resident)
        state.training = InTraining(exchange)
        return exchange

    def begin(self, op: Op) -> None:
        """Opens the exchanges of a batch that is a step, unless the lane of its rows does so before its early rows."""
        state = self.state(op.batch)
        if state.is_step and state.routed is not None and not state.routed.has_early_rows:
            self._open(state)

    def send_rows(self, op: Op) -> None:
        """Sends the rows of a micro-batch from owners to requesters."""
        exchange = self._exchange_of(op)
        if exchange is not None:
            exchange.send_rows(op.micro_batch)

    def _exchange_of(self, op: Op) -> BatchExchange | None:
        training = self.state(op.batch).training
        return None if training is None else training.exchange

    def rows(self, state: BatchState, micro_batch: int) -> list[ModelRows]:
        """Entry of the dense part: returns the rows of a micro-batch, by group. Backward sets their gradients."""
        assert state.training is not None
        assert state.training.exchange is not None
        return state.training.exchange.rows(micro_batch)

    def collect_gradients(self, state: BatchState, micro_batch: int, rows: Sequence[ModelRows]) -> None:
        """Exit of the dense part: keeps the rows' gradients for the lane that returns them."""
        assert state.training is not None
        state.training.gradients[micro_batch] = gradients = [group.take_gradient() for group in rows]
        embedding_memory.add(*gradients)

    def return_gradients(self, op: Op) -> None:
        """Returns the gradients of a micro-batch from requesters to owners."""
        training, exchange = self.state(op.batch).training, self._exchange_of(op)
        if training is not None and exchange is not None:
            exchange.return_gradients(op.micro_batch, training.gradients.pop(op.micro_batch, []))

    def share_sums(self, op: Op) -> None:
        """Sends the sums of gradients to the ranks that have the same rows: replicas of a rank's shard, and replicated
        tables."""
        exchange = self._exchange_of(op)
        if exchange is not None:
            exchange.share_sums()

    def record_outcome(self, state: BatchState, loss: Tensor, non_finite: Tensor) -> None:
        """Keeps the outcome of a step on the device. From the first step that is not finite, masks updates of rows."""
        assert state.training is not None
        self.is_masked = self.is_masked | non_finite
        state.training.outcome = torch.stack([loss.double(), self.is_masked.double()])

    def sum_gradients(self, op: Op) -> None:
        """Sums, on the owner, the gradients that all requesters returned."""
        state, exchange = self.state(op.batch), self._exchange_of(op)
        if state.training is not None and exchange is not None and not state.is_left:
            state.training.sums = exchange.sum_gradients()

    def update(self, state: BatchState, number: int, scale: float | Tensor, is_masked: Tensor | None) -> None:
        """Applies the row optimizer once to each owned key, and each key of a replicated table, even if its gradient is
        zero."""
        training, resident = state.training, state.resident
        assert training is not None
        assert resident is not None
        training.is_partially_updated = True
        optimizers = tuple(rows.group.optimizer for rows in resident.groups)
        update = RowUpdate(number, scale, is_masked, optimizers)
        update.apply(self._memory, resident.groups, training.sums)
        if training.exchange is not None and training.exchange.has_late_gradients:
            training.late = update.kept()
        state.applied = Applied(number)
        training.is_partially_updated = False

    def return_late_gradients(self, op: Op) -> None:
        """Returns the gradients that the next batch does not need, while that one trains."""
        training = self.state(op.batch).training
        if training is not None and training.late is not None and training.exchange is not None:
            training.exchange.return_late_gradients()

    def late_update(self, op: Op) -> None:
        """Applies the late gradients of a batch."""
        state = self.state(op.batch)
        training, resident = state.training, state.resident
        if training is None or training.late is None or training.exchange is None or resident is None:
            return
        training.is_partially_updated = True
        training.late.apply(self._memory, resident.groups, training.exchange.sum_late_gradients())
        training.exchange = training.late = None
        training.is_partially_updated = False

    def complete_updates(self) -> None:
        """Returns and applies gradients that are late, between two steps. All ranks call it; the lanes must be idle."""
        for number in sorted(self._states):
            op = Op("late_update", COMPUTE, number)
            self.return_late_gradients(op)
            self.late_update(op)

    # ---- after training ----

    def write_back(self, op: Op) -> None:
        """Takes note of what a batch has changed. Without a pool, writes it to the host store."""
        self._settle(self.state(op.batch))
        finish(self._world.device)  # so that no enqueued work still uses the previous batch
        self._states.pop(op.batch - 1, None)  # not this one: `route` of the next batch still reads it

    def _settle(self, state: BatchState) -> None:
        """Tells the residence whether a batch was applied, once the host knows."""
        resident, applied = state.resident, state.applied
        if resident is None or resident.is_settled:
            return
        if applied is not None:
            self._read_outcome(state, applied)
        step = applied.step if applied is not None and not applied.is_masked else None
        self._residence.settle(resident.batch, step)
        resident.is_settled = True
        if step is not None:
            self._residence.expand(None if self._budget is None else self._budget.most_record_bytes)

    def _read_outcome(self, state: BatchState, applied: Applied) -> None:
        """Reads the outcome of a step from the device. Waits for the device."""
        training = state.training
        if training is not None and training.outcome is not None:
            loss, is_masked = download(training.outcome).tolist()
            training.outcome, applied.is_masked = None, is_masked > 0
            if applied.is_masked and not self._has_masked:  # this batch is at fault, not those after it
                self._has_masked = state.is_refused = True
            self.outcomes[applied.step] = Outcome(loss, applied.is_masked)

    # ---- between steps and at the end ----

    def release(self, state: BatchState) -> None:
        """Frees the memory of a batch's exchanges, unless late gradients need it."""
        if state.training is not None:
            state.training.sums = []
            if state.training.late is None:
                state.training.exchange = None

    def take_error(self, state: BatchState) -> Exception:
        """Returns the error of a batch, and marks it as raised."""
        assert state.error is not None
        state.is_raised = True
        return state.error

    def skip(self, state: BatchState) -> None:
        """Marks a batch whose weight is 0."""
        state.is_skipped = True

    def refuse(self, state: BatchState) -> None:
        """Marks a batch whose training failed: training it again would fail again."""
        state.is_refused = True

    def leave(self, state: BatchState) -> None:
        """Marks a batch whose step was left before the update."""
        state.is_left = True

    def flush(self) -> None:
        """Writes every row that is newer than its copy in the host store. The lanes must be idle."""
        for number in sorted(self._states):
            if self._states[number].applied is not None:
                self._settle(self._states[number])
        self._residence.flush()

    def end(self) -> None:
        """Flushes, and gives up the batches that were not applied. The lanes must be idle."""
        self.flush()
        for number in sorted(self._states):
            self._settle(self._states[number])

    def forget(self) -> None:
        """Gives up all resident rows."""
        self._residence.forget()

    def is_partially_updated(self) -> bool:
        """Returns whether records that would be written back lack a part of their step's update."""
        training = [state.training for state in self._states.values() if state.training is not None]
        return self._keeps_rows and any(batch.is_partially_updated or batch.late is not None for batch in training)

    def free(self) -> None:
        """Frees the memory of all exchanges. The device must have finished."""
        for state in self._states.values():
            state.training = None

    def untrained(self) -> list[Batch | Exception]:
        """Returns batches that were pulled but not trained, and errors of reading that were not raised, in order."""
        items: list[Batch | Exception] = []
        for number in sorted(self._states):
            requested = self._states[number].requested
            if requested is not None and self._states[number].is_untrained:
                item = requested.keys if isinstance(requested.keys, Exception) else requested.batch
                items += [item] if item is not None else []
        return items
