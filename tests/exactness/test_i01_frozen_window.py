"""I1: no row changes inside a frozen window, from before the first row is read to after the last gradient is returned.

The host store may change meanwhile: what the batch before leaves behind is written back. Fails if Window.take adds the
returned gradients to the buffer's rows instead of to the slots.
"""

import hashlib

import pytest

from nestpipe import World
from nestpipe.embedding.buffer import Buffer
from nestpipe.embedding.local_window import LocalWindow
from nestpipe.embedding.window import Window
from nestpipe.pipelining.pipeline import SCHEDULES
from tests.exactness.cases import Case, SmallModel, features_of, global_batches, make_pipeline, on_ranks, share_of


def hash_of(buffers: list[Buffer]) -> str:
    """Of rows and row state."""
    sha = hashlib.sha256()
    for buffer in buffers:
        sha.update(buffer.records.numpy().tobytes())
    return sha.hexdigest()


def hashes(world: World, schedule: str, window: str) -> list[tuple[list[str], str]]:
    """For each step: the hashes before its first row was read, around every exchange and dense part, on whichever
    lane, and after its last gradient was returned; and the one after its update."""
    case = Case("adagrad", "shared", 4, window, steps=5, schedule=schedule)
    model = SmallModel({name: feature.table.dim for name, feature in features_of(case).items()})
    seen: dict[int, list[str]] = {}

    def observed(exchange):
        def observe(self: Window | LocalWindow, *arguments) -> None:
            inside = seen.setdefault(id(self), [])
            inside.append(hash_of(self.buffers))
            exchange(self, *arguments)
            inside.append(hash_of(self.buffers))

        return observe

    results = []
    with pytest.MonkeyPatch.context() as patch:
        for kind in (Window, LocalWindow):
            patch.setattr(kind, "bring", observed(kind.bring))
            patch.setattr(kind, "take", observed(kind.take))
        with make_pipeline(world, case, share_of(global_batches(case.steps), world)) as pipeline:
            for step in pipeline:
                inside = [hash_of(step.buffers)]
                for micro_batch in step:
                    inside.append(hash_of(step.buffers))
                    (model(micro_batch.embeddings, micro_batch.inputs) / step.weight).backward()
                    inside.append(hash_of(step.buffers))
                inside.append(hash_of(step.buffers))
                inside += seen.pop(id(step._window))
                step.update_rows()
                results.append((inside, hash_of(step.buffers)))
    return results


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("window", ["once", "resend"])
@pytest.mark.parametrize("size", [1, 3])
def test_rows_are_frozen(schedule: str, window: str, size: int) -> None:
    for of_rank in on_ranks(size, hashes, schedule, window):
        assert len(of_rank) == 5
        for inside, after in of_rank:
            assert len(inside) >= 2 + 4 * 4  # each of 4 brings and 4 takes, before and after
            assert set(inside) == {inside[0]}
            assert after not in inside
