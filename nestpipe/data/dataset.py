"""Datasets give samples by position; each rank takes its batches from them."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import torch

from nestpipe.data.batch import Batch

if TYPE_CHECKING:
    from nestpipe.data.workers import WorkerReader


class WithState(Protocol):
    """Data that can continue from a saved state: `load_state` takes what `state` returned."""

    def state(self) -> Mapping[str, Any]: ...
    def load_state(self, state: Mapping[str, Any]) -> None: ...


def has_state(data: object) -> TypeGuard[WithState]:
    return callable(getattr(data, "state", None)) and callable(getattr(data, "load_state", None))


Fingerprint = dict[str, str | int | bool]
"""Everything that the order of samples depends on, by name; large values as hashes."""


class Dataset(Protocol):
    """Samples in one order for all ranks. A sample depends on the seed and on its position alone.

    A dataset may have a method `fingerprint() -> Fingerprint`, equal on all ranks. Then a state that was saved with
    another order is refused.
    """

    @property
    def num_samples(self) -> int | None:
        """None if the data is endless."""

    def samples(self, first: int, count: int) -> Batch:
        """Returns samples first .. first + count - 1, which must exist. An empty batch has the same features."""


class FirstSamples(Dataset):
    """The first samples of a dataset, at most num_samples."""

    def __init__(self, dataset: Dataset, num_samples: int) -> None:
        self.dataset = dataset
        self._limit = num_samples

    @property
    def num_samples(self) -> int | None:
        end = self.dataset.num_samples
        return self._limit if end is None else min(end, self._limit)

    def samples(self, first: int, count: int) -> Batch:
        return self.dataset.samples(first, count)

    def fingerprint(self) -> Fingerprint:
        return fingerprint_of(self.dataset)


def fingerprint_of(dataset: Dataset) -> Fingerprint:
    """Returns the fingerprint of a dataset; empty if it has none."""
    method: Callable[[], Fingerprint] | None = getattr(dataset, "fingerprint", None)
    return {} if method is None else method()


@dataclass(frozen=True)
class _Slices:
    """The parts of the global batches that one rank reads."""

    dataset: Dataset
    batch_size: int
    rank: int
    world_size: int

    def at(self, position: int) -> tuple[int, int, int]:
        """Returns the first sample of this rank's part of the global batch at a position, the number of its samples,
        and the position of the next global batch: the same at the end of the data."""
        end = self.dataset.num_samples
        first = _at_most(position + self.rank * self.batch_size, end)
        count = _at_most(first + self.batch_size, end) - first
        return first, count, _at_most(position + self.batch_size * self.world_size, end)

    def after(self, position: int) -> Iterator[tuple[int, int]]:
        """Yields first sample and number of samples of each part, from a position on."""
        while True:
            first, count, following = self.at(position)
            if following == position:
                return
            yield first, count
            position = following


class Batches(Iterator[Batch]):
    """The batches of one rank. Each `batch_size * world_size` samples are divided among the ranks, in order of rank.

    So the global batch of 2 ranks is the batch of 1 rank with twice the batch size. The last global batch has the
    remaining samples; some ranks may get a smaller or an empty part of it. The iterator ends on all ranks together.
    """

    def __init__(
        self, dataset: Dataset, batch_size: int, rank: int = 0, world_size: int = 1, num_workers: int = 0
    ) -> None:
        """num_workers: processes that read batches ahead; 0 reads in this one. The batches are the same."""
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}, must be at least 1")
        if num_workers < 0:
            raise ValueError(f"num_workers is {num_workers}, must be at least 0")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}, must be 0 .. {world_size - 1} at world_size {world_size}")
        self.dataset = dataset
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.num_workers = num_workers
        self.position = 0
        """Position of the first sample that no rank was given yet."""
        self._slices = _Slices(dataset, batch_size, rank, world_size)
        self._order: Fingerprint | None = None
        self._workers: WorkerReader | None = None
        """Processes that read from `position` on; None before the first batch, and after an error or a jump."""

    def __next__(self) -> Batch:
        first, count, following = self._slices.at(self.position)
        if following == self.position:
            self._workers = None  # they have nothing more to read
            raise StopIteration
        batch = self.dataset.samples(first, count) if self.num_workers == 0 else self._read_by_worker()
        self.position = following
        return batch

    def _read_by_worker(self) -> Batch:
        if self._workers is None:
            from nestpipe.data.workers import WorkerReader  # takes time to import

            self._workers = WorkerReader(self.dataset, self._slices.after(self.position), self.num_workers)
        try:
            return next(self._workers)
        except BaseException:  # a further call reads the same batch again, as it does without workers
            self._workers = None
            raise

    def state(self) -> dict[str, Any]:
        """Returns the position of the next batch, and the fingerprint of the order. Equal on every rank; fit for JSON.

        Training reads batches ahead, so during `Trainer.fit` this is ahead of training: use `Trainer.data_state()`.
        """
        if self._order is None:
            self._order = fingerprint_of(self.dataset)  # it may cover all files: too slow for every batch
        return {"position": self.position, "order": self._order} if self._order else {"position": self.position}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved position. Batch size and number of ranks may differ from those of the saving run.

        A state without a fingerprint is taken as one of this order.
        """
        position = state.get("position")
        if not isinstance(position, int) or isinstance(position, bool) or position < 0:
            raise ValueError(f"the state of data must have a 'position', an integer of at least 0, got {dict(state)}")
        end = self.dataset.num_samples
        if end is not None and position > end:
            raise ValueError(f"the state of data has position {position}, but the dataset has {end} samples only")
        _check_order(state.get("order"), fingerprint_of(self.dataset))
        self.position, self._workers = position, None


