"""What data is: samples by their position, and the batches that each rank takes of them."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from threading import Lock
from typing import Any, Protocol, TypeGuard

import torch

from nestpipe.data.batch import Batch


class WithState(Protocol):
    """Data that can go on where it was: what `state` returns, `load_state` takes."""

    def state(self) -> Mapping[str, Any]: ...
    def load_state(self, state: Mapping[str, Any]) -> None: ...


def has_state(data: object) -> TypeGuard[WithState]:
    return callable(getattr(data, "state", None)) and callable(getattr(data, "load_state", None))


Fingerprint = dict[str, str | int | bool]
"""what the order of samples depends on, by name; large things by a hash"""


class Dataset(Protocol):
    """Samples in one order for all ranks. A sample depends on the seed and on its position alone.

    It may have a method `fingerprint() -> Fingerprint`, the same on all ranks: then a state is refused that was saved
    with another order.
    """

    @property
    def num_samples(self) -> int | None:
        """None: endless."""

    def samples(self, first: int, count: int) -> Batch:
        """The samples first .. first + count - 1, which must exist; count 0: an empty batch of the same features."""


class FirstSamples(Dataset):
    """The first samples of a dataset, at most so many."""

    def __init__(self, dataset: Dataset, num_samples: int) -> None:
        self.dataset = dataset
        self._at_most = num_samples

    @property
    def num_samples(self) -> int | None:
        end = self.dataset.num_samples
        return self._at_most if end is None else min(end, self._at_most)

    def samples(self, first: int, count: int) -> Batch:
        return self.dataset.samples(first, count)

    def fingerprint(self) -> Fingerprint:
        return fingerprint_of(self.dataset)


def fingerprint_of(dataset: Dataset) -> Fingerprint:
    """Empty: it has none."""
    method: Callable[[], Fingerprint] | None = getattr(dataset, "fingerprint", None)
    return {} if method is None else method()


class Batches(Iterator[Batch]):
    """The batches of one rank: of each `batch_size * world_size` samples, the rank's `batch_size`, in order of rank.

    So the global batch of 2 ranks is the batch of 1 rank with twice the batch size. The last global batch has what is
    left, and some ranks may get a smaller or an empty part of it; then the iterator ends on all ranks together.
    """

    def __init__(self, dataset: Dataset, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}, must be at least 1")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}, must be 0 .. {world_size - 1} at world_size {world_size}")
        self.dataset = dataset
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.position = 0
        """of the first sample that no rank was given yet"""
        self._order: Fingerprint | None = None

    def __next__(self) -> Batch:
        end = self.dataset.num_samples
        if end is not None and self.position >= end:
            raise StopIteration
        first = _at_most(self.position + self.rank * self.batch_size, end)
        batch = self.dataset.samples(first, _at_most(first + self.batch_size, end) - first)
        self.position = _at_most(self.position + self.batch_size * self.world_size, end)
        return batch

    def state(self) -> dict[str, Any]:
        """Where the next batch begins, and what order that is a position of; the same on every rank; fit for JSON.

        Training pulls batches ahead, so during `Trainer.fit` this is ahead of training: use `Trainer.data_state()`.
        """
        if self._order is None:
            self._order = fingerprint_of(self.dataset)  # of all files, perhaps: too long for every batch
        return {"position": self.position, "order": self._order} if self._order else {"position": self.position}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on at a saved position; batch size and number of ranks may be others than when it was saved.

        A state that has the position alone is taken as one of this order.
        """
        position = state.get("position")
        if not isinstance(position, int) or isinstance(position, bool) or position < 0:
            raise ValueError(f"the state of data must have a 'position', an integer of at least 0, got {dict(state)}")
        end = self.dataset.num_samples
        if end is not None and position > end:
            raise ValueError(f"the state of data has position {position}, but the dataset has {end} samples only")
        _check_order(state.get("order"), fingerprint_of(self.dataset))
        self.position = position


