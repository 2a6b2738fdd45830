"""I1: no row changes inside a frozen window, from before the first row is sent to after the last gradient is returned,
nor until the update.

The host store may change meanwhile, by the write-back of the previous batch. Fails if LocalBatch._collect
writes to the resident rows (`self._groups[g][1].records += 1`), or if Stages.sum_gradients updates them
(`self.update(state, 0, 1.0, None)` at its end).
"""

import hashlib

import pytest
import torch

from nestpipe import World
from nestpipe.embedding.read import HOST
from nestpipe.pipelining.batch_state import BatchState
from nestpipe.pipelining.schedule import SCHEDULES, Op
from nestpipe.pipelining.stages import Stages
from nestpipe.store.interface import RowStore
from tests.exactness.cases import Case, SmallModel, features_of, global_batches, make_pipeline, on_ranks, share_of


def hash_of(state: BatchState, store: RowStore) -> str:
    """Returns a hash of the resident rows and their row state, and of the stored ones if these are updated instead."""
    assert state.resident is not None
    sha = hashlib.sha256()
    for rows in state.resident.groups:
        records = rows.copied(HOST)
        sha.update(records.numpy().tobytes())
        if rows.can_update_stored:
            stored = torch.empty_like(records)
            store.gather_tables(rows.group.names, rows.table_offsets, rows.keys, stored, None)
            sha.update(stored.numpy().tobytes())
    return sha.hexdigest()


def hashes(world: World, schedule: str, window: str) -> list[tuple[list[str], str]]:
    """Returns, for each step, the hashes before its first row was sent, around every exchange and dense part on any
    lane, after its last gradient was returned and after all gradients were summed; and the hash after its update."""
    case = Case("adagrad", "shared", 4, window, steps=5, schedule=schedule)
    model = SmallModel({name: feature.table.dim for name, feature in features_of(case).items()})
    seen: dict[int, list[str]] = {}

    def observed(exchange):
        def observe(self: Stages, op: Op) -> None:
            state, inside = self.state(op.batch), seen.setdefault(op.batch, [])
            if state.resident is None:  # beyond the last batch
                return
            inside.append(hash_of(state, self.store))
            exchange(self, op)
            inside.append(hash_of(state, self.store))

        return observe

    results = []
    with pytest.MonkeyPatch.context() as patch:
        for stage in ("send_rows", "return_gradients", "sum_gradients"):
            patch.setattr(Stages, stage, observed(getattr(Stages, stage)))
        with make_pipeline(world, case, share_of(global_batches(case.steps), world)) as pipeline:
            for step in pipeline:
                inside = [hash_of(step.state, pipeline.store)]
                for micro_batch in step:
                    inside.append(hash_of(step.state, pipeline.store))
                    (model(micro_batch.embeddings, micro_batch.inputs) / step.weight).backward()
                    inside.append(hash_of(step.state, pipeline.store))
                step.commit()
                if not pipeline.crosses_batches:  # else gradients of keys that the next batch does not need come later
                    step.gradients()
                inside.append(hash_of(step.state, pipeline.store))
                inside += seen.pop(step.state.number)
                step.update_rows()
                results.append((inside, hash_of(step.state, pipeline.store)))
    return results


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("window", ["once", "resend"])
@pytest.mark.parametrize("size", [1, 3])
def test_rows_are_frozen(schedule: str, window: str, size: int) -> None:
    for steps in on_ranks(size, hashes, schedule, window):
        assert len(steps) == 5
        for inside, after in steps:
            assert len(inside) >= 2 + 4 * 4  # 4 send_rows, 4 return_gradients: before and after
            assert set(inside) == {inside[0]}
            assert after not in inside