def _check_order(saved: object, current: Fingerprint) -> None:
    if not saved or not current:
        return
    if not isinstance(saved, Mapping):
        raise ValueError(f"the state of data must have an 'order' that is a mapping, got {saved!r}")
    names = [name for name in dict.fromkeys([*saved, *current]) if saved.get(name) != current.get(name)]
    if names:
        differ = ", ".join(f"{name} was {saved.get(name)}, is {current.get(name)}" for name in names)
        raise ValueError(
            f"the state of data is of another order of samples: {differ}. Going on would train on some samples twice "
            "and on others never; set back what differs, or, to begin anew with this data, load no state of data"
        )


def _at_most(position: int, end: int | None) -> int:
    return position if end is None else min(position, end)


def check_positions(first: int, count: int, end: int | None) -> None:
    """Raises if a dataset of `end` samples does not have the samples first .. first + count - 1."""
    if first < 0 or count < 0 or (end is not None and first + count > end):
        positions = "at least 0" if end is None else f"0 .. {end - 1}"
        raise ValueError(f"{count} samples from position {first} on were asked for; positions are {positions}")


DREW_FROM_DEFAULT = (
    "the reader of batches drew from torch's default generator, which belongs to the model (its dropout, on another "
    "thread); give the reader one of its own, as in DataLoader(..., generator=torch.Generator().manual_seed(0))"
)


