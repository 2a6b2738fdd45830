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
from nestpipe.embedding.dedup import BatchDedup, dedup_batch
from nestpipe.embedding.exchange import BatchExchange, Exchange
from nestpipe.embedding.group import FeatureGroups
from nestpipe.embedding.memory import Memory
from nestpipe.embedding.resident import (
    RecordMemory,
    find_overlap,
    leaving,
    retrieve_rows,
    room_error,
    sync_overlap,
    write_back,
)
from nestpipe.pipelining.batch_state import Applied, BatchState, InTraining, Requested, Resident, Routed
from nestpipe.pipelining.commit import Outcome
from nestpipe.pipelining.options import PipelineOptions
from nestpipe.pipelining.schedule import OVERLAPPING, Op
from nestpipe.store import Store, Writer


class Stages:
    """The batches under way. Different lanes call different methods, each with a batch whose earlier stages are done,
    so no lock is needed."""

    def __init__(
        self,
        features: FeatureGroups,
        batches: Iterator[Batch],
        store: Store,
        world: World,
        exchange: Exchange,
        memory: Memory,
        options: PipelineOptions,
        steps: int | None,
        budget: DeviceBudget | None = None,
    ) -> None:
        self._features = features
        self._batches = batches
        self._store = store
        self._writer: Writer | Store = store
        self._world = world
        self._exchange = exchange
        self._memory = memory
        self._options = options
        self._steps = steps
        self._budget = budget
        self._keeps_overlap = options.schedule in OVERLAPPING
        self._states: dict[int, BatchState] = {}
        self._records = RecordMemory(memory), RecordMemory(memory)
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
        """Makes this the only writer of the store, from before the first operation until `close`."""
        if not isinstance(self._writer, Writer):
            self._writer = self._store.open_writer()

    def close(self) -> None:
        if isinstance(self._writer, Writer):
            self._writer.close()
            self._writer = self._store

    # ---- before training ----

    def prefetch(self, op: Op) -> None:
        """Pulls a batch, dedups its keys, and clusters its samples into micro-batches."""
        # The first `steps` batches are needed. A later one is needed only if an earlier one did not count as a step,
        # which is known after route: the schedule makes this prefetch wait for it.
        if self._steps is not None and op.batch >= self._steps and self._num_steps_routed >= self._steps:
            return
        options, batch = self._options, None
        keys: BatchDedup | Exception
        try:
            batch = next(self._batches, None)
            split = options.num_micro_batches, self._exchange.size, options.num_threads, options.clustering
            keys = dedup_batch(self._features, batch, *split)
        except Exception as error:  # travels in the route's header to all ranks
            keys = error
        self.state(op.batch).requested = Requested(batch, keys)

    def upload(self, op: Op) -> None:
        """Copies the model's inputs and the row index to the device. If that fails, the batch has an error."""
        requested = self.state(op.batch).requested
        if requested is None or not isinstance(requested.keys, BatchDedup):
            return
        try:
            requested.keys = self._memory.upload_batch(self._features, requested.keys)
            embedding_memory.add_all(requested.keys)
        except Exception as error:
            requested.keys = error

    def route(self, op: Op) -> None:
        """Tells owners which keys the batch needs, and plans its exchanges."""
        state = self.state(op.batch)
        if self._has_ended or state.requested is None:
            return  # on every rank: all have seen the same headers
        try:
            route = self._exchange.route(state.requested.keys, self._features)
            if route is not None:
                plan = self._exchange.plan(route, self._options.window)
                if plan is not None:
                    plan = self._memory.upload(plan)
                    embedding_memory.add_all(plan)
                routed = Routed(route, plan)
                self._check_budget(op.batch, routed)
                state.routed = routed
        except Exception as error:
            state.error = error
        self._has_ended = state.routed is None
        self._num_steps_routed += state.is_step

    def _check_budget(self, number: int, routed: Routed) -> None:
        """Raises on all ranks if the batch exceeds the budget of one. Nothing has been allocated for its rows yet."""
        if self._budget is not None:
            is_step = routed.route.is_step
            self._exchange.agree(self._budget.error(number, routed.route, routed.plan) if is_step else None)

    def retrieve(self, op: Op) -> None:
        """Makes the owned rows of a batch resident."""
        state, before = self.state(op.batch), self.state(op.batch - 1)
        if not state.is_step:
            return
        assert state.routed is not None
        try:
            dedups, overlap = state.routed.route.owner_dedups, None
            if self._keeps_overlap and before.is_step:
                assert before.routed is not None
                overlap = find_overlap(before.routed.route.owner_dedups, dedups, self._memory)
                embedding_memory.add(*(slots for shared in overlap for slots in shared.on_device))
            groups = retrieve_rows(dedups, self._store, self._records[op.batch % 2], overlap)
            unwritten = before.resident.groups if self._keeps_overlap and before.resident is not None else []
            state.resident = Resident(groups, overlap, room_error(groups, unwritten, self._store))
        except Exception as error:  # no memory, for example
            state.error = error

    # ---- training: no row changes from begin to update ----

    def begin(self, op: Op) -> None:
        """Opens the exchanges of a batch that is a step."""
        state = self.state(op.batch)
        if state.is_step:
            assert state.routed is not None
            assert state.resident is not None
            opened = self._exchange.open(state.routed.route, state.routed.plan, state.resident.groups)
            state.training = InTraining(opened)

    def send_rows(self, op: Op) -> None:
        """Sends the rows of a micro-batch from owners to requesters."""
        exchange = self._exchange_of(op)
        if exchange is not None:
            exchange.send_rows(op.micro_batch)

    def _exchange_of(self, op: Op) -> BatchExchange | None:
        training = self.state(op.batch).training
        return None if training is None else training.exchange

    def rows(self, state: BatchState, micro_batch: int) -> list[Tensor]:
        """Entry of the dense part: returns the rows of a micro-batch, by group. Backward sets their gradients."""
        assert state.training is not None
        assert state.training.exchange is not None
        return state.training.exchange.rows(micro_batch)

    def collect_gradients(self, state: BatchState, micro_batch: int, rows: Sequence[Tensor]) -> None:
        """Exit of the dense part: keeps the rows' gradients for the lane that returns them."""
        assert state.training is not None
        state.training.gradients[micro_batch] = gradients = [group.grad for group in rows]
        embedding_memory.add(*gradients)
        for group in rows:
            group.grad = None

    def return_gradients(self, op: Op) -> None:
        """Returns the gradients of a micro-batch from requesters to owners."""
        training, exchange = self.state(op.batch).training, self._exchange_of(op)
        if training is not None and exchange is not None:
            exchange.return_gradients(op.micro_batch, training.gradients.pop(op.micro_batch, []))

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
        """Applies the row optimizer once to each owned key, even if its gradient is zero."""
        training, resident = state.training, state.resident
        assert training is not None
        assert resident is not None
        training.is_partially_updated = True
        for rows, gradient in zip(resident.groups, training.sums, strict=True):
            if gradient is not None:
                if isinstance(scale, Tensor) or scale != 1.0:
                    gradient = gradient * scale
                optimizer = rows.group.optimizer
                self._memory.update(optimizer, rows.rows, rows.state, gradient, number + 1, is_masked)
        state.applied = Applied(number)
        training.is_partially_updated = False

    # ---- after training ----

    def overlap_sync(self, op: Op) -> None:
        """Copies the updated records that the next batch shares to that batch's slots."""
        state, following = self.state(op.batch), self.state(op.batch + 1)
        shared = following.resident.overlap if following.resident is not None else None
        if shared is None or following.error is not None or state.resident is None:
            return
        assert following.resident is not None
        sync_overlap(state.resident.groups, following.resident.groups, shared, self._memory)
        following.resident.has_unwritten = True

    def write_back(self, op: Op) -> None:
        """Writes the rows of a batch to the host store, except those that stay for the next batch."""
        state, following = self.state(op.batch), self.state(op.batch + 1)
        if state.applied is not None and not state.applied.is_written:
            self._write_back(state, state.applied, following)
            state.applied.is_written = True
        finish(self._world.device)  # so that no enqueued work still uses the previous batch
        self._states.pop(op.batch - 1, None)  # not this one: `retrieve` of the next batch still reads it

    def _write_back(self, state: BatchState, applied: Applied, following: BatchState) -> None:
        assert state.resident is not None
        self._read_outcome(state, applied)
        if applied.is_masked:  # it changed nothing, but may hold rows of the previous batch
            self._write_back_inherited(state)
            if following.resident is not None:
                following.resident.has_unwritten = False
            return
        is_shared = following.resident is not None and following.resident.has_unwritten
        stays = following.resident.overlap if is_shared and following.resident is not None else None
        slots = None if stays is None else leaving(state.resident.groups, stays)
        write_back(state.resident.groups, self._writer, applied.step, self._memory, slots)

    def _read_outcome(self, state: BatchState, applied: Applied) -> None:
        """Reads the outcome of a step from the device. Waits for the device."""
        training = state.training
        if training is not None and training.outcome is not None:
            loss, is_masked = download(training.outcome).tolist()
            training.outcome, applied.is_masked = None, is_masked > 0
            if applied.is_masked and not self._has_masked:  # this batch is at fault, not those after it
                self._has_masked = state.is_refused = True
            self.outcomes[applied.step] = Outcome(loss, applied.is_masked)

    def _write_back_inherited(self, state: BatchState) -> None:
        """Writes the records that a batch took over from the previous one and has not changed."""
        resident, before = state.resident, self.state(state.number - 1).applied
        if resident is not None and resident.has_unwritten and resident.overlap is not None and before is not None:
            slots = [shared.slots for shared in resident.overlap]
            write_back(resident.groups, self._writer, before.step, self._memory, slots)
            resident.has_unwritten = False

    # ---- between steps and at the end ----

    def release(self, state: BatchState) -> None:
        """Frees the memory of a batch's exchanges."""
        if state.training is not None:
            state.training.exchange, state.training.sums = None, []

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
        """Writes every row that is newer than its copy in the host store. The host lane must be idle."""
        for number in sorted(self._states):
            state = self._states[number]
            if state.applied is None:
                self._write_back_inherited(state)
            elif not state.applied.is_written:
                following = self._states.get(number + 1) or BatchState(number + 1)
                self._write_back(state, state.applied, following)
                state.applied.is_written = True

    def is_partially_updated(self) -> bool:
        """Returns whether an update failed halfway in records that would be written back."""
        training = [state.training for state in self._states.values() if state.training is not None]
        return self._keeps_overlap and any(batch.is_partially_updated for batch in training)

    def host_bytes(self, state: BatchState) -> tuple[int, int]:
        """Returns the bytes retrieved for a batch and written back after it, row state included."""
        assert state.resident is not None
        following = self.state(state.number + 1).resident
        overlap = state.resident.overlap
        next_overlap = following.overlap if following is not None and following.has_unwritten else None
        retrieved = written = 0
        for g, rows in enumerate(state.resident.groups):
            num_kept = len(overlap[g].slots) if overlap is not None else 0
            retrieved += (len(rows.keys) - num_kept) * rows.group.record_bytes
            if not rows.group.frozen:
                num_stay = len(next_overlap[g].previous_slots) if next_overlap is not None else 0
                written += (len(rows.keys) - num_stay) * rows.group.record_bytes
        return retrieved, written

    def untrained(self) -> list[Batch | Exception]:
        """Returns batches that were pulled but not trained, and errors of reading that were not raised, in order."""
        items: list[Batch | Exception] = []
        for number in sorted(self._states):
            requested = self._states[number].requested
            if requested is not None and self._states[number].is_untrained:
                item = requested.keys if isinstance(requested.keys, Exception) else requested.batch
                items += [item] if item is not None else []
        return items
