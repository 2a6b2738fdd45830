"""What the operations of a schedule do: the stages of a batch before, between and after its training."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nestpipe.data.batch import Batch
from nestpipe.data.cluster import Clustering
from nestpipe.device.streams import finish
from nestpipe.device.tally import embedding_memory
from nestpipe.device.transfer import download
from nestpipe.distributed import World
from nestpipe.embedding.buffer import (
    Buffer,
    BufferMemory,
    Overlap,
    find_overlap,
    leaving,
    retrieve_rows,
    room_error,
    sync_overlap,
    write_back,
)
from nestpipe.embedding.device_memory import DeviceMemory
from nestpipe.embedding.embeddings import on_device
from nestpipe.embedding.local_window import LocalWindow
from nestpipe.embedding.plan import Plans
from nestpipe.embedding.request import Request, make_request
from nestpipe.embedding.route import Route, route_keys
from nestpipe.embedding.table import Feature, tables_of
from nestpipe.embedding.window import Window, open_window
from nestpipe.pipelining.schedule import Op
from nestpipe.store import HostStore, Writer

FAULTS = ("none", "skip_overlap_sync")


@dataclass
class Flight:
    """A batch on its way through the stages. Each stage fills in its part; the next one reads it."""

    number: int
    batch: Batch | None = None
    request: Request | Exception | None = None
    """None: not pulled, because the run has as many steps as it was asked for"""
    route: Route | None = None
    """None: no rank has a batch, or there was an error"""
    plans: Plans | None = None
    """what travels with which micro-batch"""
    buffers: list[Buffer] = field(default_factory=list)
    window: Window | LocalWindow | None = None
    """while it is in training"""
    gradients: dict[int, Mapping[str, Tensor | None]] = field(default_factory=dict)
    """by micro-batch, from its dense part until they are taken: of its leaves, by table"""
    overlap: list[Overlap] | None = None
    """with the batch before it; None: all its rows come from the host store"""
    has_unwritten: bool = False
    """whether the records of the overlap are newer than those in the host store"""
    rows_before: list[Tensor] | None = None
    """as they were before the update; for experiments with stale rows"""
    error: Exception | None = None
    """raised when this batch is to be trained: those before it are trained as if nothing had happened"""
    is_raised: bool = False
    """whether that has happened"""
    problem: Exception | None = None
    """why it must not be applied; found out on one rank"""
    is_refused: bool = False
    """whether its training failed"""
    is_skipped: bool = False
    """whether its turn came, but its weight is 0"""
    report: Tensor | None = None
    """of a step on a device: its loss, and whether it is masked, which only the device knows yet"""
    is_masked: bool = False
    """whether its step, or one before it, had a loss or gradient that is not finite: then it changed no row"""
    step: int = -1
    """number of the step that trained it; -1: not applied"""
    is_written: bool = False
    """whether it was written back, all but what stays for the next"""
    is_torn: bool = False
    """whether its update failed halfway: its records are of no step"""

    @property
    def is_step(self) -> bool:
        return self.route is not None and self.route.is_step and self.error is None

    @property
    def is_end(self) -> bool:
        return self.route is None and self.error is None


class Stages:
    """The batches under way, and one method for each operation. Different lanes call different methods, each with a
    batch whose earlier stages are done; so nothing here needs a lock."""

    def __init__(
        self,
        features: Mapping[str, Feature],
        batches: Iterator[Batch],
        store: HostStore,
        world: World,
        *,
        num_micro_batches: int,
        clustering: Clustering,
        window: str,
        num_threads: int,
        steps: int | None,
        keeps_overlap: bool,
        stale: bool,
        fault: str,
        memory: DeviceMemory | None = None,
    ) -> None:
        self._features = features
        self._num_tables = len(tables_of(features))
        self._batches = batches
        self._store = store
        self._writer: Writer | HostStore = store
        self._world = world
        self._num_micro_batches = num_micro_batches
        self._clustering = clustering
        self._window = window
        self._num_threads = num_threads
        self._steps = steps
        self._keeps_overlap = keeps_overlap
        self._stale = stale
        self._fault = fault
        self._device_memory = memory
        self._flights: dict[int, Flight] = {}
        self._memory = BufferMemory(world.device), BufferMemory(world.device)
        self._num_steps_routed = 0
        self._has_ended = False
        self._is_masked = False
        self.heard: dict[int, tuple[float, bool]] = {}
        """by number of a step on a device that has been written back: its loss, and whether it is masked"""

    def flight(self, number: int) -> Flight:
        return self._flights.setdefault(number, Flight(number))

    def open(self) -> None:
        """Makes this the only writer of the store, from before the first operation until `close`."""
        if not isinstance(self._writer, Writer):
            self._writer = self._store.open_writer()

    def close(self) -> None:
        if isinstance(self._writer, Writer):
            self._writer.close()
            self._writer = self._store

    def prefetch(self, op: Op) -> None:
        """Pulls a batch, dedups its keys, and clusters its samples into micro-batches. What goes wrong travels in the
        route's header, so that all ranks hear."""
        flight = self.flight(op.batch)
        # The first `steps` batches are needed. A later one only if some before it were no steps, which their routes
        # say: the schedule has it wait for them.
        if self._steps is not None and op.batch >= self._steps and self._num_steps_routed >= self._steps:
            return
        try:
            flight.batch = next(self._batches, None)
            flight.request = make_request(
                self._features,
                flight.batch,
                self._num_micro_batches,
                self._world.size,
                self._num_threads,
                self._clustering,
            )
        except Exception as error:
            flight.request = error

    def upload(self, op: Op) -> None:
        """To the device of the model. What cannot go there is an error of the batch."""
        flight = self.flight(op.batch)
        if isinstance(flight.request, Request):
            try:
                flight.request = on_device(self._features, flight.request, self._world.device)
                embedding_memory.add_all(flight.request)
            except Exception as error:
                flight.request = error

    def route(self, op: Op) -> None:
        flight = self.flight(op.batch)
        if self._has_ended or flight.request is None:
            return  # on every rank: they have seen the same headers
        try:
            flight.route = route_keys(flight.request, self._num_tables, self._world.route)
            if flight.route is not None:
                flight.plans = Plans.of(flight.route, self._window).to(self._world.device)
                embedding_memory.add_all(flight.plans)
                self._check_memory(flight)
        except Exception as error:
            flight.error = error
        self._has_ended = flight.route is None
        self._num_steps_routed += flight.is_step

    def _check_memory(self, flight: Flight) -> None:
        """On all ranks: raises if the batch would not fit on one of them. Nothing has been made for its rows yet."""
        if self._device_memory is None:
            return
        assert flight.route is not None
        assert flight.plans is not None
        error = self._device_memory.error(flight.number, flight.route, flight.plans) if flight.route.is_step else None
        channel = self._world.route
        failed = channel.all_to_all_equal(torch.full((channel.size, 1), int(error is not None))).flatten()
        if bool(failed.any()):
            flight.route = None
            channel.raise_agreed(error, failed.nonzero().flatten().tolist())

    def retrieve(self, op: Op) -> None:
        flight, before = self.flight(op.batch), self.flight(op.batch - 1)
        if not flight.is_step:
            return
        assert flight.route is not None
        try:
            if self._keeps_overlap and before.is_step:
                assert before.route is not None
                flight.overlap = find_overlap(before.route.owned, flight.route.owned, self._world.device)
                embedding_memory.add(*(slots for shared in flight.overlap for slots in shared.on_device))
            memory = self._memory[op.batch % 2]
            flight.buffers = retrieve_rows(flight.route, self._store, memory, flight.overlap)
            flight.problem = room_error(flight.buffers, before.buffers if self._keeps_overlap else (), self._store)
        except Exception as error:  # no memory, for example
            flight.error = error

    def begin(self, op: Op) -> None:
        """Opens the window of a batch that is a step: from here on its rows are frozen, until the update."""
        flight = self.flight(op.batch)
        if not flight.is_step:
            return
        assert flight.route is not None
        channels = self._world.rows, self._world.gradients
        flight.window = open_window(flight.route, flight.buffers, *channels, flight.plans)
        if self._stale:
            flight.rows_before = [buffer.rows.clone() for buffer in flight.buffers]

    def bring(self, op: Op) -> None:
        window = self.flight(op.batch).window
        if window is not None:
            window.bring(op.micro_batch)

    def take(self, op: Op) -> None:
        flight = self.flight(op.batch)
        if flight.window is not None:
            flight.window.take(op.micro_batch, flight.gradients.pop(op.micro_batch, {}))

    def overlap_sync(self, op: Op) -> None:
        """After the update of a batch: what the next one shares with it. Then the buffers swap roles."""
        flight, following = self.flight(op.batch), self.flight(op.batch + 1)
        if following.overlap is None or following.error is not None:
            return
        if self._fault != "skip_overlap_sync":
            sync_overlap(flight.buffers, following.buffers, following.overlap)
        following.has_unwritten = True
        if flight.rows_before is not None:
            _show_stale(following, flight.rows_before)

    def write_back(self, op: Op) -> None:
        """What stays on the device for the next batch is not written. Afterwards nobody needs this batch."""
        flight, following = self.flight(op.batch), self.flight(op.batch + 1)
        if flight.step >= 0 and not flight.is_written:
            self._write_back(flight, following)
        flight.is_written = True
        finish(self._world.device)  # nothing that was enqueued for the batch before this one is still to be done
        self._flights.pop(op.batch - 1, None)  # the one before: `retrieve` of the next still looks at this one

    def _write_back(self, flight: Flight, following: Flight) -> None:
        self._hear(flight)
        if flight.is_masked:  # it has changed nothing; but the batch before may have left rows to it
            self._write_back_inherited(flight)
            following.has_unwritten = False
            return
        stays = following.overlap if following.has_unwritten else None
        slots = None if stays is None else leaving(flight.buffers, stays)
        write_back(flight.buffers, self._writer, flight.step, slots)

    def _hear(self, flight: Flight) -> None:
        """What the device has found out about a step. Waits for it."""
        if flight.report is not None:
            loss, is_masked = download(flight.report).tolist()
            flight.report, flight.is_masked = None, is_masked > 0
            if flight.is_masked and not self._is_masked:  # the batch at fault; those after it are as good as before
                self._is_masked = flight.is_refused = True
            self.heard[flight.step] = (loss, flight.is_masked)

    def _write_back_inherited(self, flight: Flight) -> None:
        if flight.has_unwritten and flight.overlap is not None:
            step = self.flight(flight.number - 1).step
            write_back(flight.buffers, self._writer, step, [shared.here for shared in flight.overlap])
            flight.has_unwritten = False

    def flush(self) -> None:
        """Writes to the host store what only a buffer has. No host operation may be under way."""
        for number in sorted(self._flights):
            flight = self._flights[number]
            if flight.step >= 0 and not flight.is_written:
                self._write_back(flight, self._flights.get(number + 1) or Flight(number + 1))
                flight.is_written = True
            elif flight.step < 0:
                self._write_back_inherited(flight)

    def is_torn(self) -> bool:
        return self._keeps_overlap and any(flight.is_torn for flight in self._flights.values())

    def host_bytes(self, flight: Flight) -> tuple[int, int]:
        """Retrieved for a batch, and written back after it, row state included."""
        overlap, following = flight.overlap, self.flight(flight.number + 1)
        next_overlap = following.overlap if following.has_unwritten else None
        retrieved = written = 0
        for i, buffer in enumerate(flight.buffers):
            record_bytes = buffer.record_bytes
            retrieved += (len(buffer.keys) - (len(overlap[i].here) if overlap is not None else 0)) * record_bytes
            if not buffer.table.frozen:
                num_stay = len(next_overlap[i].before) if next_overlap is not None else 0
                written += (len(buffer.keys) - num_stay) * record_bytes
        return retrieved, written

    def untrained(self) -> list[Batch | Exception]:
        """What was pulled and not trained, in order: batches, and errors of reading that nobody has heard of yet. Not
        batches that are at fault themselves."""
        flights = [self._flights[number] for number in sorted(self._flights)]
        left = [f for f in flights if (f.step < 0 or f.is_masked) and not (f.is_raised or f.is_refused or f.is_skipped)]
        items = [f.request if isinstance(f.request, Exception) else f.batch for f in left]
        return [item for item in items if item is not None]


def _show_stale(following: Flight, rows_before: list[Tensor]) -> None:
    assert following.overlap is not None
    for buffer, rows, shared in zip(following.buffers, rows_before, following.overlap, strict=True):
        before, here = shared.on_device
        buffer.seen = buffer.rows.clone()
        buffer.seen.index_copy_(0, here, rows.index_select(0, before))