def _check_order(saved: object, here: Fingerprint) -> None:
    if not saved or not here:
        return
    if not isinstance(saved, Mapping):
        raise ValueError(f"the state of data must have an 'order' that is a mapping, got {saved!r}")
    names = [name for name in dict.fromkeys([*saved, *here]) if saved.get(name) != here.get(name)]
    if names:
        differ = ", ".join(f"{name} was {saved.get(name)}, is {here.get(name)}" for name in names)
        raise ValueError(
            f"the state of data is of another order of samples: {differ}. Going on would train on some samples twice "
            "and on others never; set back what differs, or, to begin anew with this data, load no state of data"
        )


def _at_most(position: int, end: int | None) -> int:
    return position if end is None else min(position, end)


DREW_FROM_DEFAULT = (
    "the reader of batches drew from torch's default generator, which belongs to the model (its dropout, on another "
    "thread); give the reader one of its own, as in DataLoader(..., generator=torch.Generator().manual_seed(0))"
)


class BatchSource(Iterator[Batch]):
    """An iterator of batches to which batches can be given back, to be handed out again before the others.

    It copies what it reads: a reader may fill the same tensors again for its next batch, while this one is still under
    way. Whether it did could not be seen from outside, because writes through numpy leave no sign in a tensor.

    If the data has methods `state` and `load_state`, the source also knows the state after the last batch that was
    trained, however many have been pulled since. It calls `state()` after each batch, in the thread that pulls.
    """

    def __init__(self, batches: Iterator[Batch], data: object = None) -> None:
        """data: the iterable that the iterator came from; it may have the state instead."""
        self.batches = batches
        self._with_state = next((one for one in (batches, data) if has_state(one)), None)
        self.state = self._state()
        """the data's state after the batches trained so far; None if it has none"""
        self._later_states: deque[Mapping[str, Any] | None] = deque()
        """after each batch that was read and not trained yet"""
        self._num_advanced = 0
        """batches of this run that `state` comes after"""
        self._returned: deque[Batch | Exception] = deque()
        self._lock = Lock()
        self._is_begun = False

    def __next__(self) -> Batch:
        return self.pull(lambda: False)

    def pull(self, is_late: Callable[[], bool]) -> Batch:
        """The next one. If nobody waits for it any more when it has been read, it is for the next who asks."""
        with self._lock:  # two threads, if a run was given up while its reader was busy
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
        except Exception as error:  # takes the place of the batch, as an error of the reader does
            item, state = error, None
        self._later_states.append(state)
        return item

    def _state(self) -> Mapping[str, Any] | None:
        """A copy: the data may go on to change what it has returned."""
        if self._with_state is None:
            return None
        state = self._with_state.state()
        if not isinstance(state, Mapping):
            raise ValueError(f"state() of {type(self._with_state).__name__} returned {state!r}, must return a mapping")
        return deepcopy(state)

    def _read_item(self) -> Batch | Exception:
        if self._is_begun:
            return _next_or_error(self.batches)
        self._is_begun = True
        # Nothing else is under way yet: who changes the default generator now is the reader. Later it would change the
        # dropout of the model, which trains meanwhile.
        before = torch.get_rng_state()
        item = _next_or_error(self.batches)
        return item if torch.equal(before, torch.get_rng_state()) else RuntimeError(DREW_FROM_DEFAULT)

    def give_back(self, items: Sequence[Batch | Exception]) -> None:
        """In the order in which they are to come; an exception is raised when it is its turn."""
        self._returned.extendleft(reversed(items))

    def advance_to(self, num_batches: int) -> None:
        """The run has trained this many batches, or passed over them. Never waits for a read.

        A rank whose data has ended takes part in the steps of others; its state stays where the data ended.
        """
        while self._num_advanced < num_batches and self._later_states:
            self.state = self._later_states.popleft()
            self._num_advanced += 1

    def begin_run(self) -> None:
        """`advance_to` counts from here."""
        self._num_advanced = 0


class BatchReader(Iterator[Batch]):
    """The batches of a source for one run. Once it has stopped, what is still being read stays in the source."""

    def __init__(self, source: BatchSource) -> None:
        source.begin_run()
        self.num_pulled = 0
        """batches this run was given, and errors that took the place of one"""
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


def _next_or_error(batches: Iterator[Batch]) -> Batch | Exception:
    try:
        batch = next(batches)
        return batch.clone() if isinstance(batch, Batch) else batch
    except StopIteration:
        raise
    except Exception as error:  # of the reader: raised where it is its turn
        return error
