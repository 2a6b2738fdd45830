"""Writes by users while rows are being trained are refused, or have no effect, in every schedule."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy
import pytest
import torch

from nestpipe import Trainer, World
from nestpipe.data import Batch, Jagged
from nestpipe.pipelining.pipeline import Pipeline
from nestpipe.pipelining.schedule import SCHEDULES
from nestpipe.store import DictStore, HostStore, Piece, TableSpec
from nestpipe.train.fit_result import FitResult
from tests.exactness.cases import GLOBAL_BATCH, NUM_KEYS, Case, global_batches, make_trainer, share_of
from tests.ranks import run_ranks

CASE = Case("adagrad", "pooled_sum", 1, steps=6)
KEYS = torch.arange(3)


def scatter(store: HostStore, name: str) -> None:
    store.scatter(name, KEYS, store.gather(name, KEYS).records, step=1)


def scatter_tables(store: HostStore, name: str) -> None:
    store.scatter_tables([name], torch.tensor([0, 3]), KEYS, store.gather(name, KEYS).records, None, step=1)


def import_piece(store: HostStore, name: str) -> None:
    store.import_piece(name, 0, 65536, Piece(KEYS, store.gather(name, KEYS).records, torch.ones_like(KEYS)))


WRITES: dict[str, Callable[[HostStore, str], object]] = {
    "erase": lambda store, name: store.erase(name, KEYS),
    "scatter": scatter,
    "scatter_tables": scatter_tables,
    "import_piece": import_piece,
}


class Every:
    def __init__(self, function: Callable[[Trainer], object]) -> None:
        self.every = 2
        self.function = function

    def __call__(self, trainer: Trainer, result: FitResult) -> bool:
        self.function(trainer)
        return False


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_writes_to_the_store_within_fit(schedule: str) -> None:
    """Fails if Pipeline.__iter__ does not open the stages, or if HostStore.erase (...) does not check."""
    trainer = make_trainer(World(), replace(CASE, schedule=schedule))
    for name, write in WRITES.items():
        with pytest.raises(RuntimeError, match=rf"^{name} was called on a store .* Call it between two calls of fit"):
            trainer.fit(global_batches(4), callbacks=[Every(lambda trainer, write=write: write(trainer.store, "item"))])
        num_rows = trainer.store.size("item")
        write(trainer.store, "item")  # between two calls of fit
        assert trainer.store.size("item") == num_rows - (name == "erase") * len(KEYS)
        trainer.fit(global_batches(1))
    trainer.fit(global_batches(4), callbacks=[Every(lambda trainer: trainer.store.gather("item", KEYS))])


@pytest.mark.parametrize("make", [HostStore, DictStore])
def test_a_store_has_one_writer(make: type[HostStore] | type[DictStore]) -> None:
    """Fails if WriteAccess.close forgets another's writer, or open does not look for one."""
    store = make()
    store.create_table(TableSpec("item", 2))
    records = torch.ones(3, 2)
    for _ in range(2):
        writer = store.open_writer()
        with pytest.raises(RuntimeError, match="another fit or pipeline is open on this store"):
            store.open_writer()
        for name, write in WRITES.items():
            with pytest.raises(RuntimeError, match=f"{name} was called on a store"):
                write(store, "item")
        writer.scatter_tables(("item",), torch.tensor([0, 3]), KEYS, 2 * records, None, 5)
        assert torch.equal(store.gather("item", KEYS).records, 2 * records)
        writer.close()
        writer.close()
        assert store.erase("item", KEYS) == 3
    first = store.open_writer()
    first.close()
    second = store.open_writer()
    first.close()
    with pytest.raises(RuntimeError, match="erase"):
        store.erase("item", KEYS)
    second.close()


def nested_fit(world: World, schedule: str) -> list[str]:
    """Returns the errors of a fit within fit, in a callback and in after_step."""
    messages = []
    for place in ("callbacks", "after_step"):
        trainer = make_trainer(world, replace(CASE, schedule=schedule))
        again = lambda _, trainer=trainer: trainer.fit(share_of(global_batches(2), world))  # noqa: E731
        options = {"callbacks": [Every(again)]} if place == "callbacks" else {"after_step": again}
        try:
            trainer.fit(share_of(global_batches(CASE.steps), world), **options)
            messages.append("trained")
        except RuntimeError as error:
            messages.append(str(error))
        if world.size > 1:  # ranks that failed are not used again
            break
    return messages


@pytest.mark.parametrize(("size", "schedule"), [(1, "serial"), (1, "inter"), (2, "nested")])
def test_fit_within_fit(size: int, schedule: str) -> None:
    """Fails if Trainer.fit does not refuse to be called within fit."""
    results = [nested_fit(World(), schedule)] if size == 1 else run_ranks(size, nested_fit, schedule)
    for messages in results:
        assert all("fit was called within fit; call it between two calls of fit" in message for message in messages)


