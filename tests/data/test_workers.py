"""Batches that worker processes read are those that this process would read. Mutations in the docstrings were tried."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from nestpipe.data.batch import Batch, Jagged
from nestpipe.data.dataset import Batches, Dataset
from nestpipe.data.files.parquet import ParquetData
from nestpipe.data.files.schema import Schema
from nestpipe.data.negatives import WithNegatives
from nestpipe.data.synthetic.histories import HistoryData
from nestpipe.data.workers import Packed, WorkerReader

ROOT = Path(__file__).parents[2]


class Numbered:
    """Samples that are their positions. One position cannot be read."""

    def __init__(self, num_samples: int | None, bad: int = -1) -> None:
        self.num_samples = num_samples
        self.bad = bad

    def samples(self, first: int, count: int) -> Batch:
        if first <= self.bad < first + count:
            raise LookupError(f"sample {self.bad} is damaged")
        keys = Jagged.one_each(torch.arange(first, first + count))
        pids = torch.full((count,), os.getpid())
        return Batch({"a": keys, "b": Jagged(keys.values + 1, keys.offsets)}, {"pid": pids}, {"x": 0.5, "y": 2.0})


def parquet(folder: Path) -> ParquetData:
    pq.write_table(pa.table({"a": list(range(40)), "label": [0, 1] * 20}), folder / "rows.parquet", row_group_size=7)
    return ParquetData(folder, Schema(("a",), {}, {"click": "label"}), seed=3, window=2, num_epochs=2)


def tensors(batch: Batch) -> Iterator[Tensor]:
    for lists in batch.keys.values():
        yield from (lists.values, lists.offsets)
    yield from (value for name, value in batch.inputs.items() if name != "pid")


def assert_equal(one: Batch, other: Batch) -> None:
    assert list(one.keys) == list(other.keys)
    assert one.weights == other.weights
    for a, b in zip(tensors(one), tensors(other), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["histories", "parquet", "numbered"])
def test_the_batches_are_the_same(tmp_path: Path, name: str) -> None:
    """Both ranks, a ragged end, and a jump to a saved position. Fails if _slices begins at 0, or if load_state keeps
    the workers."""
    datasets: dict[str, Dataset] = {
        "histories": WithNegatives(HistoryData(1, num_samples=27), 2000, 4),
        "parquet": parquet(tmp_path),
        "numbered": Numbered(19),
    }
    generator_before = torch.get_rng_state()
    ranks = (0, 1) if name == "numbered" else (1,)
    for rank in ranks:
        here, there = (Batches(datasets[name], 4, rank, 2, num_workers) for num_workers in (0, 2))
        expected = list(here)
        first = [next(there), next(there)]
        state = there.state()
        for one, other in zip(expected, [*first, *there], strict=True):
            assert_equal(one, other)
        there.load_state(state)
        for one, other in zip(expected[2:], there, strict=True):
            assert_equal(one, other)
        if name == "numbered":
            assert os.getpid() not in {int(pid) for batch in first for pid in batch.inputs["pid"]}
            assert first[0].keys["a"].offsets is first[0].keys["b"].offsets  # as in the dataset: copied once
    assert torch.equal(torch.get_rng_state(), generator_before)


def test_errors() -> None:
    """An error comes in its turn and again if asked again; a killed process is an error that says so. Fails if
    _read_by_worker keeps the workers after an error."""
    batches = Batches(Numbered(None, bad=9), 4, num_workers=1)
    (pid,) = pids_of(batches, 2)
    for _ in range(2):
        with pytest.raises(LookupError, match="sample 9 is damaged"):
            next(batches)
    assert batches.position == 8
    batches.load_state({"position": 12})
    pid = int(next(batches).inputs["pid"][0])
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"a process that reads batches has ended.*data\.num_workers"):
        list(islice(batches, 10))
    unpicklable = Numbered(8)
    unpicklable.samples = lambda first, count: Batch({})  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"Numbered cannot be copied to other processes.*num_workers = 0"):
        next(Batches(unpicklable, 4, num_workers=1))
    with pytest.raises(ValueError, match="num_workers is -1, must be at least 0"):
        Batches(Numbered(8), 4, num_workers=-1)


def pids_of(batches: Batches, number: int) -> set[int]:
    return {int(pid) for batch in islice(batches, number) for pid in batch.inputs["pid"]}


def wait_for_end(pids: set[int]) -> bool:
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_workers_end_with_the_data() -> None:
    """Fails if __next__ keeps the workers at the end of the data."""
    batches = Batches(Numbered(12), 4, num_workers=1)
    pids = pids_of(batches, 99)
    assert batches.position == 12
    assert wait_for_end(pids)


def test_an_interrupted_batch_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if _read_by_worker keeps the workers after a KeyboardInterrupt: one may be a batch ahead."""
    batches = Batches(Numbered(None), 4, num_workers=1)
    next(batches)
    read = WorkerReader.__next__

    def interrupted(reader: WorkerReader) -> Batch:
        read(reader)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(WorkerReader, "__next__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(batches)
    assert next(batches).keys["a"].values.tolist() == [4, 5, 6, 7]


SIGNALLED = """
import os, signal
from itertools import islice
from nestpipe.data.dataset import Batches
from tests.data.test_workers import Numbered, pids_of
if __name__ == "__main__":
    received = []
    signal.signal(signal.SIGTERM, lambda *about: received.append(1))
    batches = Batches(Numbered(None), 4, num_workers=2)
    pids = pids_of(batches, 4)
    os.killpg(0, signal.SIGTERM)
    pids |= pids_of(batches, 8)
    print(len(received), *pids, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_signals_to_the_group_and_the_death_of_the_parent() -> None:
    """The workers go on after a SIGTERM to the group, and end with the process that trains. Fails if _begin_worker does
    not leave the group, or does not wait for the parent."""
    command = [sys.executable, "-c", SIGNALLED]
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True, cwd=ROOT)
    assert done.returncode == -signal.SIGKILL, done.stderr
    num_signals, *pids = map(int, done.stdout.split())
    assert (num_signals, len(pids)) == (1, 2)
    assert wait_for_end(set(pids))


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float64, torch.int16])
def test_any_tensor_is_packed(dtype: torch.dtype) -> None:
    """Empty and not contiguous ones, too. Fails if places are not multiples of 16 bytes."""
    values = torch.arange(12).view(3, 4).t().to(dtype)
    keys = {"k": Jagged.from_lists([[1], [], [-(2**63), 5], []])}
    batch = Batch(keys, {"flag": torch.tensor([True, False, True, True]), "v": values, "none": values[:, :0]})
    unpacked = Packed.of(batch).unpack()
    assert_equal(batch, unpacked)
    assert unpacked.weights == {"": 4.0}