class BatchSource(Iterator[Batch]):
    """An iterator of batches to which batches can be given back. Those are handed out again before the others.

    It copies every batch, because a reader may fill the same tensors again for its next batch while this one is still
    in the pipeline. That could not be detected: writes through numpy leave no sign in a tensor.

    If the data has methods `state` and `load_state`, the source also knows the state after the last batch that was
    trained, however many have been read since. It calls `state()` after each batch, in the thread that reads.
    """

    def __init__(
        self, batches: Iterator[Batch], data: object = None, copy: Callable[[Batch], Batch] = Batch.clone
    ) -> None:
        """data: the iterable that the iterator came from, in case that one has the state. copy: copies a batch."""
        self.batches = batches
        self._copy = copy
        self._with_state = next((candidate for candidate in (batches, data) if has_state(candidate)), None)
        self.state = self._state()
        """The data's state after the batches trained so far; None if it has none."""
        self._later_states: deque[Mapping[str, Any] | None] = deque()
        """States after each batch that was read and not trained yet."""
        self._num_advanced = 0
        """Batches of this run that `state` includes."""
        self._returned: deque[Batch | Exception] = deque()
        self._lock = Lock()
        self._is_begun = False

    def __next__(self) -> Batch:
        return self.pull(lambda: False)

    def pull(self, is_late: Callable[[], bool]) -> Batch:
        """Returns the next batch. If `is_late()` once it has been read, the batch is kept for the next call instead."""
        with self._lock:  # two threads may call, if a run ended while its reader was busy
            item = self._returned.popleft() if self._returned else self._read()
            if is_late():
                self._returned.append(item)
                raise StopIteration
        if isinstance(item, Exception):
            raise item
        return item

    def _read(self) -> Batch | Exception:
        item = self._read_item()
        try:
            state = self._state()
        except Exception as error:  # raised in place of the batch, like an error of the reader
            item, state = error, None
        self._later_states.append(state)
        return item

    def _state(self) -> Mapping[str, Any] | None:
        """Returns a copy of the state, because the data may change the object that it has returned."""
        if self._with_state is None:
            return None
        state = self._with_state.state()
        if not isinstance(state, Mapping):
            raise ValueError(f"state() of {type(self._with_state).__name__} returned {state!r}, must return a mapping")
        return deepcopy(state)

    def _read_item(self) -> Batch | Exception:
        if self._is_begun:
            return self._next_or_error()
        self._is_begun = True
        # The model does not train yet, so only the reader can change the default generator now. If it did so later, it
        # would change the model's dropout.
        before = torch.get_rng_state()
        item = self._next_or_error()
        return item if torch.equal(before, torch.get_rng_state()) else RuntimeError(DREW_FROM_DEFAULT)

    def _next_or_error(self) -> Batch | Exception:
        try:
            batch = next(self.batches)
            return self._copy(batch) if isinstance(batch, Batch) else batch
        except StopIteration:
            raise
        except Exception as error:  # the reader's error, raised in its turn
            return error

    def give_back(self, items: Sequence[Batch | Exception]) -> None:
        """Returns batches to the source, in the order in which they are to come. An exception is raised in its turn."""
        self._returned.extendleft(reversed(items))

    def advance_to(self, num_batches: int) -> None:
        """Advances `state` to this number of batches, trained or skipped in this run. Never waits for a read.

        A rank whose data has ended takes part in the steps of others; its state stays where the data ended.
        """
        while self._num_advanced < num_batches and self._later_states:
            self.state = self._later_states.popleft()
            self._num_advanced += 1

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Moves the data to a saved state, if it has a method for that."""
        if self._with_state is not None:
            self._with_state.load_state(state)
            self.state = self._state()

    def begin_run(self) -> None:
        """Makes `advance_to` count from the present state."""
        self._num_advanced = 0


class BatchReader(Iterator[Batch]):
    """The batches of a source for one run. A batch that is still being read when the run stops stays in the source."""

    def __init__(self, source: BatchSource) -> None:
        source.begin_run()
        self.num_pulled = 0
        """Batches that this run was given, including errors in place of one."""
        self._source = source
        self._is_stopped = False

    def __next__(self) -> Batch:
        try:
            batch = self._source.pull(lambda: self._is_stopped)
        except Exception as error:
            self.num_pulled += not isinstance(error, StopIteration)
            raise
        self.num_pulled += 1
        return batch

    def stop(self) -> None:
        self._is_stopped = True

    def state_after(self, num_batches: int) -> Mapping[str, Any] | None:
        """Returns the data's state after this number of batches of the run; None if it has none."""
        self._source.advance_to(num_batches)
        return self._source.state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Moves the data to a saved state. No batch may have been read yet."""
        self._source.load_state(state)