def test_two_trainers_of_one_store_take_turns() -> None:
    """Each sees what the other wrote. Fails if Pipeline._end does not close the stages."""
    batches, digests = global_batches(6), []
    for schedule in ("serial", "inter"):
        first, second = (make_trainer(World(), replace(CASE, schedule=schedule)) for _ in range(2))
        second.store = first.store
        for i in range(0, 6, 2):
            (first, second)[i // 2 % 2].fit(batches[i : i + 2])
        digests.append((first.digest(), second.digest()))
        with pytest.raises(RuntimeError, match="another fit or pipeline is open on this store"):
            first.fit(batches, callbacks=[Every(lambda _, second=second: second.fit(batches))])
        second.fit(batches)
    assert digests[0] == digests[1]


def test_an_own_loop_is_left_before_the_store_is_written() -> None:
    trainer = make_trainer(World(), CASE)
    with Pipeline(trainer.features, global_batches(3), store=trainer.store) as steps:
        for _ in steps:
            with pytest.raises(RuntimeError, match="outside of the pipeline's `with` block"):
                trainer.store.erase("item", KEYS)
            break
    assert trainer.store.erase("item", KEYS) == 0


class Refilled:
    """Yields one batch again and again, each time filled with new numbers by numpy, which tensors do not notice."""

    def __init__(self, num_batches: int, is_fresh: bool) -> None:
        self.num_batches = num_batches
        self.is_fresh = is_fresh

    def __iter__(self) -> Iterator[Batch]:
        draws = numpy.random.default_rng(0)
        keys, label = numpy.zeros((2, GLOBAL_BATCH), dtype=numpy.int64), numpy.zeros(GLOBAL_BATCH)
        weights, offsets = numpy.zeros((2, GLOBAL_BATCH)), numpy.zeros(GLOBAL_BATCH + 1, dtype=numpy.int64)
        offsets[-1] = GLOBAL_BATCH
        jagged = [Jagged(*map(torch.from_numpy, (keys[i], offsets, weights[i]))) for i in range(2)]
        batch = Batch(dict(zip(("items", "tags"), jagged, strict=True)), {"label": torch.from_numpy(label)}, {"": 1.0})
        for _ in range(self.num_batches):
            keys[:] = draws.integers(0, NUM_KEYS, keys.shape)
            offsets[1:-1] = numpy.sort(draws.integers(0, GLOBAL_BATCH, GLOBAL_BATCH - 1))
            weights[:] = draws.random(weights.shape)
            label[:] = draws.integers(0, 2, label.shape)
            batch.weight[""] = 20 + draws.random()
            yield batch.clone() if self.is_fresh else batch


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_a_reader_may_fill_its_tensors_again(num_micro_batches: int) -> None:
    """Also if a callback stops the training, and batches that were pulled are given back.

    Fails if BatchSource does not copy what it reads, or Batch.clone forgets offsets, weights, inputs or the weight.
    """
    digests = set()
    for schedule in SCHEDULES:
        for is_fresh in (True, False):
            case = replace(CASE, schedule=schedule, num_micro_batches=num_micro_batches)
            trainer, batches = make_trainer(World(), case), iter(Refilled(9, is_fresh))
            trainer.check_split = schedule != "intra"  # pulls the first batch ahead of time
            trainer.fit(batches, callbacks=[StopAtFour()])
            trainer.fit(batches)
            assert trainer.num_steps == 9
            digests.add(trainer.digest())
    assert len(digests) == 1


class StopAtFour:
    every = 4

    def __call__(self, trainer: Trainer, result: FitResult) -> bool:
        return trainer.num_steps == 4


def test_a_clone_has_memory_of_its_own_and_shares_within() -> None:
    offsets, column = torch.arange(5), torch.arange(8).view(4, 2)[:, 1]
    inputs = {"x": torch.rand(4, 3, dtype=torch.bfloat16), "y": torch.ones(4, 0), "z": torch.rand(4, 2).T.T[:, ::2]}
    batch = Batch({"a": Jagged(column, offsets), "b": Jagged(torch.arange(4), offsets)}, inputs)
    clone = batch.clone()
    assert clone.keys["a"].offsets is clone.keys["b"].offsets
    pairs = [(batch.inputs[name], clone.inputs[name]) for name in inputs]
    pairs += [(batch.keys[name].values, clone.keys[name].values) for name in "ab"] + [
        (offsets, clone.keys["a"].offsets)
    ]
    for before, after in pairs:
        assert torch.equal(before, after)
        assert before.dtype == after.dtype
        assert after.numel() == 0 or before.data_ptr() != after.data_ptr()


@pytest.mark.parametrize("capacity", ["minimum", 10**6])
def test_two_trainers_take_turns_on_one_store(capacity: int | str) -> None:
    """Each finds the rows of the other. Fails if RowPool.open keeps rows although others have written to the store."""
    digests = []
    for schedule, resident_bytes in (("serial", None), ("nested", capacity)):
        case = Case("adam", "shared", 2, schedule=schedule)
        trainers = [make_trainer(World(), case, resident_bytes=resident_bytes) for _ in range(2)]
        trainers[1].store = trainers[0].store
        batches = global_batches(12)
        for turn in range(6):
            trainers[turn % 2].fit(batches[2 * turn : 2 * turn + 2])
        digests.append([trainer.digest() for trainer in trainers])
    assert digests[0] == digests[1]
